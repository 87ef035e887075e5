//! Which files of a directory make up a checkpoint.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::error::{CheckpointError, abbreviate};
use crate::config::read_file;

/// The single-file name of the Hugging Face hub.
const SINGLE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
const INDEX: &str = "model.safetensors.index.json";

/// The files of a checkpoint and, with an index, where it says each tensor is.
pub(super) struct Shards {
    pub paths: Vec<PathBuf>,
    pub index: Option<ShardIndex>,
}

/// A parsed `model.safetensors.index.json`.
pub(super) struct ShardIndex {
    pub file: String,
    /// Tensor name to position in [`Shards::paths`].
    pub weight_map: BTreeMap<String, usize>,
}

/// The order of transformers: one file, else an index, else every safetensors file by name.
pub(super) fn find(dir: &Path) -> Result<Shards, CheckpointError> {
    let single = dir.join(SINGLE);
    if single.is_file() {
        return Ok(Shards { paths: vec![single], index: None });
    }
    let index = dir.join(INDEX);
    if index.is_file() {
        return read_index(dir, &index);
    }
    let mut paths = Vec::new();
    let mut hint = "";
    for entry in std::fs::read_dir(dir).map_err(|e| CheckpointError::io(dir, e))? {
        let path = entry.map_err(|e| CheckpointError::io(dir, e))?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") if path.is_file() => paths.push(path),
            Some("bin" | "pt" | "pth") => hint = "; convert PyTorch files to safetensors first",
            _ => {}
        }
    }
    if paths.is_empty() {
        return Err(CheckpointError::Files(format!(
            "no weights in {}: expected model.safetensors, model.safetensors.index.json or other *.safetensors \
             files{hint}",
            dir.display()
        )));
    }
    paths.sort();
    Ok(Shards { paths, index: None })
}

fn read_index(dir: &Path, path: &Path) -> Result<Shards, CheckpointError> {
    let file = path.display().to_string();
    let fail = |reason: String| CheckpointError::Files(format!("{file}: {reason}"));
    let text = read_file(path).map_err(|e| CheckpointError::io(path, e))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| fail(format!("not valid JSON: {e}")))?;
    let Some(map) = json.get("weight_map").and_then(|m| m.as_object()) else {
        return Err(fail("expected an object `weight_map` of tensor name to file name".into()));
    };
    let mut shards: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, shard) in map {
        let Some(shard) = shard.as_str() else {
            return Err(fail(format!("`weight_map` of tensor `{name}`: expected a file name, got {shard}")));
        };
        check_name(shard).map_err(|reason| fail(format!("shard {shard:?} of tensor `{name}`: {reason}")))?;
        shards.insert(shard, 0);
    }
    if shards.is_empty() {
        return Err(fail("`weight_map` is empty".into()));
    }
    for (position, (_, at)) in shards.iter_mut().enumerate() {
        *at = position;
    }
    let missing: Vec<String> =
        shards.keys().filter(|s| !dir.join(s).is_file()).map(|s| s.to_string()).collect();
    if !missing.is_empty() {
        return Err(fail(format!(
            "{} of {} shards are missing from {}: {}; download the checkpoint again",
            missing.len(),
            shards.len(),
            dir.display(),
            abbreviate(&missing)
        )));
    }
    let at = |shard: &serde_json::Value| shard.as_str().and_then(|s| shards.get(s).copied()).unwrap_or(0);
    let weight_map = map.iter().map(|(name, shard)| (name.clone(), at(shard))).collect();
    let paths = shards.keys().map(|s| dir.join(s)).collect();
    Ok(Shards { paths, index: Some(ShardIndex { file, weight_map }) })
}

/// A shard is a file of the checkpoint's own directory; an index cannot reach outside of it.
fn check_name(shard: &str) -> Result<(), &'static str> {
    let mut parts = Path::new(shard).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) if name == shard && !shard.contains(['\\', '\0']) => Ok(()),
        _ => Err("expected a plain file name, in the folder of the index"),
    }
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn shard_names_stay_inside_the_directory() {
        assert!(check_name("model-00001-of-00002.safetensors").is_ok());
        for bad in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a/", "./a"]
        {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
