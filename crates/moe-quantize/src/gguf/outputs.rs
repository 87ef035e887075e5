//! Plans the tensors of a GGUF file: from which tensors of the checkpoint each is made, and how it is stored.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use model_runtime::TensorSpec;
use model_runtime::checkpoint::{GgufNames, GgufPlace};
use safetensors::Dtype;

use super::mix::{GgufMix, Model, Stored};
use crate::source::Source;

/// A tensor of the file.
pub struct Output {
    /// Its name.
    pub name: String,
    /// Its dimensions, rows before columns.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub stored: Stored,
    /// What it is made of, one after the other.
    pub parts: Vec<Part>,
}

/// A tensor of the checkpoint, or a part of it.
pub struct Part {
    /// Its name.
    pub tensor: String,
    /// Which share of the rows of each expert, and of how many shares. Only tensors of all experts are divided.
    pub share: (usize, usize),
}

impl Output {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        let elements = self.shape.iter().product::<usize>();
        match self.stored {
            Stored::F32 => elements * 4,
            Stored::F16 => elements * 2,
            Stored::Blocks(ggml) => elements / ggml.columns() * ggml.bytes(),
        }
    }

    /// Returns the number of its type in files.
    pub fn type_id(&self) -> u32 {
        match self.stored {
            Stored::F32 => 0,
            Stored::F16 => 1,
            Stored::Blocks(ggml) => ggml.id(),
        }
    }
}

/// The tensors of one output before it is complete: the shape of a part, and the parts by their experts.
#[derive(Default)]
struct Gathered {
    shape: Vec<usize>,
    parts: BTreeMap<usize, Part>,
    of_experts: bool,
}

/// Plans the file. The first result are its tensors, the second one the bytes of their sources.
///
/// # Errors
/// A tensor has no place in GGUF files, or experts are missing or differ in shape.
pub fn outputs(source: &Source, names: &GgufNames, mix: GgufMix) -> Result<(Vec<Output>, u64)> {
    let decoder = source.model.decoder();
    let model = Model {
        layers: decoder.num_layers(),
        experts: decoder.num_experts(),
        is_tied: decoder.tie_word_embeddings,
    };
    let head = format!("{}.weight", decoder.names.lm_head);
    let mut gathered: BTreeMap<String, Gathered> = BTreeMap::new();
    let mut bytes = 0;
    for (spec, dtype) in source.files()?.into_values().flatten() {
        // A tied projection that is stored nevertheless is a copy of the embedding.
        if model.is_tied && spec.name == head {
            continue;
        }
        bytes += size(&spec, dtype);
        gather(&mut gathered, &spec, names)?;
    }
    let outputs = gathered.into_iter().map(|(name, gathered)| {
        let Gathered { mut shape, parts, of_experts } = gathered;
        if of_experts {
            let count = parts.len();
            if count != model.experts || parts.keys().last() != Some(&(count - 1)) {
                bail!("{name}: expected the matrices of {} experts, got {count}", model.experts)
            }
            shape.insert(0, count);
        }
        let stored = mix.stored(&name, &shape, model);
        Ok(Output { name, shape, stored, parts: parts.into_values().collect() })
    });
    let mut outputs = outputs.collect::<Result<Vec<_>>>()?;
    outputs.sort_by_key(|output| order(&output.name));
    Ok((outputs, bytes))
}

fn size(spec: &TensorSpec, dtype: Dtype) -> u64 {
    (spec.shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64
}

/// Returns the place in the order in which a model uses its tensors.
fn order(name: &str) -> (usize, String) {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let place = match (name, layer) {
        (_, Some(layer)) => layer + 1,
        ("token_embd.weight", _) => 0,
        _ => usize::MAX,
    };
    (place, name.to_string())
}

/// Adds a tensor of the checkpoint to the outputs that it becomes a part of.
fn gather(gathered: &mut BTreeMap<String, Gathered>, spec: &TensorSpec, names: &GgufNames) -> Result<()> {
    let part = |share: (usize, usize)| Part { tensor: spec.name.clone(), share };
    match names.place(&spec.name) {
        Some(GgufPlace::One(name)) => {
            let to = gathered.entry(name).or_default();
            to.shape = match spec.shape.as_slice() {
                // A gate of shared experts is a vector in files.
                &[1, columns] => vec![columns],
                shape => shape.to_vec(),
            };
            to.parts.insert(0, part((0, 1)));
        }
        Some(GgufPlace::Expert { tensor, expert }) => {
            let to = gathered.entry(tensor).or_default();
            if !to.parts.is_empty() && to.shape != spec.shape {
                bail!(
                    "{}: expected the shape of other experts, {:?}, got {:?}",
                    spec.name,
                    to.shape,
                    spec.shape
                )
            }
            to.shape = spec.shape.clone();
            to.of_experts = true;
            to.parts.insert(expert, part((0, 1)));
        }
        Some(GgufPlace::Packs(tensors)) => {
            let &[experts, rows, columns] = spec.shape.as_slice() else {
                bail!("{}: expected [experts, rows, columns], got {:?}", spec.name, spec.shape)
            };
            let count = tensors.len();
            for (at, tensor) in tensors.into_iter().enumerate() {
                let to = gathered.entry(tensor).or_default();
                to.shape = vec![experts, rows / count, columns];
                to.parts.insert(0, part((at, count)));
            }
        }
        None => bail!("tensor {}: GGUF files of {} have no such tensor", spec.name, names.architecture()),
    }
    Ok(())
}
