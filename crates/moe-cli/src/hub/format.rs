//! What a folder, a file or a repository is that is no checkpoint, and what fits instead.

use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_engine::usage;

const EXPECTED: &str = "expected a checkpoint in the layout of transformers, with config.json, tokenizer.json and \
                        safetensors weights";
const NO_GGUF: &str = "GGUF is another format, which llama.cpp runs: name the repository or folder that it was \
                       converted from";

/// Refuses a folder of another format.
pub fn check_folder(dir: &Path) -> Result<()> {
    let cannot_read = || format!("cannot read {}", dir.display());
    let mut names = Vec::new();
    for entry in dir.read_dir().with_context(cannot_read)? {
        names.push(entry.with_context(cannot_read)?.file_name().to_string_lossy().into_owned());
    }
    check_names(&dir.display().to_string(), names.iter().map(String::as_str))
}

/// Refuses a checkpoint of another format by the names of its files.
pub fn check_names<'n>(what: &str, names: impl Iterator<Item = &'n str>) -> Result<()> {
    let names: Vec<&str> = names.collect();
    let is_model = names.iter().any(|name| name.ends_with(".safetensors"));
    match names.iter().filter(|name| is_named_gguf(Path::new(name))).min() {
        Some(gguf) if !is_model => {
            bail!("{what} has its weights only as GGUF files ({gguf}); {EXPECTED}. {NO_GGUF}")
        }
        _ => Ok(()),
    }
}

/// The error of a file where a checkpoint is expected.
pub fn file_is_no_checkpoint(path: &Path) -> anyhow::Error {
    let shown = path.display();
    if is_gguf(path) {
        return usage(format!("--model {shown} is a GGUF file; {EXPECTED}. {NO_GGUF}"));
    }
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    usage(format!("--model {shown} is a file; {EXPECTED}: name its folder, such as {}", parent.display()))
}

/// By its name, or by its first bytes.
fn is_gguf(path: &Path) -> bool {
    is_named_gguf(path) || starts_with(path, b"GGUF")
}

fn is_named_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn starts_with(path: &Path, magic: &[u8; 4]) -> bool {
    let mut first = [0; 4];
    let read =
        std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut first));
    read.is_ok() && first == *magic
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gguf_is_named_and_what_runs_it() {
        let error = check_names("o/m", ["README.md", "m-q4.gguf"].into_iter()).unwrap_err().to_string();
        assert!(error.contains("only as GGUF files (m-q4.gguf)") && error.contains("llama.cpp"), "{error}");
        // Some repositories have both.
        check_names("o/m", ["m.gguf", "config.json", "model.safetensors"].into_iter()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        check_folder(dir.path()).unwrap();
        let file = dir.path().join("m.bin");
        std::fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
        assert!(file_is_no_checkpoint(&file).to_string().contains("is a GGUF file"));
        std::fs::write(&file, b"PK").unwrap();
        let error = file_is_no_checkpoint(&file).to_string();
        assert!(error.contains("is a file") && error.contains(dir.path().to_str().unwrap()), "{error}");
    }
}
