//! A folder that gets its name when it is complete. Until then its name is `NAME.incomplete`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The number of bytes that are reserved for headers, indices and other files, in addition to the tensors.
const MARGIN: u64 = 64 << 20;

pub struct Folder {
    out: PathBuf,
    incomplete: PathBuf,
    is_done: bool,
}

impl Folder {
    pub fn create(out: &Path) -> Result<Self> {
        if out.exists() {
            bail!("{} exists already; choose another name, or remove it first", out.display())
        }
        let Some(name) = out.file_name() else {
            bail!("{}: expected the name of a folder that does not exist yet", out.display())
        };
        let mut unfinished = name.to_os_string();
        unfinished.push(".incomplete");
        let incomplete = out.with_file_name(unfinished);
        if incomplete.exists() {
            bail!(
                "{} is there: another run is writing it, or one was killed; in that case remove it and run again",
                incomplete.display()
            )
        }
        std::fs::create_dir_all(&incomplete)
            .with_context(|| format!("cannot create {}", incomplete.display()))?;
        Ok(Self { out: out.to_path_buf(), incomplete, is_done: false })
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.incomplete.join(file)
    }

    /// Fails if fewer bytes than this number plus a margin are free.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        check_space(&self.incomplete, &self.out, bytes)
    }

    pub fn finish(mut self) -> Result<()> {
        std::fs::rename(&self.incomplete, &self.out).with_context(|| {
            format!("cannot rename {} to {}", self.incomplete.display(), self.out.display())
        })?;
        self.is_done = true;
        Ok(())
    }
}

/// Fails if fewer bytes than this number plus a margin are free at `place`. `out` is named in the error.
pub fn check_space(place: &Path, out: &Path, bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(place)
        .with_context(|| format!("cannot ask for the free space at {}", place.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < bytes + MARGIN {
        bail!(
            "{}: the checkpoint takes {} MB, but {} MB are free; make room, or choose another place",
            out.display(),
            (bytes + MARGIN) >> 20,
            free >> 20
        )
    }
    Ok(())
}

impl Drop for Folder {
    /// A run that fails leaves no files.
    fn drop(&mut self) {
        if !self.is_done {
            let _ = std::fs::remove_dir_all(&self.incomplete);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_appears_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("model");
        let folder = Folder::create(&out).unwrap();
        std::fs::write(folder.path("x"), "x").unwrap();
        let error = Folder::create(&out).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("model.incomplete is there"), "{error}");
        assert!(!out.exists());
        folder.finish().unwrap();
        assert!(out.join("x").exists());
        let error = Folder::create(&out).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("exists already"), "{error}");
    }

    #[test]
    fn a_run_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::create(&dir.path().join("model")).unwrap();
        let error = folder.check_space(u64::MAX / 2).unwrap_err().to_string();
        assert!(error.contains("are free"), "{error}");
        drop(folder);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
