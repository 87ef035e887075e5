//! The float checkpoint that is read: its config, tensors and files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use model_runtime::checkpoint::{TensorInfo, has_own_head};
use model_runtime::{Geometry, TensorFiles, TensorSpec};
use moe_engine::ModelSpec;
use safetensors::Dtype;
use serde_json::Value;

use crate::model::{QUANTISATION_KEYS, model_of};

/// A checkpoint in floats.
pub struct Source {
    /// The folder.
    pub dir: PathBuf,
    /// config.json.
    pub config: Value,
    /// What it describes.
    pub model: Box<dyn ModelSpec>,
    /// The weights.
    pub tensors: TensorFiles,
    /// What is odd about it, in sentences.
    pub notes: Vec<String>,
    /// Tensors that the model has no place for: nothing becomes of them.
    left_out: BTreeSet<String>,
}

impl Source {
    /// Opens a folder and compares its tensors with what its config describes. What the model has no place for is left out,
    /// and told in [`notes`](Self::notes). A vocabulary projection of its own is kept also where the config ties it to the embedding.
    ///
    /// # Errors
    /// A folder that is not a checkpoint of a known model; one that is quantised; missing or wrongly shaped tensors;
    /// tensors in other dtypes than F32, F16 and BF16.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = read_config(&dir.join("config.json"))?;
        refuse_quantised(dir, &config)?;
        let tensors = TensorFiles::open_dir(dir)?;
        let (config, model, untied) = read_model(dir, config, &tensors)?;
        let layout = model.layout(&Geometry::default(), &|name| tensors.info(name).is_some())?;
        let verified = tensors.verify(layout.tensors, model.ignored())?;
        let notes = untied.into_iter().chain(verified.warnings()).collect();
        let left_out = verified.left_out.names().iter().cloned().collect();
        let source = Self { dir: dir.to_path_buf(), config, model, tensors, notes, left_out };
        for tensor in source.used() {
            stored_dtype(tensor.name, tensor.dtype)?;
        }
        Ok(source)
    }

    /// The tensors that something becomes of.
    fn used(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().filter(|tensor| !self.left_out.contains(tensor.name))
    }

    /// Names, shapes and dtypes of the tensors by the file that holds them, each in the order of names.
    ///
    /// # Errors
    /// A dtype that is not a float's.
    pub fn files(&self) -> Result<BTreeMap<String, Vec<(TensorSpec, Dtype)>>> {
        let mut files: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for tensor in self.used() {
            let path = self.tensors.file_of(tensor.name).unwrap_or_default();
            let Some(file) = Path::new(path).file_name() else {
                bail!("tensor {} is in no file of {}", tensor.name, self.dir.display())
            };
            let spec = TensorSpec::new(tensor.name, tensor.shape);
            let entry = (spec, stored_dtype(tensor.name, tensor.dtype)?);
            files.entry(file.to_string_lossy().into_owned()).or_default().push(entry);
        }
        Ok(files)
    }
}

/// Parses a config.json.
///
/// # Errors
/// No such file; not JSON.
pub fn read_config(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {}; a checkpoint is a folder with config.json and *.safetensors", path.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
}

/// The model that a config.json describes, and the config: where the file has a vocabulary projection of its own it is not
/// tied to the embedding, whatever the config says; then comes a sentence about that.
///
/// # Errors
/// Any error of [`model_of`]; tensors that cannot be read.
pub fn read_model(
    dir: &Path,
    mut config: Value,
    tensors: &TensorFiles,
) -> Result<(Value, Box<dyn ModelSpec>, Option<String>)> {
    let file = dir.join("config.json").display().to_string();
    let model = model_of(&config, &file)?;
    if !model.decoder().tie_word_embeddings || !has_own_head(tensors, &model.decoder().names)? {
        return Ok((config, model, None));
    }
    config["tie_word_embeddings"] = Value::Bool(false);
    let untied = model_of(&config, &file)?;
    let note = format!(
        "{file} ties the vocabulary projection to the embedding, but the weights have another one: it is used as it is"
    );
    Ok((config, untied, Some(note)))
}

fn refuse_quantised(dir: &Path, config: &Value) -> Result<()> {
    for key in QUANTISATION_KEYS {
        if let Some(header) = config.get(key).filter(|header| !header.is_null()) {
            let method = header.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
            bail!(
                "{} is quantised already (`{key}`: method {method}); start from the checkpoint in its original float dtype",
                dir.display()
            )
        }
    }
    Ok(())
}

fn stored_dtype(name: &str, dtype: Option<DType>) -> Result<Dtype> {
    match dtype {
        Some(DType::F32) => Ok(Dtype::F32),
        Some(DType::F16) => Ok(Dtype::F16),
        Some(DType::BF16) => Ok(Dtype::BF16),
        Some(other) => {
            bail!(
                "tensor {name}: expected dtype F32, F16 or BF16, got {}; convert the checkpoint first",
                other.as_str()
            )
        }
        None => bail!("tensor {name}: expected dtype F32, F16 or BF16, got one that holds quantised weights"),
    }
}

/// The elements of a float tensor in f32.
///
/// # Errors
/// Memory.
pub fn to_f32(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
