//! Checks that an output is still the file to which a run writes. A record in a deleted or truncated file would be lost
//! without notice.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::Path;

/// The change that another program made to an open file, which was at this path with this length.
pub fn change(file: &File, path: &Path, len: u64) -> io::Result<Option<String>> {
    let there = match path.metadata() {
        Ok(there) => Some(there),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    let ours = file.metadata()?;
    let got = ours.len();
    Ok(match there.is_some_and(|there| is_same(&there, &ours)) {
        false => Some("deleted or replaced it".into()),
        true if got < len => Some(format!("shortened it from {len} to {got} bytes")),
        true if got > len => Some(format!("wrote to it: it has {got} bytes, expected {len}")),
        true => None,
    })
}

#[cfg(unix)]
fn is_same(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// On other systems an open file cannot be deleted.
#[cfg(not(unix))]
fn is_same(_: &Metadata, _: &Metadata) -> bool {
    true
}
