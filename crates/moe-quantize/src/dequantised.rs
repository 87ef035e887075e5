//! A checkpoint, quantised or not, as a source of f32 weights. Integers are converted to the floats that they mean.
//!
//! It is used to compare models that fit into memory in f32.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use model_runtime::{TensorFiles, TensorSpec};
use moe_quant::{Format, QuantConfig, Reader, dequantise};
use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// The files of a checkpoint in memory, and the description of how they are quantised.
pub struct Dequantised {
    files: Vec<File>,
    /// The index of the file that holds a tensor, by name.
    place: BTreeMap<String, usize>,
    config: Option<QuantConfig>,
    /// The names of the visible tensors, or `None` if all tensors of the files are visible.
    names: Option<BTreeSet<String>>,
}

struct File {
    bytes: Vec<u8>,
    first: usize,
    header: Metadata,
}

impl Dequantised {
    /// Reads the safetensors files of the checkpoint in a folder. If there is an index, it says which files these are.
    /// `config` is the checkpoint's config.json.
    ///
    /// # Errors
    /// The quantisation header cannot be read, reading fails, a file is not in the safetensors format, or a tensor is
    /// in two files.
    pub fn open(dir: &Path, config: &Value) -> Result<Self> {
        let config = QuantConfig::from_json(config)?;
        let mut files = Vec::new();
        let mut place = BTreeMap::new();
        for path in weight_files(dir)? {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let (length, header) = SafeTensors::read_metadata(&bytes)
                .with_context(|| format!("{} is not a safetensors file", path.display()))?;
            for name in header.tensors().into_keys() {
                place.insert(name, files.len());
            }
            files.push(File { bytes, first: 8 + length, header });
        }
        Ok(Self { files, place, config, names: None })
    }

    /// Returns these weights without the tensors that the model does not use, such as scales and biases of zeros.
    pub fn only(self, expected: &[TensorSpec]) -> Self {
        Self { names: Some(expected.iter().map(|spec| spec.name.clone()).collect()), ..self }
    }

    /// Returns a [`VarBuilder`] at the root of the checkpoint, in f32.
    pub fn var_builder(self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), DType::F32, Device::Cpu)
    }

    fn find(&self, name: &str) -> Option<TensorView<'_>> {
        let file = self.files.get(*self.place.get(name)?)?;
        let info = file.header.info(name)?;
        let (start, end) = info.data_offsets;
        TensorView::new(info.dtype, info.shape.clone(), &file.bytes[file.first + start..file.first + end])
            .ok()
    }

    /// Returns the weights [n, k] that a module's integers mean.
    fn integers(&self, module: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        let (Some(config), &[n, k]) = (&self.config, shape) else { return Ok(None) };
        let find = |suffix: &str| self.find(&format!("{module}.{suffix}"));
        match config.format_in_file(module, |suffix| find(suffix).map(|tensor| tensor.dtype()))? {
            Format::Plain => Ok(None),
            format => {
                let reader = Reader::new(module, format, (n, k), find)?;
                reader.check_finite()?;
                Ok(Some(dequantise(&reader)?))
            }
        }
    }

    fn weights(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        if let Some(module) = name.strip_suffix(".weight")
            && let Some(weights) = self.integers(module, shape)?
        {
            return Ok(Tensor::from_vec(weights, shape, &Device::Cpu)?);
        }
        let tensor = self.find(name).with_context(|| format!("the checkpoint has no tensor {name}"))?;
        let dtype = match tensor.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => anyhow::bail!("tensor {name}: expected dtype F32, F16 or BF16, got {other:?}"),
        };
        let read = Tensor::from_raw_buffer(tensor.data(), dtype, tensor.shape(), &Device::Cpu)?;
        if read.dims() != shape {
            anyhow::bail!("tensor {name}: expected shape {shape:?}, got {:?}", read.dims())
        }
        Ok(read.to_dtype(DType::F32)?)
    }
}

/// Returns the files that hold a folder's tensors, so that each tensor is read once.
fn weight_files(dir: &Path) -> Result<BTreeSet<PathBuf>> {
    let tensors = TensorFiles::open_dir(dir)?;
    let file_of = |name| Path::new(tensors.file_of(name)?).file_name();
    Ok(tensors.iter().filter_map(|tensor| file_of(tensor.name)).map(|file| dir.join(file)).collect())
}

impl SimpleBackend for Dequantised {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let weights = self.weights(name, shape.dims()).map_err(candle_core::Error::wrap)?;
        weights.to_dtype(dtype)?.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let shape = self.find(name).map(|tensor| tensor.shape().to_vec()).unwrap_or_default();
        self.get(Shape::from(shape), name, candle_nn::Init::default(), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let packed = |module: &str| {
            ["qweight", "weight_packed"]
                .iter()
                .any(|part| self.place.contains_key(&format!("{module}.{part}")))
        };
        let is_there = self.names.as_ref().is_none_or(|names| names.contains(name));
        is_there && (self.place.contains_key(name) || name.strip_suffix(".weight").is_some_and(packed))
    }
}
