//! The header of one GGUF file: metadata, and the places of its tensors. Everything that a header announces is compared
//! with the bytes that there are before memory is taken for it.
//!
//! The format: `docs/gguf.md` of the ggml project.

use std::collections::BTreeMap;
use std::ops::Range;

use moe_quant::{GgmlType, name_of_id, supported};
use safetensors::tensor::Dtype;

use super::values::{Kind, List, Value};

/// What every file begins with.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// The largest length of a key or of a tensor's name.
const LONGEST_NAME: usize = 65_535;
/// Dimensions of a tensor, at most.
const DIMENSIONS: usize = 4;
/// Fewest bytes of an entry of the metadata: a length, a type, and a value of one byte.
const ENTRY_BYTES: usize = 13;
/// Fewest bytes of a tensor's entry: lengths, a type, an offset, one dimension.
const TENSOR_BYTES: usize = 32;
/// Where `general.alignment` says nothing.
const ALIGNMENT: usize = 32;

/// What a header says.
#[derive(Debug)]
pub(super) struct Header {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Tensor>,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub name: String,
    /// Rows before columns: the last dimension is the one whose elements are neighbours.
    pub shape: Vec<usize>,
    pub stored: Stored,
    /// The byte of the file at which its data begins.
    pub range: Range<usize>,
}

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    Floats(Dtype),
    Blocks(GgmlType),
}

impl Stored {
    fn of(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::Floats(Dtype::F32)),
            1 => Some(Self::Floats(Dtype::F16)),
            30 => Some(Self::Floats(Dtype::BF16)),
            _ => GgmlType::from_id(id).map(Self::Blocks),
        }
    }

    /// Columns and bytes of a block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::Floats(dtype) => (1, dtype.bitsize() / 8),
            Self::Blocks(ggml) => (ggml.columns(), ggml.bytes()),
        }
    }

    /// Bytes of a row with this number of columns.
    pub fn row_bytes(self, columns: usize) -> usize {
        let (size, bytes) = self.block();
        columns / size * bytes
    }

    /// Returns the bytes of a part of a tensor with these dimensions, or `None` if its rows end inside of a block.
    pub fn bytes(self, shape: &[usize]) -> Option<usize> {
        let (columns, rows) = shape.split_last()?;
        let is_whole = columns.is_multiple_of(self.block().0);
        is_whole.then(|| rows.iter().product::<usize>() * self.row_bytes(*columns))
    }

    pub fn name(self) -> String {
        match self {
            Self::Floats(dtype) => format!("{dtype:?}"),
            Self::Blocks(ggml) => ggml.name().to_string(),
        }
    }
}

/// Whether the beginning of a GGUF file of `size` bytes holds its whole header.
pub fn holds_header(beginning: &[u8], size: u64) -> bool {
    Header::read(beginning, size).is_ok()
}

impl Header {
    /// Reads the header of a file of `len` bytes, of which `file` are the first.
    ///
    /// # Errors
    /// What is wrong, in a sentence without the file's name.
    pub fn read(file: &[u8], len: u64) -> Result<Self, String> {
        let mut cursor = Cursor { file, at: 0 };
        if cursor.take(4)? != MAGIC {
            return Err("it does not begin with GGUF; is this another kind of file?".into());
        }
        match cursor.u32()? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 2 | 3) => {
                return Err("it is big-endian; convert it for little-endian machines".into());
            }
            version => return Err(format!("it has version {version} of the format; expected 2 or 3")),
        }
        let tensors = cursor.count("tensors", TENSOR_BYTES)?;
        let entries = cursor.count("entries of metadata", ENTRY_BYTES)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = cursor.name()?;
            let value = cursor.value().map_err(|problem| format!("`{key}`: {problem}"))?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("`{key}` is there twice"));
            }
        }
        let records = (0..tensors).map(|_| cursor.record()).collect::<Result<Vec<_>, _>>()?;
        let alignment = alignment(&metadata)?;
        let data = cursor.at.checked_next_multiple_of(alignment).ok_or("its header is too long")?;
        let place = |record: Record| record.place(data, alignment, len);
        let tensors = records.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        check_apart(&tensors)?;
        Ok(Self { metadata, tensors })
    }
}

/// Fails if two tensors share bytes of the file.
fn check_apart(tensors: &[Tensor]) -> Result<(), String> {
    let mut by_place: Vec<_> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| tensor.range.start);
    for (tensor, next) in by_place.iter().zip(by_place.iter().skip(1)) {
        if next.range.start < tensor.range.end {
            return Err(format!(
                "tensor `{}` begins at byte {}, before tensor `{}` ends at byte {}; the file is damaged",
                next.name, next.range.start, tensor.name, tensor.range.end
            ));
        }
    }
    Ok(())
}

/// The multiple of bytes at which tensors begin.
fn alignment(metadata: &BTreeMap<String, Value>) -> Result<usize, String> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(ALIGNMENT) };
    let found = value.unsigned().and_then(|x| usize::try_from(x).ok());
    found.filter(|x| x.is_power_of_two() && *x <= 1 << 20).ok_or_else(|| {
        format!("`general.alignment`: expected a power of two up to {}, got {value:?}", 1 << 20)
    })
}

/// A tensor before it is known where the data begin.
struct Record {
    name: String,
    shape: Vec<usize>,
    type_id: u32,
    offset: u64,
}

impl Record {
    fn place(self, data: usize, alignment: usize, len: u64) -> Result<Tensor, String> {
        let Self { name, shape, type_id, offset } = self;
        let Some(stored) = Stored::of(type_id) else {
            return Err(format!(
                "tensor `{name}` has the type {}, which is not supported; supported are {}",
                name_of_id(type_id),
                supported()
            ));
        };
        let (size, bytes) = stored.block();
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(size) {
            return Err(format!(
                "tensor `{name}` {shape:?}: blocks of {size} columns of {} do not divide {columns}",
                stored.name()
            ));
        }
        let elements = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let needed = elements.and_then(|n| (n / size).checked_mul(bytes));
        let start = usize::try_from(offset).ok().filter(|at| at.is_multiple_of(alignment));
        let start = start.ok_or_else(|| {
            format!("tensor `{name}` begins at {offset}; expected a multiple of the alignment {alignment}")
        })?;
        let range = data.checked_add(start).and_then(|at| Some(at..at.checked_add(needed?)?));
        match range {
            Some(range) if range.end as u64 <= len => Ok(Tensor { name, shape, stored, range }),
            Some(range) => Err(format!(
                "it is truncated: tensor `{name}` ends at byte {}, the file has {len}; download or copy it again",
                range.end
            )),
            None => Err(format!("tensor `{name}` {shape:?} is larger than any file")),
        }
    }
}

/// Reads values one after the other.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.file.len());
        let end = end.ok_or_else(|| {
            format!(
                "it is truncated: its header needs {len} bytes at {}, the file has {}; download or copy it again",
                self.at,
                self.file.len()
            )
        })?;
        let bytes = &self.file[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    }

    fn u64(&mut self) -> Result<u64, String> {
        let bytes = self.take(8)?;
        Ok(bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
    }

    /// A number of things that take at least `bytes` each.
    fn count(&mut self, what: &str, bytes: usize) -> Result<usize, String> {
        let count = self.u64()?;
        let most = (self.file.len() - self.at) / bytes;
        usize::try_from(count).ok().filter(|count| *count <= most).ok_or_else(|| {
            format!(
                "its header announces {count} {what}, for which {} bytes have no room; it is damaged or truncated",
                self.file.len()
            )
        })
    }

    fn text(&mut self) -> Result<&'a str, String> {
        let len = self.u64()?;
        let len =
            usize::try_from(len).map_err(|_| format!("a text of {len} bytes has no room in the file"))?;
        std::str::from_utf8(self.take(len)?).map_err(|e| format!("a text is not UTF-8: {e}"))
    }

    fn name(&mut self) -> Result<String, String> {
        let at = self.at;
        let name = self.text().map_err(|e| format!("the name at byte {at}: {e}"))?;
        match name.len() > LONGEST_NAME || name.is_empty() {
            true => {
                Err(format!("the name at byte {at} has {} bytes; expected 1 to {LONGEST_NAME}", name.len()))
            }
            false => Ok(name.to_string()),
        }
    }

    fn kind(&mut self) -> Result<Kind, String> {
        let id = self.u32()?;
        Kind::of(id).ok_or_else(|| format!("a value of type {id}; expected 0 to 12"))
    }

    fn value(&mut self) -> Result<Value, String> {
        match self.kind()? {
            Kind::Text => Ok(Value::Text(self.text()?.to_string())),
            Kind::List => self.list().map(Value::List),
            kind => Ok(kind.number(self.take(kind.size().unwrap_or(0))?)),
        }
    }

    fn list(&mut self) -> Result<List, String> {
        let kind = self.kind()?;
        let len = self.count("values of a list", kind.size().unwrap_or(8))?;
        let start = self.at;
        match (kind, kind.size()) {
            (Kind::List, _) => return Err("lists of lists are not read".into()),
            // This cannot overflow, because this number of values fits into the file.
            (_, Some(size)) => drop(self.take(len * size)?),
            (_, None) => {
                for _ in 0..len {
                    self.text()?;
                }
            }
        }
        Ok(List { kind, len, bytes: start..self.at })
    }

    fn record(&mut self) -> Result<Record, String> {
        let name = self.name()?;
        let dimensions = self.u32()? as usize;
        if !(1..=DIMENSIONS).contains(&dimensions) {
            return Err(format!("tensor `{name}` has {dimensions} dimensions; expected 1 to {DIMENSIONS}"));
        }
        let mut shape = Vec::with_capacity(dimensions);
        for _ in 0..dimensions {
            let dim = self.u64()?;
            let dim = usize::try_from(dim).ok().filter(|dim| *dim > 0);
            shape.push(dim.ok_or_else(|| format!("tensor `{name}`: expected dimensions of at least 1"))?);
        }
        shape.reverse();
        Ok(Record { name, shape, type_id: self.u32()?, offset: self.u64()? })
    }
}

impl List {
    /// The texts of a list of texts in the file that it was read from.
    pub fn texts<'f>(&self, file: &'f [u8]) -> Option<Vec<&'f str>> {
        if self.kind != Kind::Text {
            return None;
        }
        let mut cursor = Cursor { file: file.get(..self.bytes.end)?, at: self.bytes.start };
        (0..self.len).map(|_| cursor.text().ok()).collect()
    }

    /// The numbers of a list of numbers in the file that it was read from.
    pub fn numbers(&self, file: &[u8]) -> Option<Vec<Value>> {
        let size = self.kind.size()?;
        let bytes = file.get(self.bytes.clone())?;
        Some(bytes.chunks_exact(size).map(|bytes| self.kind.number(bytes)).collect())
    }
}
