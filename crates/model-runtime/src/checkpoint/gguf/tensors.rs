//! Shows the tensors of a GGUF file as a checkpoint has them: by the family's names, experts one by one, blocks as
//! bytes.

use std::collections::HashMap;
use std::ops::Range;

use moe_kernels::names::TensorNames;
use moe_quant::{Format, QuantConfig};
use safetensors::tensor::Dtype;

use super::architecture::Architecture;
use super::file::Gguf;
use super::header::{Stored, Tensor};
use super::names::{ExpertNames, Names, Place};
use crate::checkpoint::change::Change;
use crate::checkpoint::file::Entry;
use crate::checkpoint::{CheckpointError, TensorFiles};
use crate::config::limits;

/// The tensors of a file by their names in the family, and how each matrix is stored.
pub(in crate::checkpoint) struct Tensors {
    /// For each file.
    entries: Vec<Vec<(String, Entry)>>,
    formats: HashMap<String, Format>,
}

/// A tensor, or an expert's part of one, in the family's words.
struct Part {
    name: String,
    shape: Vec<usize>,
    range: Range<usize>,
    change: Change,
}

/// Returns the dimensions that the family expects of a tensor that is stored with these dimensions.
fn shape(name: &str, stored: &[usize], names: &TensorNames) -> Vec<usize> {
    let is = |module: &str| name.ends_with(&format!(".{module}.weight"));
    match *stored {
        // A gate of shared experts is a vector in files.
        [columns] if names.shared_expert_gate.is_some_and(is) => vec![1, columns],
        // A convolution has one group for each channel.
        [channels, width] if is(names.delta.conv) => vec![channels, 1, width],
        // Rows of all heads under each other, where files have a matrix for each head.
        [heads, rows, columns] => vec![heads * rows, columns],
        _ => stored.to_vec(),
    }
}

impl Tensors {
    /// Names all tensors of `gguf`.
    ///
    /// # Errors
    /// A tensor without which the model would compute something else; experts of other dimensions than expected.
    pub(super) fn of(gguf: &Gguf, architecture: &Architecture) -> Result<Self, CheckpointError> {
        let names = Names::new(architecture);
        let entries = gguf.headers.iter().map(|_| Vec::new()).collect();
        let mut tensors = Self { entries, formats: HashMap::new() };
        for (file, tensor) in gguf.records() {
            if tensor.name.starts_with("rope_freqs") || tensor.name.starts_with("rope_factors") {
                return Err(gguf.error(format!(
                    "`{}`: rotary frequencies of their own (Llama 3.1, LongRoPE) are not supported",
                    tensor.name
                )));
            }
            let (name, shape, change) = match names.place(&tensor.name) {
                Place::One(name, change) => {
                    let shape = shape(&name, &tensor.shape, &architecture.names);
                    (name, shape, change)
                }
                Place::Experts(of) => {
                    tensors.experts(gguf, file, tensor, &of)?;
                    continue;
                }
                // Under its own name: it is told of where tensors are that the model has no place for.
                Place::Unknown => (tensor.name.clone(), tensor.shape.clone(), Change::None),
            };
            tensors.push(file, tensor, Part { name, shape, range: tensor.range.clone(), change });
        }
        Ok(tensors)
    }

    /// Adds the parts of a tensor of all experts, which is [E, N, K] or, for biases, [E, N].
    fn experts(
        &mut self,
        gguf: &Gguf,
        file: usize,
        tensor: &Tensor,
        of: &ExpertNames,
    ) -> Result<(), CheckpointError> {
        let ExpertNames { before, matrices, after } = of;
        let wrong = |expected: &str| {
            gguf.error(format!("`{}`: expected {expected}, got {:?}", tensor.name, tensor.shape))
        };
        let (experts, rows, columns) = match (tensor.shape.as_slice(), after.as_str()) {
            (&[experts, rows], ".bias") => (experts, rows, None),
            (_, ".bias") => return Err(wrong("[experts, rows]")),
            (&[experts, rows, columns], _) => (experts, rows, Some(columns)),
            _ => return Err(wrong("[experts, rows, columns]")),
        };
        if !limits::EXPERTS.contains(&experts) {
            let most = limits::EXPERTS.end();
            return Err(gguf.error(format!("`{}`: expected 1 to {most} experts, got {experts}", tensor.name)));
        }
        let count = matrices.len();
        if !rows.is_multiple_of(count) {
            return Err(wrong(&format!("rows of {count} matrices, as many of each")));
        }
        let rows = rows / count;
        let shape: Vec<usize> = [rows].into_iter().chain(columns).collect();
        let Some(bytes) = tensor.stored.bytes(&shape) else {
            return Err(wrong("rows that blocks do not cross"));
        };
        let parts = (0..experts).flat_map(|expert| matrices.iter().map(move |matrix| (expert, matrix)));
        for (at, (expert, matrix)) in parts.enumerate() {
            let start = tensor.range.start + at * bytes;
            let name = format!("{before}{expert}.{matrix}{after}");
            let part = Part { name, shape: shape.clone(), range: start..start + bytes, change: Change::None };
            self.push(file, tensor, part);
        }
        Ok(())
    }

    fn push(&mut self, file: usize, tensor: &Tensor, part: Part) {
        let Part { name, mut shape, range, change } = part;
        let dtype = match tensor.stored {
            Stored::Floats(dtype) => dtype,
            Stored::Blocks(ggml) => {
                if let Some(module) = name.strip_suffix(".weight") {
                    self.formats.insert(module.to_string(), Format::Ggml(ggml));
                }
                shape.last_mut().into_iter().for_each(|columns| *columns = tensor.stored.row_bytes(*columns));
                Dtype::U8
            }
        };
        self.entries[file].push((name, Entry { file, dtype, shape, range, change }));
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.entries.iter().flatten().any(|(other, _)| other == name)
    }

    /// Whether there is a tensor with this end of its name.
    pub fn has_ending(&self, ending: &str) -> bool {
        self.entries.iter().flatten().any(|(name, _)| name.ends_with(ending))
    }

    /// Whether there is a quantised matrix.
    pub fn are_quantised(&self) -> bool {
        !self.formats.is_empty()
    }

    /// How the matrices are stored.
    pub fn quantisation(&self, notes: Vec<String>) -> QuantConfig {
        QuantConfig::gguf(self.formats.clone(), notes)
    }

    /// The tensors in the files of `gguf`.
    pub fn into_files(self, gguf: Gguf) -> Result<TensorFiles, CheckpointError> {
        TensorFiles::of_entries(gguf.path.display().to_string(), gguf.files, self.entries)
    }
}
