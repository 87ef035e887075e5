//! Reading the small files of a checkpoint.

use std::io;
use std::path::Path;

/// The contents of a small file of a checkpoint. What is no regular file, such as a pipe or a link to a device, is
/// refused: it may have no end, or wait for a writer that never comes.
///
/// # Errors
/// Any error of reading; something else than a file.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let metadata = path.metadata()?;
    // Reading a folder fails with the system's own error.
    if metadata.is_file() || metadata.is_dir() {
        return std::fs::read(path);
    }
    Err(io::Error::other("expected a regular file, got a pipe or a device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn what_has_no_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let link = dir.path().join("link");
        let pipe = dir.path().join("pipe");
        std::fs::write(&file, "{}").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_file(&link).unwrap(), b"{}", "the hub's cache is made of links");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [Path::new("/dev/zero"), &pipe] {
            assert!(read_file(path).unwrap_err().to_string().contains("regular file"), "{}", path.display());
        }
        assert!(read_file(dir.path()).is_err() && read_file(&dir.path().join("none")).is_err());
    }
}
