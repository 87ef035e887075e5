//! Where layers find the weights that a checkpoint holds quantised, and how they become weights of products.

use std::fmt;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::{DType, Result};
use rayon::prelude::*;

use super::ordered::in_order_of_down;
use super::{LogicalRows, QuantMatrix, QuantPart, QuantRows, QuantUse, StoredPart};
#[cfg(feature = "cuda")]
use crate::cuda::{Staging, quant::DevicePack};
use crate::exec::Exec;
use crate::scheme::QuantScheme;
use crate::weight::Weight;

/// A checkpoint of which some modules are quantised, as one rank sees it.
pub trait QuantSource: fmt::Debug + Send + Sync {
    /// How a module's matrix is quantised: [`QuantScheme::NONE`] for floats.
    ///
    /// # Errors
    /// A header that contradicts the file.
    fn scheme(&self, module: &str) -> Result<QuantScheme>;

    /// The part of a module's matrix that this rank holds; `None` if the file has it in floats.
    ///
    /// # Errors
    /// Tensors that are not what the header says; a cut through a group.
    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>>;

    /// Page-locked buffers through which packed weights reach the device of `ex`; `None`: each pack makes its own.
    ///
    /// # Errors
    /// Memory that the system or the driver refuses.
    #[cfg(feature = "cuda")]
    fn staging(&self, ex: &Exec) -> Result<Option<Arc<Staging>>> {
        let _ = ex;
        Ok(None)
    }
}

/// What [`Weight::quantised`] found, or [`Weight::quantised_experts`].
#[derive(Clone, Debug)]
pub enum Opened<T = Weight> {
    /// A packed weight, or the two of experts.
    Packed(T),
    /// All modules are stored in floats.
    Floats,
    /// Some are quantised, but no kernel reads them together; says why.
    Apart(String),
}

impl Weight {
    /// Packs matrices [E, N, K] of a source for products with activations of `dtype` on the device of `ex`. Each of the E is a list of modules
    /// whose rows lie under each other, as q, k and v or gate and up do. A matrix that is not for experts is one, and its
    /// weight has dims [N, K].
    ///
    /// # Errors
    /// What the source reports; no module; matrices of different shapes.
    pub fn quantised(
        source: &dyn QuantSource,
        matrices: &[Vec<String>],
        usage: QuantUse,
        dtype: DType,
        ex: &Exec,
    ) -> Result<Opened> {
        Ok(match open(source, matrices)? {
            Opened::Packed(matrices) => Opened::Packed(pack(source, matrices, usage, dtype, ex)?),
            Opened::Floats => Opened::Floats,
            Opened::Apart(why) => Opened::Apart(why),
        })
    }

    /// [`quantised`](Self::quantised) for experts: gate and up of each, then down, whose inputs are what gate and up
    /// make. On a device these inputs come in the order of down's columns, so that act-order costs down nothing.
    ///
    /// # Errors
    /// As [`quantised`](Self::quantised).
    pub fn quantised_experts(
        source: &dyn QuantSource,
        [gate_up, down]: [&[Vec<String>]; 2],
        segments: usize,
        dtype: DType,
        ex: &Exec,
    ) -> Result<Opened<[Self; 2]>> {
        let (mut gate_up, mut down) = match (open(source, gate_up)?, open(source, down)?) {
            (Opened::Packed(gate_up), Opened::Packed(down)) => (gate_up, down),
            (Opened::Floats, _) => return Ok(Opened::Floats),
            (Opened::Apart(why), _) | (_, Opened::Apart(why)) => return Ok(Opened::Apart(why)),
            (_, Opened::Floats) => {
                return Ok(Opened::Apart(format!(
                    "{} is stored in floats, gate and up are quantised",
                    down[0].concat()
                )));
            }
        };
        if ex.is_cuda() {
            (gate_up, down) = in_order_of_down(gate_up, down);
        }
        let w13 = pack(source, gate_up, QuantUse::GateUp, dtype, ex)?;
        let w2 = pack(source, down, QuantUse::RowParallel { segments }, dtype, ex)?;
        Ok(Opened::Packed([w13, w2]))
    }
}

/// Opens matrices of one scheme and one range of inputs, as [`Weight::quantised`] packs them.
fn open<'a>(source: &'a dyn QuantSource, matrices: &[Vec<String>]) -> Result<Opened<Vec<QuantPart<'a>>>> {
    let mut stacks = Vec::with_capacity(matrices.len());
    let mut floats = None;
    for module in matrices.iter().flatten() {
        if source.scheme(module)? == QuantScheme::NONE {
            floats = Some(module);
        } else if let Some(floats) = floats {
            return Ok(Opened::Apart(format!("{floats} is stored in floats, {module} is quantised")));
        }
    }
    // There may be thousands of modules, whose headers are looked up and compared.
    let open = |modules: &Vec<String>| {
        let opened = modules.iter().map(|module| source.open(module));
        opened.collect::<Result<Vec<_>>>()
    };
    let opened: Vec<_> = matrices.par_iter().map(open).collect();
    for (modules, opened) in matrices.iter().zip(opened) {
        let mut parts = Vec::with_capacity(modules.len());
        for (module, opened) in modules.iter().zip(opened?) {
            match opened {
                Some(part) => parts.push(part),
                None if parts.is_empty() && stacks.is_empty() => return Ok(Opened::Floats),
                None => return Ok(Opened::Apart(format!("{module} is stored in floats"))),
            }
        }
        match Stack::new(parts) {
            Ok(stack) => {
                let inputs = stack.inputs.clone();
                stacks.push(QuantPart { rows: Box::new(stack) as Box<dyn QuantRows + 'a>, inputs });
            }
            Err(why) => return Ok(Opened::Apart(format!("{}: {why}", modules.join(", ")))),
        }
    }
    let Some(first) = stacks.first() else { return Ok(Opened::Floats) };
    let scheme = first.rows.scheme();
    let differs = |part: &QuantPart| part.rows.scheme() != scheme || part.inputs != first.inputs;
    if let Some(other) = stacks.iter().position(differs) {
        return Ok(Opened::Apart(format!(
            "{} is {}, others are {scheme}",
            matrices[other].join(", "),
            stacks[other].rows.scheme()
        )));
    }
    Ok(Opened::Packed(stacks))
}

/// Packs what [`open`] has found.
fn pack(
    source: &dyn QuantSource,
    matrices: Vec<QuantPart<'_>>,
    usage: QuantUse,
    dtype: DType,
    ex: &Exec,
) -> Result<Weight> {
    let inputs = matrices.first().map_or(0..0, |part| part.inputs.clone());
    let rows: Vec<_> = matrices.iter().map(|part| part.rows.as_ref() as &dyn QuantRows).collect();
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let pack = DevicePack::pack(&rows, &inputs, usage, source.staging(ex)?, ex)?;
        // Readers give back what they hold of their files.
        matrices.into_par_iter().for_each(drop);
        return Weight::of_device_pack(pack, dtype);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = source;
    Weight::of_quantised(QuantMatrix::pack_inputs(&rows, inputs, usage, ex)?, dtype)
}

/// Matrices of one scheme and one order of columns under each other.
pub(super) struct Stack<'a> {
    parts: Vec<Box<dyn QuantRows + 'a>>,
    inputs: Range<usize>,
}

impl<'a> Stack<'a> {
    /// Fails, with the reason, if the matrices cannot share their columns.
    pub(super) fn new(parts: Vec<QuantPart<'a>>) -> std::result::Result<Self, String> {
        let Some(first) = parts.first() else { return Err("no matrix".to_string()) };
        let inputs = first.inputs.clone();
        let scheme = first.rows.scheme();
        for part in &parts {
            if part.rows.scheme() != scheme {
                return Err(format!("one is {scheme}, another {}", part.rows.scheme()));
            }
            if part.rows.perm() != first.rows.perm()
                || part.rows.shape().1 != first.rows.shape().1
                || part.inputs != inputs
            {
                return Err("their columns belong to groups in different orders".to_string());
            }
        }
        Ok(Self { parts: parts.into_iter().map(|part| part.rows).collect(), inputs })
    }
}

impl QuantRows for Stack<'_> {
    fn shape(&self) -> (usize, usize) {
        (self.parts.iter().map(|part| part.shape().0).sum(), self.parts[0].shape().1)
    }

    fn scheme(&self) -> QuantScheme {
        self.parts[0].scheme()
    }

    fn perm(&self) -> Option<&[u32]> {
        self.parts[0].perm()
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let mut first = 0;
        let mut more = LogicalRows::default();
        let mut is_empty = true;
        for part in &self.parts {
            let end = first + part.shape().0;
            let here = rows.start.max(first)..rows.end.min(end);
            if here.start < here.end {
                let here = here.start - first..here.end - first;
                if std::mem::take(&mut is_empty) {
                    part.read(here, out)?;
                } else {
                    part.read(here, &mut more)?;
                    out.append(&more);
                }
            }
            first = end;
        }
        if is_empty {
            *out = LogicalRows::default();
        }
        Ok(())
    }

    fn stored(&self) -> std::result::Result<Vec<StoredPart<'_>>, String> {
        let mut all = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            all.extend(part.stored()?);
        }
        Ok(all)
    }
}
