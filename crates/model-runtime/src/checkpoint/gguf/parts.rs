//! The parts of a split GGUF file, `NAME-00001-of-00003.gguf`, and GGUF files in folders.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::header::MAGIC;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::error::abbreviate;

/// Whether a path is a GGUF file, by its name or its first bytes.
pub(super) fn is_gguf(path: &Path) -> bool {
    if !path.is_file() {
        return false;
    }
    let mut first = [0; MAGIC.len()];
    let read =
        std::fs::File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut first));
    has_extension(path) || read.is_ok() && first == *MAGIC
}

fn has_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// What is before `-00001-of-00003.gguf` in a name, and the number of parts.
pub(super) fn split(name: &str) -> Option<(&str, u64)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(count) && is_number(part)).then_some(())?;
    Some((stem, count.parse().ok()?))
}

/// The name of a part.
pub(super) fn part_name(stem: &str, part: u64, count: u64) -> String {
    format!("{stem}-{part:05}-of-{count:05}.gguf")
}

/// The first part of the file that `path` is a part of.
pub(super) fn first_part(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(split);
    name.map_or_else(|| path.to_path_buf(), |(stem, count)| path.with_file_name(part_name(stem, 1, count)))
}

/// The one GGUF model in a folder without other weights.
pub(super) fn in_folder(dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let mut models = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(|e| CheckpointError::io(dir, e))? {
        let path = entry.map_err(|e| CheckpointError::io(dir, e))?.path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => return Ok(None),
            _ if has_extension(&path) && path.is_file() => drop(models.insert(first_part(&path))),
            _ => {}
        }
    }
    match models.len() {
        0 | 1 => Ok(models.pop_first()),
        count => {
            let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let names: Vec<_> = models.iter().map(name).collect();
            Err(CheckpointError::Files(format!(
                "{} holds {count} GGUF models; name the file of one: {}",
                dir.display(),
                abbreviate(&names)
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_known_by_its_name() {
        assert_eq!(split("m-Q4_K_M-00002-of-00003.gguf"), Some(("m-Q4_K_M", 3)));
        for name in ["m.gguf", "m-1-of-3.gguf", "m-00001-of-00003.bin", "00001-of-00003.gguf"] {
            assert_eq!(split(name), None, "{name}");
        }
        assert_eq!(first_part(Path::new("/a/m-00002-of-00003.gguf")), Path::new("/a/m-00001-of-00003.gguf"));
        assert_eq!(first_part(Path::new("m.gguf")), Path::new("m.gguf"));
    }
}
