//! Where a prompt comes from: a flag, a file or stdin. Bad input is named before a model loads.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cli::GenerateArgs;

/// The prompt that the flags name; `None` if they name none.
pub fn read(args: &GenerateArgs) -> Result<Option<String>> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(path)) if path.as_os_str() != "-" => Some(from_file(path)?),
        (None, Some(_)) => Some(from_stdin()?),
        (None, None) if args.stdin.is_some() => Some(from_stdin()?),
        (None, None) => None,
    };
    if prompt.as_deref() == Some("") {
        bail!("the prompt is empty: give at least one character")
    }
    Ok(prompt)
}

fn from_file(path: &Path) -> Result<String> {
    let bytes =
        std::fs::read(path).with_context(|| format!("cannot read the prompt file {}", path.display()))?;
    utf8(bytes, &path.display().to_string())
}

fn from_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read the prompt from stdin")?;
    utf8(bytes, "stdin")
}

fn utf8(bytes: Vec<u8>, source: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let byte = e.as_bytes()[at];
        anyhow::anyhow!(
            "the prompt from {source} is not UTF-8: byte {byte:#04x} at offset {at}; convert the file to UTF-8"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_utf8_are_located() {
        let e = utf8(b"abc\xff".to_vec(), "p.txt").unwrap_err().to_string();
        assert_eq!(e, "the prompt from p.txt is not UTF-8: byte 0xff at offset 3; convert the file to UTF-8");
    }
}
