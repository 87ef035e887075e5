//! Which files of a repository make up a checkpoint. The same rule drives a download and the check
//! that a cached snapshot is whole.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Needed of every repository.
const CONFIG: &str = "config.json";
/// Taken where a repository has them: generation defaults, the header of older
/// quantised checkpoints, tokenizer, chat template.
const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Shows `fetch` every file of the checkpoint, small ones first. `has` tells what the repository
/// has, which errors call `what`; `fetch` returns where the file is now.
pub fn visit(
    what: &str,
    has: &dyn Fn(&str) -> bool,
    fetch: &mut dyn FnMut(&str) -> Result<PathBuf>,
) -> Result<()> {
    small(what, has)?.into_iter().try_for_each(|file| fetch(file).map(drop))?;
    weights(what, has, fetch)?.iter().try_for_each(|file| fetch(file).map(drop))
}

/// The files that tell whether a checkpoint can be run, without its weights.
pub fn small(what: &str, has: &dyn Fn(&str) -> bool) -> Result<Vec<&'static str>> {
    ensure!(has(CONFIG), "{what} has no {CONFIG}; expected a checkpoint in the layout of transformers");
    Ok(std::iter::once(CONFIG).chain(OPTIONAL.into_iter().filter(|file| has(file))).collect())
}

/// The files with the weights. Of several files there is an index, which is fetched.
pub fn weights(
    what: &str,
    has: &dyn Fn(&str) -> bool,
    fetch: &mut dyn FnMut(&str) -> Result<PathBuf>,
) -> Result<Vec<String>> {
    if has(WEIGHTS) {
        return Ok(vec![WEIGHTS.to_string()]);
    }
    ensure!(
        has(INDEX),
        "{what} has neither {WEIGHTS} nor {INDEX}; choose a repository with safetensors weights \
         (PyTorch .bin and GGUF files are not supported)"
    );
    let shards = shards(&fetch(INDEX)?)?;
    if let Some(shard) = shards.iter().find(|shard| !has(shard)) {
        bail!("{what} has no {shard}, which {INDEX} names");
    }
    Ok(shards.into_iter().collect())
}

/// The shards that an index names.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let read = || -> Result<BTreeSet<String>> {
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(index)?)?;
        let map = json["weight_map"].as_object().context("expected an object `weight_map`")?;
        map.values()
            .map(|shard| match shard.as_str() {
                Some(name) if is_inside(name) => Ok(name.to_string()),
                _ => bail!("expected file names in `weight_map`, got {shard}"),
            })
            .collect()
    };
    read().with_context(|| format!("{} is not an index of shards", index.display()))
}

/// Whether a name stays inside the folder that it is relative to.
pub fn is_inside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    !name.is_empty() && !name.contains('\\') && parts.all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What would be fetched of a repository of these files.
    fn fetched(files: &[&str], index: &str) -> Result<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(INDEX), index).unwrap();
        let mut seen = Vec::new();
        visit("o/m", &|file| files.contains(&file), &mut |file| {
            seen.push(file.to_string());
            Ok(dir.path().join(file))
        })?;
        Ok(seen)
    }

    #[test]
    fn nothing_but_the_checkpoint_is_fetched() {
        let files =
            ["README.md", "config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", INDEX];
        assert_eq!(fetched(&files, "").unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let files =
            ["chat_template.jinja", "config.json", INDEX, "a.safetensors", "b.safetensors", "c.safetensors"];
        let index = r#"{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}"#;
        let expected = ["config.json", "chat_template.jinja", INDEX, "a.safetensors", "b.safetensors"];
        assert_eq!(fetched(&files, index).unwrap(), expected);
    }

    #[test]
    fn what_lacks_is_named() {
        let error = |files: &[&str], index: &str| format!("{:#}", fetched(files, index).unwrap_err());
        assert!(error(&["model.safetensors"], "").contains("config.json"));
        assert!(error(&["config.json", "pytorch_model.bin"], "").contains("safetensors weights"));
        let files = ["config.json", INDEX];
        assert!(error(&files, r#"{"weight_map": {"x": "b.safetensors"}}"#).contains("no b.safetensors"));
        for index in ["", "[]", r#"{"weight_map": {"x": 1}}"#, r#"{"weight_map": {"x": "../../b"}}"#] {
            assert!(error(&files, index).contains("not an index of shards"), "{index}");
        }
    }
}
