//! Replaces a file as a whole: a crash at any moment leaves the old or the new contents.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A path with `ending` added to its name.
pub fn sibling(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Writes a temporary file next to `path` and, when it is on the disk, renames it to `path`. The new file is returned
/// open for appending, and locked.
pub fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> io::Result<File> {
    let temporary = sibling(path, ".tmp");
    match fs::remove_file(&temporary) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = OpenOptions::new().read(true).append(true).create_new(true).open(&temporary)?;
    let filled = fill(&file, write).and_then(|()| fs::rename(&temporary, path));
    if let Err(e) = filled {
        // The temporary file is useless, and the first error is the one that matters.
        let _ = fs::remove_file(&temporary);
        return Err(e);
    }
    sync_folder(path);
    Ok(file)
}

fn fill(file: &File, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> io::Result<()> {
    // If a file system has no locks, two runs cannot be kept apart, but one run works as before.
    let _ = file.try_lock();
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    write(&mut writer)?;
    writer.flush()?;
    drop(writer);
    file.sync_all()
}

/// Makes sure that the new name is on the disk, if folders can be synced.
fn sync_folder(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
        let _ = folder.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_leaves_the_old_contents() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        fs::write(dir.path().join("file.tmp"), "of a run that was killed").unwrap();
        let full = |out: &mut BufWriter<&File>| {
            out.write_all(b"half of the ")?;
            Err(io::Error::other("disk full"))
        };
        assert_eq!(replace(&path, full).unwrap_err().to_string(), "disk full");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        let mut file = replace(&path, |out| out.write_all(b"new")).unwrap();
        file.write_all(b"er").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "newer");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }
}
