//! The history of the lines typed at the terminal, for the arrow keys. It is kept between runs in a file that only its
//! owner can read.
//!
//! Each line of the file is a JSON string, so that a message of several lines is one entry.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Number of entries that are kept when a file has grown to twice as many.
const KEPT: usize = 1000;

/// A file of entries.
pub struct History(File);

impl History {
    /// Opens or creates a file, and returns its entries, the oldest first. Invalid entries are skipped.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<String>)> {
        if let Some(folder) = path.parent() {
            make_folder(folder)?;
        }
        // Opening a pipe would wait for a writer.
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(io::Error::other("it is no ordinary file"));
        }
        let mut file = private(path, OpenOptions::new().read(true).append(true))?;
        let bytes = fs::read(path)?;
        let lines = bytes.split(|byte| *byte == b'\n');
        let mut entries: Vec<String> = lines.filter_map(|line| serde_json::from_slice(line).ok()).collect();
        if entries.len() >= 2 * KEPT {
            entries.drain(..entries.len() - KEPT);
            file = rewrite(path, &entries)?;
        } else if bytes.last().is_some_and(|byte| *byte != b'\n') {
            // A write that was cut off must not damage the next entry.
            file.write_all(b"\n")?;
        }
        Ok((Self(file), entries))
    }

    /// Adds an entry by one write, because two conversations may share the file.
    pub fn add(&mut self, entry: &str) -> io::Result<()> {
        self.0.write_all(format!("{}\n", serde_json::Value::from(entry)).as_bytes())
    }
}

/// Replaces the file by one that holds these entries alone.
fn rewrite(path: &Path, entries: &[String]) -> io::Result<File> {
    let temporary = path.with_extension("tmp");
    let _ = fs::remove_file(&temporary);
    let mut file = private(&temporary, OpenOptions::new().append(true))?;
    let text: String =
        entries.iter().map(|entry| format!("{}\n", serde_json::Value::from(&**entry))).collect();
    file.write_all(text.as_bytes())?;
    fs::rename(&temporary, path)?;
    Ok(file)
}

/// Opens a file. If it is created now, only its owner can read it.
fn private(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.create(true).open(path)
}

fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// The place of such a file on this platform, by environment variables; `None` without a home folder.
pub fn place(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // The specification of XDG ignores relative paths.
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = if cfg!(windows) {
        folder("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        folder("HOME").map(|home| home.join("Library/Application Support"))
    } else {
        folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state")))
    };
    state.map(|state| state.join("moe").join("chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_and_belong_to_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new").join("moe").join("chat_history");
        let (mut history, entries) = History::open(&path).unwrap();
        assert!(entries.is_empty());
        history.add("two\nlines \"é\"").unwrap();
        history.add("/quit").unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(path.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
        drop(history);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("not an entry\n{text}\"torn")).unwrap();
        let (mut history, entries) = History::open(&path).unwrap();
        assert_eq!(entries, ["two\nlines \"é\"", "/quit"]);
        history.add("next").unwrap();
        assert_eq!(History::open(&path).unwrap().1.last().map(String::as_str), Some("next"));
    }

    #[test]
    fn a_long_file_is_cut_to_its_newest_entries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat_history");
        fs::write(&path, (0..2 * KEPT).map(|i| format!("\"{i}\"\n")).collect::<String>()).unwrap();
        let (mut history, entries) = History::open(&path).unwrap();
        assert_eq!((entries.len(), entries[0].as_str()), (KEPT, "1000"));
        history.add("new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), KEPT + 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_cannot_be_opened_is_an_error_and_no_wait() {
        let dir = tempfile::tempdir().unwrap();
        assert!(History::open(dir.path()).is_err(), "a folder");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(History::open(&file.join("chat_history")).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_place_follows_the_environment() {
        let place = |known: &[(&str, &str)]| {
            let path = place(|name| known.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()));
            path.map(|path| path.display().to_string())
        };
        assert_eq!(place(&[("HOME", "/h")]).unwrap(), "/h/.local/state/moe/chat_history");
        assert_eq!(place(&[("HOME", "/h"), ("XDG_STATE_HOME", "/s")]).unwrap(), "/s/moe/chat_history");
        assert_eq!(
            place(&[("HOME", "/h"), ("XDG_STATE_HOME", "s")]).unwrap(),
            "/h/.local/state/moe/chat_history"
        );
        assert_eq!(place(&[("HOME", "")]), None);
        assert_eq!(place(&[]), None);
    }
}
