//! GGUF files for tests, written from the format's definition.

use std::path::Path;

/// A value of the metadata.
pub enum Meta {
    U8(u8),
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// A tensor: its name, dimensions (rows before columns), type and bytes.
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub kind: u32,
    pub bytes: Vec<u8>,
}

/// The bytes of a file of version 3.
#[derive(Default)]
pub struct Writer {
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Writer {
    pub fn put(&mut self, key: &str, value: Meta) {
        self.metadata.push((key.to_string(), value));
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.aligned(32)
    }

    /// The bytes of a file whose tensors begin at multiples of `alignment`; metadata have to say so where it is not 32.
    pub fn aligned(&self, alignment: usize) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            value.write(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    pub fn save(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        let kind: u32 = match self {
            Self::U8(_) => 0,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::Bools(_) | Self::I32s(_) | Self::F32s(_) => 9,
            Self::U64(_) => 10,
        };
        out.extend(kind.to_le_bytes());
        match self {
            Self::U8(x) => out.push(*x),
            Self::U32(x) => out.extend(x.to_le_bytes()),
            Self::U64(x) => out.extend(x.to_le_bytes()),
            Self::I32(x) => out.extend(x.to_le_bytes()),
            Self::F32(x) => out.extend(x.to_le_bytes()),
            Self::Bool(x) => out.push(u8::from(*x)),
            Self::Text(x) => text(out, x),
            Self::Texts(list) => {
                out.extend(8u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|x| text(out, x));
            }
            Self::Bools(list) => {
                out.extend(7u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                out.extend(list.iter().map(|x| u8::from(*x)));
            }
            Self::I32s(list) => {
                out.extend(5u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Self::F32s(list) => {
                out.extend(6u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
        }
    }
}
