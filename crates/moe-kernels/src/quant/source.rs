//! The interface by which layers find the quantised weights of a checkpoint, and how these become weights of products.

use std::fmt;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::{DType, Result};
use rayon::prelude::*;

use super::ordered::in_order_of_down;
use super::{LogicalRows, QuantMatrix, QuantPart, QuantRows, QuantStack, QuantUse, StoredPart};
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

/// The result of [`Weight::quantised`] and of [`Weight::quantised_experts`].
// This enum is exhaustive: a loader must handle each outcome.
#[derive(Clone, Debug)]
pub enum Opened<T = Weight> {
    /// A packed weight, or the two packed weights of experts.
    Packed(T),
    /// All modules are stored in floats.
    Floats,
    /// Some modules are quantised, but no kernel reads them together. The text says why.
    Apart(String),
}

impl Weight {
    /// Packs matrices [E, N, K] of a source for products with activations of `dtype` on the device of `ex`. Each of the
    /// E matrices is a list of modules, such as q, k and v or gate and up, whose rows follow each other. A matrix that
    /// is not for experts is the only one, and its weight has dims [N, K].
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
        Ok(match open(source, matrices, usage, ex)? {
            Opened::Packed(matrices) => Opened::Packed(pack(source, matrices, usage, dtype, ex)?),
            Opened::Floats => Opened::Floats,
            Opened::Apart(why) => Opened::Apart(why),
        })
    }

    /// [`quantised`](Self::quantised) for experts: the gate and up matrices of each expert, and the down matrices,
    /// whose inputs are the products of gate and up. On a device these inputs are written in the order of down's
    /// columns, so that act-order costs nothing for down.
    ///
    /// # Errors
    /// The errors of [`quantised`](Self::quantised).
    pub fn quantised_experts<'a>(
        source: &'a dyn QuantSource,
        [gate_up, down]: [&[Vec<String>]; 2],
        segments: usize,
        dtype: DType,
        ex: &Exec,
    ) -> Result<Opened<[Self; 2]>> {
        let of_down = QuantUse::RowParallel { segments };
        let opened = (open(source, gate_up, QuantUse::GateUp, ex)?, open(source, down, of_down, ex)?);
        let (mut gate_up, mut down) = match opened {
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
            let parts = |runs: Vec<Runs<'a>>| runs.into_iter().flatten().collect();
            let (ordered, sorted) = in_order_of_down(parts(gate_up), parts(down));
            let runs = |parts: Vec<QuantPart<'a>>| parts.into_iter().map(|part| vec![part]).collect();
            (gate_up, down) = (runs(ordered), runs(sorted));
        }
        let w13 = pack(source, gate_up, QuantUse::GateUp, dtype, ex)?;
        let w2 = pack(source, down, of_down, dtype, ex)?;
        Ok(Opened::Packed([w13, w2]))
    }
}

/// Opens matrices with one range of inputs, which [`Weight::quantised`] packs. Each matrix is one stack of modules or,
/// on the CPU, one run of modules for each number format.
fn open<'a>(
    source: &'a dyn QuantSource,
    matrices: &[Vec<String>],
    usage: QuantUse,
    ex: &Exec,
) -> Result<Opened<Vec<Runs<'a>>>> {
    let mut stacks: Vec<Runs> = Vec::with_capacity(matrices.len());
    let mut floats = None;
    for module in matrices.iter().flatten() {
        if source.scheme(module)? == QuantScheme::NONE {
            floats = Some(module);
        } else if let Some(floats) = floats {
            return Ok(Opened::Apart(format!("{floats} is stored in floats, {module} is quantised")));
        }
    }
    // The loop is parallel, because there may be thousands of modules whose headers are looked up and compared.
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
        match runs(parts, usage, ex) {
            Ok(runs) => stacks.push(runs),
            Err(why) => return Ok(Opened::Apart(format!("{}: {why}", modules.join(", ")))),
        }
    }
    let Some(first) = stacks.first() else { return Ok(Opened::Floats) };
    let kind = |runs: &Runs| -> Vec<_> {
        runs.iter().map(|run| (run.rows.shape().0, run.rows.scheme(), run.inputs.clone())).collect()
    };
    let kind_of_first = kind(first);
    if let Some(other) = stacks.iter().position(|runs| kind(runs) != kind_of_first) {
        let scheme = |runs: &Runs| runs.first().map_or(QuantScheme::NONE, |run| run.rows.scheme());
        return Ok(Opened::Apart(format!(
            "{} is {}, others are {}",
            matrices[other].join(", "),
            scheme(&stacks[other]),
            scheme(first)
        )));
    }
    Ok(Opened::Packed(stacks))
}

/// Packs what [`open`] has found.
fn pack(
    source: &dyn QuantSource,
    matrices: Vec<Runs<'_>>,
    usage: QuantUse,
    dtype: DType,
    ex: &Exec,
) -> Result<Weight> {
    let count = matrices.first().map_or(0, Vec::len);
    let inputs = matrices.first().and_then(|runs| runs.first()).map_or(0..0, |run| run.inputs.clone());
    let run = |i: usize| -> Vec<_> {
        matrices.iter().map(|runs| runs[i].rows.as_ref() as &dyn QuantRows).collect()
    };
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let pack = DevicePack::pack(&run(0), &inputs, usage, source.staging(ex)?, ex)?;
        // When readers are dropped, they release the pages of their files.
        matrices.into_par_iter().flatten().for_each(drop);
        return Weight::of_device_pack(pack, dtype);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = source;
    if count == 1 {
        return Weight::of_quantised(QuantMatrix::pack_inputs(&run(0), inputs, usage, ex)?, dtype);
    }
    let packed = (0..count).map(|i| QuantMatrix::pack_inputs(&run(i), inputs.clone(), QuantUse::Linear, ex));
    Weight::of_quantised(QuantStack::new(packed.collect::<Result<_>>()?, usage)?, dtype)
}

/// The modules of one matrix, with consecutive modules of one number format in one stack.
type Runs<'a> = Vec<QuantPart<'a>>;

/// Combines modules into as few stacks as possible.
///
/// # Errors
/// The reason why they are not one matrix, if several matrices are not possible.
fn runs<'a>(parts: Vec<QuantPart<'a>>, usage: QuantUse, ex: &Exec) -> std::result::Result<Runs<'a>, String> {
    let mut runs: Vec<Vec<QuantPart<'a>>> = Vec::new();
    let mut why = None;
    for part in parts {
        match runs.last_mut() {
            Some(run) => match Stack::differs(&run[0], &part) {
                None => run.push(part),
                Some(reason) => {
                    why.get_or_insert(reason);
                    runs.push(vec![part]);
                }
            },
            None => runs.push(vec![part]),
        }
    }
    if let Some(why) = why {
        let rows = |run: &Vec<QuantPart>| run.iter().map(|part| part.rows.shape().0).sum();
        let have_inputs = runs.iter().flatten().all(|part| part.inputs == runs[0][0].inputs);
        let rows: Vec<usize> = runs.iter().map(rows).collect();
        if ex.is_cuda() || !have_inputs || !QuantStack::fits(&rows, usage) {
            return Err(why);
        }
    }
    let stacks = runs.into_iter().map(Stack::new).map(|stack| {
        let inputs = stack.inputs.clone();
        QuantPart { rows: Box::new(stack) as Box<dyn QuantRows + 'a>, inputs }
    });
    Ok(stacks.collect())
}

/// Matrices of one scheme and one order of columns, whose rows follow each other.
pub(super) struct Stack<'a> {
    parts: Vec<Box<dyn QuantRows + 'a>>,
    inputs: Range<usize>,
}

impl<'a> Stack<'a> {
    /// Makes a stack of matrices that do not [differ](Self::differs); there must be at least one.
    pub(super) fn new(parts: Vec<QuantPart<'a>>) -> Self {
        let inputs = parts.first().map_or(0..0, |part| part.inputs.clone());
        Self { parts: parts.into_iter().map(|part| part.rows).collect(), inputs }
    }

    /// Why two matrices cannot share their columns.
    fn differs(first: &QuantPart, part: &QuantPart) -> Option<String> {
        let scheme = first.rows.scheme();
        if part.rows.scheme() != scheme {
            return Some(format!("one is {scheme}, another {}", part.rows.scheme()));
        }
        let is_same = part.rows.perm() == first.rows.perm()
            && part.rows.shape().1 == first.rows.shape().1
            && part.inputs == first.inputs;
        (!is_same).then(|| "their columns belong to groups in different orders".to_string())
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
