//! The block formats of ggml, which GGUF files use. A block is a part of a row, with its codes and its scales.
//!
//! The layouts are those that `block_q4_0` to `block_mxfp4` have in ggml (`ggml-common.h`). A fixture compares
//! [`GgmlType::decode`] with the reference decoders of the Python package `gguf`.

mod blocks;
mod kinds;
mod rows;

use half::f16;
pub use kinds::{GgmlType, name_of_id, supported};
pub(crate) use rows::fill;

/// Columns of the longest block.
const LONGEST: usize = 256;
/// The largest number of groups in a block.
const MOST_GROUPS: usize = 16;

/// The decoded values of a block: w = scale * (value(code) - middle) - minimum, by the scheme of its type.
#[derive(Clone, Debug)]
pub struct Block {
    /// Codes in the order of the columns.
    pub codes: [u8; LONGEST],
    /// Scales of the groups.
    pub scales: [f32; MOST_GROUPS],
    /// Minima of the groups, for types that have minima.
    pub minima: [f32; MOST_GROUPS],
    /// For types with scales in two levels: the two values that the groups of the block share. `scales` are multiples
    /// of the first, and `minima` of the second.
    pub shared: [f16; 2],
    /// The factor by which each group multiplies `shared[0]`.
    pub factors: [i8; MOST_GROUPS],
    /// The factor by which each group multiplies `shared[1]`.
    pub minimum_factors: [i8; MOST_GROUPS],
}

impl Block {
    /// Computes the scales and minima from the two levels. The products are exact.
    fn multiply_levels(&mut self) {
        let [scale, minimum] = self.shared.map(f16::to_f32);
        self.scales = self.factors.map(|factor| scale * f32::from(factor));
        self.minima = self.minimum_factors.map(|factor| minimum * f32::from(factor));
    }
}

impl Default for Block {
    fn default() -> Self {
        Self {
            codes: [0; LONGEST],
            scales: [0.0; MOST_GROUPS],
            minima: [0.0; MOST_GROUPS],
            shared: [f16::ZERO; 2],
            factors: [0; MOST_GROUPS],
            minimum_factors: [0; MOST_GROUPS],
        }
    }
}
