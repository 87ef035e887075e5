//! The files of a repository that make up a checkpoint. A download and the check of a cached snapshot use the same
//! rule, and model-runtime reads a folder by this rule (module `checkpoint`).

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Names of files, relative to the repository.
pub type Names = BTreeSet<String>;

/// The file that every repository must have.
const CONFIG: &str = "config.json";
/// Files that are downloaded if a repository has them: generation defaults, the settings of quantised
/// checkpoints, the tokenizer and the chat template.
const OPTIONAL: [&str; 9] = [
    "generation_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// The folder of further chat templates, each of which is a file `NAME.jinja`, as in transformers.
const TEMPLATES: &str = "additional_chat_templates";
const WEIGHTS: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Calls `fetch` for every file of the checkpoint, small ones first. `names` are the files of the repository, and
/// `what` is its name in errors. `fetch` returns the path of the file.
pub fn visit(what: &str, names: &Names, fetch: &mut dyn FnMut(&str) -> Result<PathBuf>) -> Result<()> {
    small(what, names)?.iter().try_for_each(|file| fetch(file).map(drop))?;
    weights(what, names, fetch)?.iter().try_for_each(|file| fetch(file).map(drop))
}

/// Returns the files that show whether a checkpoint can be run. Weights are not among them.
pub fn small(what: &str, names: &Names) -> Result<Vec<String>> {
    ensure!(
        names.contains(CONFIG),
        "{what} has no {CONFIG}; expected a checkpoint in the layout of transformers"
    );
    let optional = OPTIONAL.into_iter().filter(|file| names.contains(*file)).map(str::to_string);
    let templates = names.iter().filter(|file| is_template(file)).cloned();
    Ok(std::iter::once(CONFIG.to_string()).chain(optional).chain(templates).collect())
}

fn is_template(file: &str) -> bool {
    let inner = file.strip_prefix(TEMPLATES).and_then(|rest| rest.strip_prefix('/'));
    inner.and_then(|name| name.strip_suffix(".jinja")).is_some_and(|name| !name.contains('/'))
}

/// Returns the files with the weights: the file with the usual name, or else the files that the index names, or else
/// all other safetensors files in the repository's root. The index is fetched.
pub fn weights(
    what: &str,
    names: &Names,
    fetch: &mut dyn FnMut(&str) -> Result<PathBuf>,
) -> Result<Vec<String>> {
    if names.contains(WEIGHTS) {
        return Ok(vec![WEIGHTS.to_string()]);
    }
    if names.contains(INDEX) {
        let shards = shards(&fetch(INDEX)?)?;
        if let Some(shard) = shards.iter().find(|shard| !names.contains(*shard)) {
            bail!("{what} has no {shard}, which {INDEX} names");
        }
        return Ok(shards.into_iter().collect());
    }
    let others = names.iter().filter(|name| name.ends_with(".safetensors") && !name.contains('/'));
    let others: Vec<String> = others.cloned().collect();
    ensure!(
        !others.is_empty(),
        "{what} has neither {WEIGHTS} nor {INDEX} nor another .safetensors file; choose a repository with safetensors \
         weights (PyTorch .bin files are not supported)"
    );
    Ok(others)
}

/// Whether the names alone show that all files with weights exist. If neither usual name exists, a file may be missing
/// without notice.
pub fn says_what_is_whole(names: &Names) -> bool {
    names.contains(WEIGHTS) || names.contains(INDEX)
}

/// Returns the shards that an index names.
pub(super) fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let read = || -> Result<BTreeSet<String>> {
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(index)?)?;
        let map = json["weight_map"].as_object().context("expected an object `weight_map`")?;
        map.values()
            .map(|shard| match shard.as_str() {
                Some(name) if is_inside(name) && !name.contains('/') => Ok(name.to_string()),
                _ => bail!("expected file names in `weight_map`, got {shard}"),
            })
            .collect()
    };
    read().with_context(|| format!("{} is not an index of shards", index.display()))
}

/// Whether a relative name stays inside its folder.
pub fn is_inside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    !name.is_empty() && !name.contains('\\') && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Returns the names of the files of a snapshot for which `counts` is true. There are none if the folder does not
/// exist.
pub fn in_folder(dir: &Path, counts: fn(&Path) -> bool) -> Names {
    let within = |folder: &str| {
        let entries = dir.join(folder).read_dir().into_iter().flatten().flatten();
        let files = entries.filter(|entry| counts(&entry.path()));
        files.filter_map(move |entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };
    let templates = within(TEMPLATES).into_iter().map(|name| format!("{TEMPLATES}/{name}"));
    let folders = dir.read_dir().into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    // The parts of a split GGUF file are often in a folder of their own.
    let parts = folders.filter_map(|entry| entry.file_name().into_string().ok()).flat_map(|folder| {
        let files = within(&folder).into_iter().filter(|name| name.ends_with(".gguf"));
        files.map(|name| format!("{folder}/{name}")).collect::<Vec<_>>()
    });
    within("").into_iter().chain(templates).chain(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the files that would be fetched from a repository with these files.
    fn fetched(files: &[&str], index: &str) -> Result<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(INDEX), index).unwrap();
        let mut seen = Vec::new();
        let names = files.iter().map(|file| file.to_string()).collect();
        visit("o/m", &names, &mut |file| {
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
    fn further_templates_are_fetched() {
        let tool_use = "additional_chat_templates/tool_use.jinja";
        let files = [
            "additional_chat_templates/README.md",
            "additional_chat_templates/old/tool_use.jinja",
            "additional_chat_templates_old/x.jinja",
            tool_use,
            "config.json",
            "model.safetensors",
        ];
        assert_eq!(fetched(&files, "").unwrap(), ["config.json", tool_use, "model.safetensors"]);
    }

    #[test]
    fn weights_of_any_name_are_fetched_where_none_has_the_usual_one() {
        let files = ["config.json", "q-00001-of-00002.safetensors", "q-00002-of-00002.safetensors"];
        assert_eq!(fetched(&files, "").unwrap(), files);
        let files = ["config.json", "gptq_model-4bit-128g.safetensors", "onnx/x.safetensors", "x.bin"];
        assert_eq!(fetched(&files, "").unwrap(), files[..2]);
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
