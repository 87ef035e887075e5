//! Packs that the host makes, from rows that a reader hands over.

use candle_core::{DType, Result};
use rayon::prelude::*;

use super::arrays::{Arrays, upload};
use crate::buffer::Buffer;
use crate::cuda::Staging;
use crate::exec::Exec;
use crate::quant::{PackedScales, QuantRows, TILE_ROWS, TileRow, TileScratch, Tiles};
use crate::view::ViewMut;

/// Some tile rows: the first one, their tiles on the device, and where their scales and zero points go.
type Place<'a> = (usize, ViewMut<'a>, &'a mut [f32], &'a mut [u8]);

/// Threads read and pack some rows each into page-locked buffers, from which they are copied to their place.
pub(super) fn pack(
    tiles: &Tiles,
    matrices: &[&dyn QuantRows],
    staging: &Staging,
    ex: &Exec,
) -> Result<Arrays> {
    let rows = matrices.len() * tiles.n_tiles();
    let row_bytes = tiles.row_bytes();
    let scales_per_row = tiles.scale_lines() * TILE_ROWS;
    let zeros_per_row = tiles.groups * TILE_ROWS;
    let mut scales = vec![0f32; rows * scales_per_row];
    let mut zeros = vec![0u8; if tiles.own_zeros() { rows * zeros_per_row } else { 0 }];
    let mut q = Buffer::unspecified_on(ex.device(), DType::U8, &[rows * row_bytes])?;
    // A chunk is at most the rows that a buffer holds, and small enough that all threads have work.
    let most = staging.buffer_len().checked_div(row_bytes).unwrap_or(rows);
    let chunk = rows.div_ceil(4 * rayon::current_num_threads()).min(most).max(1);
    let mut rest = q.view_mut();
    let mut places = Vec::new();
    let mut zero_chunks = zeros.chunks_mut((chunk * zeros_per_row).max(1));
    for (i, scales) in scales.chunks_mut((chunk * scales_per_row).max(1)).enumerate() {
        let here = chunk.min(rows - i * chunk) * row_bytes;
        let (to, after) = rest.split_at(here)?;
        places.push((i * chunk, to, scales, zero_chunks.next().unwrap_or_default()));
        rest = after;
    }
    let fill = |scratch: &mut TileScratch, (first, to, scales, zeros): Place| {
        staging.put(to, |bytes| {
            let mut zeros = zeros.chunks_mut(zeros_per_row);
            let rows = bytes.chunks_mut(row_bytes.max(1)).zip(scales.chunks_mut(scales_per_row));
            for (i, (q, scales)) in rows.enumerate() {
                let e = (first + i) / tiles.n_tiles();
                let tile = (first + i) % tiles.n_tiles();
                let to = TileRow { q, scales, zeros: zeros.next().unwrap_or_default() };
                tiles.pack((e, tile), matrices[e], scratch, to)?;
            }
            Ok(())
        })
    };
    places.into_par_iter().try_for_each_init(TileScratch::default, fill)?;
    let (scales, scale_rows) = PackedScales::new(tiles.scheme, scales, tiles.scale_lines())?;
    let in_blocks = scales.in_blocks(tiles.groups, scale_rows);
    let scales = match &scales {
        PackedScales::F16(scales) => upload(scales, ex)?,
        PackedScales::Bf16(scales) => upload(scales, ex)?,
        PackedScales::F32(scales) => upload(scales, ex)?,
        PackedScales::Fp4(scales) | PackedScales::Q4k(scales) => upload(scales, ex)?,
    };
    let zeros = tiles.own_zeros().then(|| upload(&zeros, ex)).transpose()?;
    Ok(Arrays { q, scales, scale_rows, in_blocks, zeros })
}
