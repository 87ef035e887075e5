//! The float checkpoint that is quantised: its config, tensors and files.

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
    /// The model that the config describes.
    pub model: Box<dyn ModelSpec>,
    /// The weights.
    pub tensors: TensorFiles,
    /// Sentences about unusual properties of the checkpoint.
    pub notes: Vec<String>,
    /// The tensors that the model does not use. They are not written.
    left_out: BTreeSet<String>,
}

impl Source {
    /// Opens a folder and compares its tensors with the model that its config describes. Tensors that the model does
    /// not use are left out and listed in [`notes`](Self::notes). If the file has a separate vocabulary projection, it
    /// is kept even if the config ties it to the embedding.
    ///
    /// # Errors
    /// The folder is not a checkpoint of a known model, it is quantised, tensors are missing or have wrong shapes, or
    /// tensors have another dtype than F32, F16 and BF16.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = read_config(&dir.join("config.json"))?;
        refuse_quantised(dir, &config)?;
        let tensors = TensorFiles::open_dir(dir)?;
        let (config, model, untied) = read_model(dir, config, &tensors)?;
        refuse_expert_biases(dir, model.as_ref())?;
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

    /// Returns the tensors that are used.
    fn used(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().filter(|tensor| !self.left_out.contains(tensor.name))
    }

    /// Returns the names, shapes and dtypes of the tensors of each file, sorted by name.
    ///
    /// # Errors
    /// A dtype is not a float dtype.
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
/// There is no such file, or it is not JSON.
pub fn read_config(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {}; a checkpoint is a folder with config.json and *.safetensors", path.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
}

/// Returns the model that a config.json describes, and the config. If the file has a vocabulary projection that is not
/// a copy of the embedding, the returned config does not tie them, and the third result is a sentence about it.
///
/// # Errors
/// [`model_of`] fails, or tensors cannot be read.
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

/// Biases of experts are read with quantised matrices, but nothing here writes them.
fn refuse_expert_biases(dir: &Path, model: &dyn ModelSpec) -> Result<()> {
    if model.decoder().moe.as_ref().is_some_and(|moe| moe.expert_bias) {
        bail!(
            "{}: experts with biases (gpt-oss) are not quantised by this program; take a quantised checkpoint of another one",
            dir.display()
        )
    }
    Ok(())
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

/// Returns the elements of a float tensor in f32.
///
/// # Errors
/// There is not enough memory.
pub fn to_f32(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
