//! The types of ggml: their numbers in files, names, sizes and schemes.

use moe_kernels::{Levels, QuantGroup, QuantScheme};
use serde::Serialize;

use super::{Block, LONGEST, blocks};

/// A type of quantised tensors in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum GgmlType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// The properties of a type.
struct Kind {
    ggml: GgmlType,
    /// The number of the type in files.
    id: u32,
    name: &'static str,
    /// Columns of a block.
    columns: usize,
    /// Bytes of a block.
    bytes: usize,
    scheme: QuantScheme,
    decode: fn(&[u8], &mut Block),
}

const fn group(columns: usize) -> QuantGroup {
    QuantGroup::Size(columns)
}

/// Integers in a super-block of 256 columns, whose groups share an f16.
const fn k_type(bits: u8, columns: usize) -> QuantScheme {
    QuantScheme::int(bits, group(columns)).with_shared_scales(LONGEST / columns)
}

const IQ4_XS: QuantScheme = QuantScheme::iq4_nl(group(32)).with_shared_scales(LONGEST / 32);

/// All types. Codes of 2 and 3 bits take 4 bits in memory.
const KINDS: &[Kind] = &[
    kind(GgmlType::Q4_0, 2, "Q4_0", [32, 18], QuantScheme::int(4, group(32)), blocks::q4_0),
    kind(GgmlType::Q4_1, 3, "Q4_1", [32, 20], QuantScheme::int(4, group(32)).with_minima(), blocks::q4_1),
    kind(GgmlType::Q5_0, 6, "Q5_0", [32, 22], QuantScheme::int(5, group(32)), blocks::q5_0),
    kind(GgmlType::Q5_1, 7, "Q5_1", [32, 24], QuantScheme::int(5, group(32)).with_minima(), blocks::q5_1),
    kind(GgmlType::Q8_0, 8, "Q8_0", [32, 34], QuantScheme::int(8, group(32)), blocks::q8_0),
    kind(GgmlType::Q2K, 10, "Q2_K", [256, 84], k_type(4, 16).with_minima(), blocks::q2_k),
    kind(GgmlType::Q3K, 11, "Q3_K", [256, 110], k_type(4, 16), blocks::q3_k),
    kind(GgmlType::Q4K, 12, "Q4_K", [256, 144], k_type(4, 32).with_minima(), blocks::q4_k),
    kind(GgmlType::Q5K, 13, "Q5_K", [256, 176], k_type(5, 32).with_minima(), blocks::q5_k),
    kind(GgmlType::Q6K, 14, "Q6_K", [256, 210], k_type(6, 16), blocks::q6_k),
    kind(GgmlType::Iq4Nl, 20, "IQ4_NL", [32, 18], QuantScheme::iq4_nl(group(32)), blocks::iq4_nl),
    kind(GgmlType::Iq4Xs, 23, "IQ4_XS", [256, 136], IQ4_XS, blocks::iq4_xs),
    kind(GgmlType::Mxfp4, 39, "MXFP4", [32, 17], QuantScheme::fp4(group(32)), blocks::mxfp4),
];

const fn kind(
    ggml: GgmlType,
    id: u32,
    name: &'static str,
    [columns, bytes]: [usize; 2],
    scheme: QuantScheme,
    decode: fn(&[u8], &mut Block),
) -> Kind {
    Kind { ggml, id, name, columns, bytes, scheme, decode }
}

/// Types that a file may have but that cannot be read, for errors.
const OTHERS: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
];

/// Returns the name of a type that cannot be read.
pub fn name_of_id(id: u32) -> String {
    let found = OTHERS.iter().find(|(other, _)| *other == id);
    found.map_or_else(|| format!("number {id}"), |(_, name)| (*name).to_string())
}

/// Returns the names of all types that can be read, including floats.
pub fn supported() -> String {
    let names: Vec<_> =
        ["F32", "F16", "BF16"].into_iter().chain(KINDS.iter().map(|kind| kind.name)).collect();
    names.join(", ")
}

impl GgmlType {
    /// Returns the type with this number in files, or `None` for floats and for types that cannot be read.
    pub fn from_id(id: u32) -> Option<Self> {
        KINDS.iter().find(|kind| kind.id == id).map(|kind| kind.ggml)
    }

    /// Returns every type.
    pub fn all() -> impl Iterator<Item = Self> {
        KINDS.iter().map(|kind| kind.ggml)
    }

    fn kind(self) -> &'static Kind {
        // The table has the order of the enum, which a test checks.
        &KINDS[self as usize]
    }

    /// Returns its number in files.
    pub fn id(self) -> u32 {
        self.kind().id
    }

    /// Returns its name in ggml.
    pub fn name(self) -> &'static str {
        self.kind().name
    }

    /// Returns the number of columns of a block.
    pub fn columns(self) -> usize {
        self.kind().columns
    }

    /// Returns the number of bytes of a block.
    pub fn bytes(self) -> usize {
        self.kind().bytes
    }

    /// Returns the meaning of codes, scales and minima.
    pub fn scheme(self) -> QuantScheme {
        self.kind().scheme
    }

    /// Decodes a block of [`bytes`](Self::bytes) bytes.
    pub fn decode(self, block: &[u8], out: &mut Block) {
        (self.kind().decode)(block, out);
        if self.scheme().levels != Levels::One {
            out.multiply_levels();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (at, kind) in KINDS.iter().enumerate() {
            assert_eq!((kind.ggml as usize, GgmlType::from_id(kind.id)), (at, Some(kind.ggml)));
            assert!(kind.columns.is_multiple_of(kind.scheme.group_size(kind.columns)), "{}", kind.name);
        }
        assert_eq!(name_of_id(16), "IQ2_XXS");
        assert_eq!(name_of_id(99), "number 99");
        assert!(supported().starts_with("F32, F16, BF16, Q4_0, ") && supported().ends_with(", MXFP4"));
    }
}
