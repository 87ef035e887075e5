//! Describes a file that was given instead of a checkpoint, and says what to give.

use std::path::Path;

use crate::error::usage;

const EXPECTED: &str = "expected a checkpoint in the layout of transformers, with config.json, tokenizer.json and \
                        safetensors weights";

/// Returns the error for a file that is given where a checkpoint is expected.
pub fn file_is_no_checkpoint(path: &Path) -> anyhow::Error {
    let shown = path.display();
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    usage(format!("--model {shown} is a file; {EXPECTED}: name its folder, such as {}", parent.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_checkpoint_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.bin");
        std::fs::write(&file, b"PK").unwrap();
        let error = file_is_no_checkpoint(&file).to_string();
        assert!(error.contains("is a file") && error.contains(dir.path().to_str().unwrap()), "{error}");
    }
}
