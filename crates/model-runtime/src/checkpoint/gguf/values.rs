//! The values of a GGUF file's metadata.

use std::ops::Range;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(List),
}

/// A list, which is read when it is asked for: a vocabulary has hundreds of thousands of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct List {
    pub kind: Kind,
    pub len: usize,
    /// The bytes of the file that hold its values.
    pub bytes: Range<usize>,
}

/// The types of values, by their numbers in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    /// The type of this number.
    pub fn of(id: u32) -> Option<Self> {
        const ALL: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::List,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        ALL.get(id as usize).copied()
    }

    /// Bytes of a number; `None` for what has no fixed length.
    pub fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::List => None,
        }
    }

    /// A number of this type from its bytes; a truth value counts as one where it is not 0.
    pub fn number(self, bytes: &[u8]) -> Value {
        let mut low = [0; 8];
        low.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
        let bits = u64::from_le_bytes(low);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 | Self::Text | Self::List => Value::Unsigned(bits),
            Self::I8 => Value::Signed(i64::from(bits as i8)),
            Self::I16 => Value::Signed(i64::from(bits as i16)),
            Self::I32 => Value::Signed(i64::from(bits as i32)),
            Self::I64 => Value::Signed(bits as i64),
            Self::F32 => Value::Float(f64::from(f32::from_bits(bits as u32))),
            Self::F64 => Value::Float(f64::from_bits(bits)),
            Self::Bool => Value::Bool(bits != 0),
        }
    }
}

impl Value {
    /// As JSON; `None` for lists.
    pub fn json(&self) -> Option<serde_json::Value> {
        Some(match self {
            Self::Unsigned(x) => (*x).into(),
            Self::Signed(x) => (*x).into(),
            // As the shortest decimal that is the same f32: rope.freq_base 1e6 and epsilon 1e-6, not their expansions.
            Self::Float(x) => shortest(*x).into(),
            Self::Bool(x) => (*x).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(_) => return None,
        })
    }

    /// A whole number that is not negative.
    pub fn unsigned(&self) -> Option<u64> {
        match self {
            Self::Unsigned(x) => Some(*x),
            Self::Signed(x) => u64::try_from(*x).ok(),
            _ => None,
        }
    }
}

/// The f64 that the shortest decimal of an f32 means; another f64 as it is.
fn shortest(x: f64) -> f64 {
    let narrow = x as f32;
    match f64::from(narrow) == x {
        true => narrow.to_string().parse().unwrap_or(x),
        false => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_sign_and_their_shortest_decimal() {
        assert_eq!(Kind::I8.number(&[0xff]), Value::Signed(-1));
        assert_eq!(Kind::U16.number(&[0xff, 0xff]), Value::Unsigned(65535));
        assert_eq!(Kind::F32.number(&1e-6f32.to_le_bytes()).json(), Some(1e-6.into()));
        assert_eq!(Kind::F32.number(&1e6f32.to_le_bytes()).json(), Some(1e6.into()));
        assert_eq!(Value::Signed(-3).unsigned(), None);
        assert_eq!((Kind::of(8), Kind::of(12), Kind::of(13)), (Some(Kind::Text), Some(Kind::F64), None));
    }
}
