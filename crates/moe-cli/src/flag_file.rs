//! Files that flags name. They are read when flags are checked and again when they are used. A pipe, such as a shell's
//! `<(...)`, can only be read once, so its contents are kept.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The largest number of bytes that is read from an input without a size: a device may never end.
const LONGEST: u64 = 64 << 20;

/// The contents of pipes and devices, kept until the process ends.
static HELD: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// The contents of a file. A pipe is read once, and later calls return the same contents.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    if path.metadata()?.is_file() {
        return std::fs::read(path);
    }
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bytes) = held.get(path) {
        return Ok(bytes.clone());
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("it is no file, and holds more than {} MiB", LONGEST >> 20)));
    }
    held.insert(path.to_path_buf(), bytes.clone());
    Ok(bytes)
}

/// The text of a file, like [`read`].
pub fn read_text(path: &Path) -> io::Result<String> {
    let not_utf8 = |e: std::string::FromUtf8Error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not UTF-8: {}", e.utf8_error()))
    };
    String::from_utf8(read(path)?).map_err(not_utf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_anew_each_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["first", "second"] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(read_text(file.path()).unwrap(), text);
        }
        std::fs::write(file.path(), b"\xff").unwrap();
        assert!(read_text(file.path()).unwrap_err().to_string().contains("UTF-8"));
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_read_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::write(pipe, "{}").unwrap()
        });
        assert_eq!(read_text(&pipe).unwrap(), "{}");
        writer.join().unwrap();
        assert_eq!(read_text(&pipe).unwrap(), "{}", "without a second writer");
        assert!(read(Path::new("/dev/zero")).unwrap_err().to_string().contains("64 MiB"));
    }
}
