//! Writes a checkpoint tensor by tensor into a folder that appears when it is complete.

mod folder;
mod shard;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_quant::write::StoredSpec;
use serde_json::{Value, json};

use folder::Folder;
pub use folder::check_space;
use shard::Shard;

/// The name of the file if the checkpoint has one file only. Such a checkpoint needs no index.
const SINGLE: &str = "model.safetensors";

/// The tensors of each file, by the file's name.
pub type Files = BTreeMap<String, Vec<(String, StoredSpec)>>;

/// A checkpoint that is being written.
pub struct CheckpointWriter {
    folder: Folder,
    shards: Vec<Shard>,
    /// The number of the shard that holds a tensor, by name.
    place: BTreeMap<String, usize>,
}

impl CheckpointWriter {
    /// Begins a checkpoint at `out` and writes all headers, so that tensors may be written in any order.
    ///
    /// # Errors
    /// `out` exists, an unfinished run has left its folder, there is too little space for all tensors, or a tensor is
    /// in two files.
    pub fn create(out: &Path, files: &Files) -> Result<Self> {
        let folder = Folder::create(out)?;
        let bytes = files.values().flatten().map(|(_, spec)| spec.len() as u64).sum();
        folder.check_space(bytes)?;
        let mut place = BTreeMap::new();
        let mut shards = Vec::new();
        for (file, tensors) in files {
            for (name, _) in tensors {
                if place.insert(name.clone(), shards.len()).is_some() {
                    bail!("tensor {name} would be written twice")
                }
            }
            shards.push(Shard::create(&folder.path(file), file, tensors)?);
        }
        Ok(Self { folder, shards, place })
    }

    /// Writes a tensor's bytes.
    ///
    /// # Errors
    /// The name was not announced or has already been written, the number of bytes is wrong, or writing fails.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.write_with(name, |out| Ok(out.write_all(bytes)?))
    }

    /// Does the same as [`write`](Self::write) with bytes that `fill` writes piece by piece.
    ///
    /// # Errors
    /// [`write`](Self::write) would fail, or `fill` fails.
    pub fn write_with(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let shard = self.place.get(name).and_then(|place| self.shards.get_mut(*place));
        let Some(shard) = shard else { bail!("tensor {name} was not announced") };
        shard.write(name, fill)
    }

    /// Writes a file next to the weights.
    ///
    /// # Errors
    /// Writing fails.
    pub fn write_file(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.folder.path(name);
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Copies the files of another folder that are neither weights nor written by this writer: the tokenizer, templates
    /// and the generation config.
    ///
    /// # Errors
    /// Copying fails.
    pub fn copy_companions(&self, from: &Path) -> Result<()> {
        let entries = std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
        for entry in entries {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_string) else {
                continue;
            };
            if is_companion(&name) && path.is_file() {
                let to = self.folder.path(&name);
                std::fs::copy(&path, &to).with_context(|| format!("cannot copy {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Finishes the checkpoint: it writes the index and config.json, and gives the folder its final name.
    ///
    /// # Errors
    /// A tensor was announced but not written, or writing fails.
    pub fn finish(self, config: &Value) -> Result<()> {
        let mut total = 0;
        let mut map = serde_json::Map::new();
        for (name, place) in &self.place {
            if let Some(shard) = self.shards.get(*place) {
                map.insert(name.clone(), json!(shard.file()));
            }
        }
        let single = matches!(self.shards.as_slice(), [shard] if shard.file() == SINGLE);
        for shard in self.shards {
            total += shard.finish()?;
        }
        if !single {
            let index = json!({"metadata": {"total_size": total}, "weight_map": map});
            let text = serde_json::to_string_pretty(&index)? + "\n";
            std::fs::write(self.folder.path("model.safetensors.index.json"), text)?;
        }
        std::fs::write(self.folder.path("config.json"), serde_json::to_string_pretty(config)? + "\n")?;
        self.folder.finish()
    }
}

/// Returns whether a file is copied unchanged together with the weights.
fn is_companion(name: &str) -> bool {
    let weights = [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"];
    let ours = ["config.json", "quantize_config.json", "hf_quant_config.json", "quantization_report.json"];
    !(weights.iter().any(|end| name.ends_with(end)) || ours.contains(&name) || name.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::is_companion;

    #[test]
    fn tokenizers_go_along_and_weights_do_not() {
        for name in [
            "tokenizer.json",
            "tokenizer.model",
            "generation_config.json",
            "chat_template.jinja",
            "merges.txt",
        ] {
            assert!(is_companion(name), "{name}");
        }
        for name in [
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "config.json",
            ".gitattributes",
        ] {
            assert!(!is_companion(name), "{name}");
        }
    }
}
