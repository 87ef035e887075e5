//! One file of weights, memory-mapped or embedded. The header of a safetensors file is validated before any use.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};

use super::change::Change;
use super::error::CheckpointError;

/// Bytes of the header's length field.
const LENGTH_FIELD: usize = 8;
/// What Git LFS leaves in place of a file that was not downloaded.
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs";

enum Bytes {
    Mapped(Mmap),
    Static(&'static [u8]),
}

/// A file of weights.
pub(super) struct TensorFile {
    label: String,
    bytes: Bytes,
    /// The mapped file, for reads that do not map pages.
    #[cfg(any(feature = "cuda", test))]
    file: Option<File>,
}

/// Where a tensor is in its file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Index of the file.
    pub file: usize,
    /// Dtype in the file.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
    /// What is done with each value.
    pub change: Change,
}

impl TensorFile {
    /// Maps a safetensors file and reads its header. Tensors come in the order of their offsets.
    pub fn open(path: &Path, index: usize) -> Result<(Self, Vec<(String, Entry)>), CheckpointError> {
        let file = Self::map(path)?;
        let entries = file.validate(index)?;
        Ok((file, entries))
    }

    /// Maps a file of any format.
    pub fn map(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(|e| CheckpointError::io(path, e))?;
        let len = file.metadata().map_err(|e| CheckpointError::io(path, e))?.len();
        let label = path.display().to_string();
        if len == 0 {
            return Err(CheckpointError::Files(format!(
                "{label}: the file is empty; download or copy it again"
            )));
        }
        // SAFETY: the mapping is read-only, so nothing here changes the bytes. Another process may change
        // or truncate the file, which then gives wrong weights or a bus error here, as with every
        // memory-mapped loader; the documentation of `TensorFiles` forbids it.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| CheckpointError::io(path, e))?;
        let mapped = Self::of(label, Bytes::Mapped(map));
        #[cfg(any(feature = "cuda", test))]
        let mapped = Self { file: Some(file), ..mapped };
        Ok(mapped)
    }

    /// Takes embedded bytes and reads their header.
    pub fn from_static(
        bytes: &'static [u8],
        label: &str,
        index: usize,
    ) -> Result<(Self, Vec<(String, Entry)>), CheckpointError> {
        let file = Self::of(label.to_string(), Bytes::Static(bytes));
        let entries = file.validate(index)?;
        Ok((file, entries))
    }

    fn of(label: String, bytes: Bytes) -> Self {
        Self {
            label,
            bytes,
            #[cfg(any(feature = "cuda", test))]
            file: None,
        }
    }

    fn validate(&self, index: usize) -> Result<Vec<(String, Entry)>, CheckpointError> {
        let data = self.bytes();
        self.check_length(data)?;
        let (header, metadata) = SafeTensors::read_metadata(data).map_err(|e| self.explain(data, e))?;
        let start = LENGTH_FIELD + header;
        let mut entries = Vec::new();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            // The crate checks sizes in wrapping arithmetic; a header that overflows must not
            // become a range outside of the file.
            let range = match (start.checked_add(info.data_offsets.0), start.checked_add(info.data_offsets.1))
            {
                (Some(from), Some(to)) if from <= to && to <= data.len() => from..to,
                _ => return Err(self.corrupt(format!("tensor `{name}` is outside of the file"))),
            };
            let change = Change::None;
            entries.push((
                name,
                Entry { file: index, dtype: info.dtype, shape: info.shape.clone(), range, change },
            ));
        }
        Ok(entries)
    }

    /// The file's name in messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Static(bytes) => bytes,
        }
    }

    /// Reads a range of the file into `out`, which has the same length. A mapped file is read by system calls and not
    /// through the mapping: a page fault for every few pages would cost more than their copy.
    #[cfg(any(feature = "cuda", test))]
    pub fn read_at(&self, range: &Range<usize>, out: &mut [u8]) -> Result<(), CheckpointError> {
        #[cfg(unix)]
        if let Some(file) = &self.file {
            use std::os::unix::fs::FileExt;
            return file.read_exact_at(out, range.start as u64).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    let got = file.metadata().map_or(0, |m| m.len() as usize);
                    self.truncated(range.end as u128, got)
                }
                _ => CheckpointError::io(Path::new(&self.label), e),
            });
        }
        #[cfg(not(unix))]
        let _ = &self.file;
        out.copy_from_slice(&self.bytes()[range.clone()]);
        Ok(())
    }

    /// Tells the kernel that a range has been copied, so that its pages do not stay resident in addition to the copy.
    /// Only whole pages inside the range are released.
    pub fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            // Multiple of every page size in use; a smaller page only leaves a few resident.
            const PAGE: usize = 64 << 10;
            let from = range.start.next_multiple_of(PAGE);
            let to = range.end / PAGE * PAGE;
            if from < to {
                // SAFETY: the mapping is shared, read-only and backed by the file, so the advice
                // discards no data: a later access reads the same bytes from the file again.
                let advised = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, to - from)
                };
                if let Err(e) = advised {
                    tracing::debug!("{}: madvise failed: {e}", self.label);
                }
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    fn corrupt(&self, reason: impl std::fmt::Display) -> CheckpointError {
        corrupt(&self.label, reason)
    }

    fn truncated(&self, expected: u128, got: usize) -> CheckpointError {
        CheckpointError::Files(format!(
            "{} is truncated: its header needs {expected} bytes, the file has {got}; download or copy it again",
            self.label
        ))
    }

    /// The checks that tell a cut file from a wrong one, before the header is parsed.
    fn check_length(&self, data: &[u8]) -> Result<(), CheckpointError> {
        if data.starts_with(LFS_POINTER) {
            return Err(self.corrupt("it is a Git LFS pointer, not the weights; run `git lfs pull`"));
        }
        let Some(length) = data.first_chunk::<LENGTH_FIELD>() else {
            return Err(self.truncated(LENGTH_FIELD as u128, data.len()));
        };
        let header = u64::from_le_bytes(*length) as u128;
        // The format caps headers at 100 MB; a longer one means that this is another kind of file.
        if header <= 100_000_000 && LENGTH_FIELD as u128 + header > data.len() as u128 {
            return Err(self.truncated(LENGTH_FIELD as u128 + header, data.len()));
        }
        Ok(())
    }

    /// Turns the parser's error into one that names sizes where they are the reason.
    fn explain(&self, data: &[u8], error: SafeTensorError) -> CheckpointError {
        match error {
            SafeTensorError::HeaderTooLarge => self.corrupt(
                "its first 8 bytes give a header of more than 100 MB; is this another kind of file?",
            ),
            SafeTensorError::MetadataIncompleteBuffer => match declared_size(data) {
                Some(expected) if expected > data.len() as u128 => self.truncated(expected, data.len()),
                Some(expected) => self.corrupt(format!(
                    "its header describes {expected} bytes, the file has {}; download or copy it again",
                    data.len()
                )),
                None => self.corrupt(error),
            },
            error => self.corrupt(error),
        }
    }
}

fn corrupt(file: &str, reason: impl std::fmt::Display) -> CheckpointError {
    CheckpointError::Files(format!("{file} is not a valid safetensors file: {reason}"))
}

/// Size of a file by its own header: the end of the last tensor.
fn declared_size(data: &[u8]) -> Option<u128> {
    let header = usize::try_from(u64::from_le_bytes(*data.first_chunk::<LENGTH_FIELD>()?)).ok()?;
    let start = LENGTH_FIELD.checked_add(header)?;
    let json: serde_json::Value = serde_json::from_slice(data.get(LENGTH_FIELD..start)?).ok()?;
    let tensors = json.as_object()?.iter().filter(|(name, _)| *name != "__metadata__");
    let ends = tensors.filter_map(|(_, t)| t.get("data_offsets")?.get(1)?.as_u64());
    Some(start as u128 + ends.max().unwrap_or(0) as u128)
}
