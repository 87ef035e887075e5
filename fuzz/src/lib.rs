//! What fuzz targets share: building a checkpoint from the fuzzer's bytes, and using one as the
//! program would.

use std::path::Path;

use model_runtime::TensorFiles;

/// A safetensors file with this header and data; the length field is right, so that mutations of
/// the header are not all refused at the first check.
pub fn safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// The first frame of a connection between two ranks, with right checksums.
pub fn frame(head: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = (head.len() as u32).to_le_bytes().to_vec();
    out.extend((data.len() as u64).to_le_bytes());
    out.extend(crc32fast::hash(head).to_le_bytes());
    out.extend(crc32fast::hash(data).to_le_bytes());
    out.extend(crc32fast::hash(&[&0u64.to_le_bytes()[..], &out].concat()).to_le_bytes());
    [&out, head, data].concat()
}

/// Both sides of the first NUL, which JSON cannot hold; the second is empty without one.
pub fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|&b| b == 0) {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &[]),
    }
}

/// A folder with these files. It goes away with the returned guard.
pub fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).expect("a file in a temporary folder");
    }
    dir
}

/// Opens a folder and reads every tensor. Loading copies at most what the files hold, so sizes in
/// a header cannot ask for memory that the files do not have.
pub fn read_all(dir: &Path) {
    let files = match TensorFiles::open_dir(dir) {
        Ok(files) => files,
        Err(e) => return drop(e.to_string()),
    };
    for tensor in files.iter() {
        if let Ok(loaded) = files.tensor(tensor.name) {
            assert_eq!(loaded.dims(), tensor.shape, "{}", tensor.name);
        }
    }
    let _ = (files.float_dtype(), files.check_finite().map_err(|e| e.to_string()));
    let _ = files.verify([], &["*.inv_freq"]).map_err(|e| e.to_string());
}
