//! Quantised matrices from a candle `VarBuilder`.
//!
//! A `VarBuilder` has no quantised tensors; it gives every tensor in the requested dtype. So the tensors of matrices
//! that may be quantised are read once, as they are stored, and passed to the readers of moe-quant. Kernels then
//! multiply the integers. If no kernel can, loaders get the matrix in floats under the name of its weight.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use moe_kernels::QuantScheme;
use moe_kernels::candle::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, bail};
use moe_kernels::quant::{QuantPart, QuantSource};
use moe_quant::safetensors::{Dtype, tensor::TensorView};
use moe_quant::{Format, PackedExpert, QuantConfig, QuantRows, Reader, TensorSpec, dequantise, layout};
use rayon::prelude::*;

/// The suffixes of tensors that show that a matrix is packed.
const PACKED: [&str; 2] = ["qweight", "weight_packed"];

/// The quantised matrices of some modules, read from a `VarBuilder`. It is the [`QuantSource`] of
/// [`BlockContext::quant`](crate::BlockContext::quant). [`shown`](Self::shown) is the checkpoint with these
/// matrices as floats.
#[derive(Debug)]
pub struct QuantisedVars {
    modules: BTreeMap<String, Module>,
    /// Tensors that hold matrices of all experts.
    packs: BTreeSet<String>,
}

/// A quantised matrix in memory.
struct Module {
    format: Format,
    /// N and K.
    shape: (usize, usize),
    /// Its place, where its tensors are packs of all experts.
    expert: Option<PackedExpert>,
    tensors: Vec<Arc<Stored>>,
}

/// The packs that were read, by the names of their tensors: each is shared by many modules.
type Packs = Mutex<HashMap<String, Arc<Stored>>>;

/// One of its tensors.
struct Stored {
    suffix: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.format.name(), self.shape)
    }
}

impl QuantisedVars {
    /// Reads the matrices [N, K] of these modules that are quantised in the checkpoint of `vb`, according to `config`.
    /// Modules have full names (`model.layers.0.mlp.experts.3.up_proj`), whatever the prefix of `vb` is.
    ///
    /// # Errors
    /// Tensors that are missing or do not match the header; a module that is packed in the file although the header
    /// does not quantise it.
    pub fn read(
        config: &QuantConfig,
        vb: &VarBuilder<'_>,
        modules: impl IntoIterator<Item = (String, (usize, usize))>,
    ) -> Result<Self> {
        let root = vb.root().set_device(Device::Cpu);
        let modules: Vec<_> = modules.into_iter().collect();
        let packs = Packs::default();
        let read = |(name, shape): &(String, (usize, usize))| {
            let module = Module::read(config, &root, &packs, name, *shape)?;
            Ok(module.map(|module| (name.clone(), module)))
        };
        let modules: Vec<Result<Option<_>>> = modules.par_iter().map(read).collect();
        let modules = modules.into_iter().filter_map(Result::transpose).collect::<Result<_>>()?;
        let packs = packs.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Self { modules, packs: packs.into_keys().collect() })
    }

    /// Returns the same checkpoint with each of these matrices in floats, under the name of its `weight`, and without
    /// its other tensors.
    pub fn shown<'a>(self: &Arc<Self>, vb: &VarBuilder<'a>) -> VarBuilder<'a> {
        let prefix = vb.prefix();
        let shown = Shown { root: vb.root(), quantised: self.clone() };
        let root = VarBuilder::from_backend(Box::new(shown), vb.dtype(), vb.device().clone());
        if prefix.is_empty() { root } else { root.pp(prefix) }
    }

    /// Splits the name of a tensor into a module with a quantised matrix and the rest.
    fn find<'n>(&self, tensor: &'n str) -> Option<(&Module, &'n str)> {
        let (module, suffix) = tensor.rsplit_once('.')?;
        self.modules.get(module).map(|module| (module, suffix))
    }

    fn reader(&self, module: &str) -> Result<Option<Reader<'_>>> {
        self.modules.get(module).map(|found| found.reader(module)).transpose()
    }
}

impl QuantSource for QuantisedVars {
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        Ok(self.modules.get(module).map_or(QuantScheme::NONE, |module| module.format.scheme()))
    }

    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>> {
        let Some(reader) = self.reader(module)? else { return Ok(None) };
        let inputs = 0..reader.inputs();
        Ok(Some(QuantPart { rows: Box::new(reader), inputs }))
    }
}

impl Module {
    /// Reads a module's matrix; `None` if the checkpoint has it in floats, or not at all.
    fn read(
        config: &QuantConfig,
        root: &VarBuilder,
        packs: &Packs,
        name: &str,
        shape: (usize, usize),
    ) -> Result<Option<Self>> {
        let expert = PackedExpert::of(name).filter(|expert| root.contains_tensor(&expert.codes()));
        let expert = expert.filter(|_| config.method() == QuantConfig::PACKED_EXPERTS);
        let has = |suffix: &str| match &expert {
            Some(expert) => expert.stored(suffix).is_some_and(|name| root.contains_tensor(&name)),
            None => root.contains_tensor(&format!("{name}.{suffix}")),
        };
        let is_packed = PACKED.iter().any(|suffix| has(suffix));
        // A `VarBuilder` does not report dtypes, so FP8 is recognised by the scales next to it.
        let has_scales = has("weight_scale") || has("weight_scale_inv");
        let dtype_of = |suffix: &str| match suffix {
            "weight" if has_scales => has(suffix).then_some(Dtype::F8_E4M3),
            "weight" => has(suffix).then_some(Dtype::F32),
            suffix => has(suffix).then_some(Dtype::I32),
        };
        if !is_packed && !has_scales {
            return Ok(None);
        }
        let format = config.format_in_file(name, dtype_of)?;
        if format == Format::Plain {
            return Ok(None);
        }
        let mut tensors = Vec::new();
        for spec in layout(format, shape.0, shape.1)? {
            match &expert {
                Some(expert) => tensors.push(Stored::read_pack(root, packs, expert, spec.suffix)?),
                None if spec.required || has(spec.suffix) => {
                    tensors.push(Arc::new(Stored::read(root, name, &spec)?));
                }
                None => {}
            }
        }
        Ok(Some(Self { format, shape, expert, tensors }))
    }

    fn reader<'a>(&'a self, name: &str) -> Result<Reader<'a>> {
        let stored = |suffix: &str| self.tensors.iter().find(|tensor| tensor.suffix == suffix);
        let Some(expert) = &self.expert else {
            let find = |suffix: &str| {
                let tensor = stored(suffix)?;
                TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).ok()
            };
            return Ok(Reader::new(name, self.format, self.shape, find)?);
        };
        let find = |suffix: &str| {
            let tensor = stored(suffix)?;
            let part = expert.part(suffix, &tensor.shape)?;
            TensorView::new(tensor.dtype, part.shape, tensor.bytes.get(part.range)?).ok()
        };
        let (n, k) = self.shape;
        let reader = Reader::new(name, self.format, (n * expert.matrices, k), find)?;
        Ok(reader.turns(expert.turn, expert.matrices)?)
    }
}

impl Stored {
    /// Reads a tensor in the widest of its possible dtypes, which can represent all values of the others.
    fn read(root: &VarBuilder, module: &str, spec: &TensorSpec) -> Result<Self> {
        let name = format!("{module}.{}", spec.suffix);
        let get = |dtype| root.get_unchecked_dtype(&name, dtype);
        let may_be = |dtype| spec.dtypes.contains(&dtype);
        let (dtype, tensor) = match () {
            () if may_be(Dtype::F32) => (Dtype::F32, get(DType::F32)?),
            () if may_be(Dtype::F8_E4M3) => (Dtype::F8_E4M3, get(DType::F8E4M3)?),
            () if may_be(Dtype::I64) => (Dtype::I64, get(DType::I64)?),
            () if may_be(Dtype::I32) => (Dtype::I32, get(DType::I32)?),
            () if may_be(Dtype::U8) => (Dtype::U8, get(DType::U8)?),
            () => bail!("{name}: candle has none of the dtypes {:?}", spec.dtypes),
        };
        spec.check(module, dtype, tensor.dims())?;
        let shape = tensor.dims().to_vec();
        Ok(Self { suffix: spec.suffix, dtype, shape, bytes: bytes(&tensor)? })
    }

    /// What a matrix has under `suffix`, of all experts.
    fn read_pack(
        root: &VarBuilder,
        packs: &Packs,
        expert: &PackedExpert,
        suffix: &'static str,
    ) -> Result<Arc<Self>> {
        let Some(name) = expert.stored(suffix) else { bail!("packs of experts have no {suffix}") };
        let mut packs = packs.lock().unwrap_or_else(PoisonError::into_inner);
        let pack = match packs.get(&name) {
            Some(pack) => pack.clone(),
            None => {
                let tensor = root.get_unchecked_dtype(&name, DType::U8)?;
                let shape = tensor.dims().to_vec();
                let pack = Arc::new(Self { suffix, dtype: Dtype::U8, shape, bytes: bytes(&tensor)? });
                packs.insert(name.clone(), pack.clone());
                pack
            }
        };
        if expert.part(suffix, &pack.shape).is_none() {
            bail!("{name}: expected a pack of all experts in MXFP4, got shape {:?}", pack.shape)
        }
        Ok(pack)
    }
}

/// Returns the elements of a tensor on the CPU as a file would store them.
fn bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F32 => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect(),
        DType::I64 => flat.to_vec1::<i64>()?.into_iter().flat_map(i64::to_le_bytes).collect(),
        DType::I32 => flat.to_vec1::<i32>()?.into_iter().flat_map(i32::to_le_bytes).collect(),
        DType::F8E4M3 => {
            let (storage, layout) = flat.storage_and_layout();
            match (&*storage, layout.contiguous_offsets()) {
                (Storage::Cpu(CpuStorage::F8E4M3(values)), Some((start, end))) => {
                    values[start..end].iter().map(|value| value.to_bits()).collect()
                }
                _ => bail!("expected contiguous FP8 values on the CPU, got {flat:?}"),
            }
        }
        DType::U8 => flat.to_vec1::<u8>()?,
        other => bail!("a quantised matrix has no tensor of dtype {}", other.as_str()),
    })
}

/// A view of a checkpoint in which the quantised matrices are floats.
struct Shown<'a> {
    root: VarBuilder<'a>,
    quantised: Arc<QuantisedVars>,
}

impl Shown<'_> {
    /// Returns the floats of a quantised matrix if `name` is the weight of one.
    fn floats(&self, name: &str, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
        let Some(module) = name.strip_suffix(".weight") else { return Ok(None) };
        let Some(reader) = self.quantised.reader(module)? else { return Ok(None) };
        let (n, _) = reader.shape();
        let floats = Tensor::from_vec(dequantise(&reader)?, (n, reader.inputs()), &Device::Cpu)?;
        floats.to_dtype(dtype)?.to_device(device).map(Some)
    }
}

impl SimpleBackend for Shown<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.floats(name, dtype, device)? {
            Some(floats) if floats.dims() == shape.dims() => Ok(floats),
            Some(floats) => bail!("{name}: expected shape {shape:?}, got {:?}", floats.dims()),
            None => self.root.get_with_hints_dtype(shape, name, init, dtype)?.to_device(device),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.floats(name, dtype, device)? {
            Some(floats) => Ok(floats),
            None => self.root.get_unchecked_dtype(name, dtype)?.to_device(device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match self.quantised.find(name) {
            // A bias of a quantised matrix stays visible, so that the loader can refuse it.
            Some((_, suffix)) => suffix == "weight" || suffix == "bias" && self.root.contains_tensor(name),
            None => !self.quantised.packs.contains(name) && self.root.contains_tensor(name),
        }
    }
}
