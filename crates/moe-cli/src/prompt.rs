//! Reads prompts from flags, files or stdin. Errors of the input are reported before a model is loaded.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};

use crate::cli::GenerateArgs;
use crate::error::usage;

/// The prompts of the flags, else of a pipe; none if stdin is a terminal.
pub fn read(args: &GenerateArgs) -> Result<Vec<String>> {
    let file = |path: &PathBuf| if path.as_os_str() == "-" { from_stdin() } else { from_file(path) };
    let prompts = if !args.prompt_file.is_empty() {
        args.prompt_file.iter().map(file).collect::<Result<_>>()?
    } else if !args.prompt.is_empty() {
        args.prompt.clone()
    } else if let Some(text) = args.text.as_ref().filter(|text| *text != "-") {
        vec![text.clone()]
    } else if args.text.is_some() || !std::io::stdin().is_terminal() {
        vec![from_stdin()?]
    } else {
        Vec::new()
    };
    if prompts.iter().any(String::is_empty) {
        let empty =
            "the prompt is empty: give at least one character, by --prompt, --prompt-file or through a pipe";
        let by_flag = !args.prompt.is_empty() || args.text.is_some();
        return Err(if by_flag { usage(empty) } else { anyhow!(empty) });
    }
    Ok(prompts)
}

/// The token ids of a prompt that contains only token ids.
pub fn token_ids(prompt: &str) -> Result<Vec<u32>> {
    let words = prompt.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let id = |word: &str| {
        word.parse().map_err(|_| {
            usage(format!(
                "the prompt holds {word:?}: without a tokenizer a prompt is token ids such as 5, 17, 3"
            ))
        })
    };
    words.map(id).collect()
}

fn from_file(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path)
        .map_err(|e| usage(format!("--prompt-file {}: cannot read the file: {e}", path.display())))?;
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
    fn token_ids_may_stand_in_for_text() {
        assert_eq!(token_ids("5, 17 3,\n4").unwrap(), [5, 17, 3, 4]);
        assert!(token_ids("5 ROMEO:").unwrap_err().to_string().contains("\"ROMEO:\""));
        assert!(token_ids("-1").is_err() && token_ids("4294967296").is_err());
    }

    #[test]
    fn bytes_that_are_not_utf8_are_located() {
        let e = utf8(b"abc\xff".to_vec(), "p.txt").unwrap_err().to_string();
        assert_eq!(e, "the prompt from p.txt is not UTF-8: byte 0xff at offset 3; convert the file to UTF-8");
    }
}
