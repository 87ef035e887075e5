//! The scales of a pack on a device, in the shortest form that holds all of them.

// Only CUDA builds have a device to pack for; the forms are tested in all.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use candle_core::Result;
use half::{bf16, f16};

use super::fp4_scales::push_scales;
use super::q4k;
use super::tile_rows::TILE_ROWS;
use crate::element::Float;
use crate::scheme::{Codes, QuantScheme};

/// Rows that share scales in schemes with blocks.
const BLOCK_ROWS: usize = 128;

/// Scales in the form in which a device stores them.
#[derive(Debug)]
pub(crate) enum PackedScales {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    /// FP4: for each tile row the factors of its rows in f32, and [groups, 16] bytes.
    Fp4(Vec<u8>),
    /// Q4_K: units of 128 columns.
    Q4k(Vec<u8>),
}

impl PackedScales {
    /// Whether the rows 128 i to 128 i + 127 have the same `groups` scales, for every i. `of_tile` is the number of
    /// scales of a tile row in a group.
    pub(crate) fn in_blocks(&self, groups: usize, of_tile: usize) -> bool {
        let Self::F32(scales) = self else { return false };
        let tile = groups * of_tile;
        let mut blocks = scales.chunks_exact(tile * (BLOCK_ROWS / TILE_ROWS));
        let tiles_agree = blocks.all(|block| block.chunks_exact(tile).all(|other| *other == block[..tile]));
        let rows_agree = || scales.chunks_exact(of_tile).all(|group| group.iter().all(|s| *s == group[0]));
        tiles_agree && blocks.remainder().is_empty() && rows_agree()
    }

    /// Chooses the form of scales, of which a tile row has [`lines`](super::Tiles::scale_lines) of 16. Integers have
    /// the shorter type that holds all scales, FP4 has bytes. FP8 has f32, with one scale for eight rows if these
    /// agree. Also returns the number of scales of a tile row in a group.
    ///
    /// # Errors
    /// Scales that bytes do not hold.
    pub(crate) fn new(scheme: QuantScheme, scales: Vec<f32>, lines: usize) -> Result<(Self, usize)> {
        if scheme.is_q4k() {
            return Ok((Self::Q4k(q4k::bytes(&scales)), TILE_ROWS));
        }
        if scheme.codes == Codes::E2m1 {
            let mut bytes = Vec::with_capacity(scales.len() + scales.len() / lines.max(1) * size_of::<f32>());
            for tile in scales.chunks_exact((lines * TILE_ROWS).max(1)) {
                push_scales(scheme, tile, &mut bytes)?;
            }
            return Ok((Self::Fp4(bytes), TILE_ROWS));
        }
        if scheme.codes == Codes::E4m3 {
            let halves = || scales.chunks_exact(TILE_ROWS / 2);
            return Ok(match halves().all(|half| half.iter().all(|scale| *scale == half[0])) {
                true => (Self::F32(halves().map(|half| half[0]).collect()), 2),
                false => (Self::F32(scales), TILE_ROWS),
            });
        }
        fn narrowed<T: Float>(scales: &[f32]) -> Option<Vec<T>> {
            let exact = |s: &f32| Some(T::narrow(*s)).filter(|n| n.widen() == *s || s.is_nan());
            scales.iter().map(exact).collect()
        }
        let packed = if let Some(scales) = narrowed(&scales) {
            Self::F16(scales)
        } else if let Some(scales) = narrowed(&scales) {
            Self::Bf16(scales)
        } else {
            Self::F32(scales)
        };
        Ok((packed, TILE_ROWS))
    }
}
