//! Packs that a device makes, from the bytes of a file (`cuda/load/pack_stored.cu`).

use std::ops::Range;

use candle_core::{DType, Result};
use rayon::prelude::*;

use super::arrays::Arrays;
use crate::buffer::Buffer;
use crate::cuda::args::{Dtype, In, Out, QuantPackStoredArgs, StoredCoding};
use crate::cuda::quant_format::QuantFormat;
use crate::cuda::{CudaExec, Staging, ffi, small};
use crate::exec::Exec;
use crate::quant::{StoredBatches, StoredWords, TILE_ROWS, Tiles};
use crate::scheme::{Codes, QuantScheme};

const OP: &str = "packing quantised weights";

/// `Found` of the kernel.
mod found {
    pub const BAD_ZERO: u32 = 1;
    pub const NAN: u32 = 2;
    pub const NOT_F16: u32 = 4;
    pub const NOT_BF16: u32 = 8;
    pub const HALVES_DIFFER: u32 = 16;
    pub const ROWS_DIFFER: u32 = 32;
    pub const TILES_DIFFER: u32 = 64;
}
/// Tile rows of which a block of 128 rows is made.
const BLOCK_TILES: usize = 8;

/// Threads read batches into page-locked buffers; each batch is copied to scratch memory, from which a kernel writes
/// its tile rows. In addition to the pack, the device holds that memory and, until the pack is complete, its scales in
/// f32. `None`: the file has values that the format does not have.
pub(super) fn pack(
    tiles: &Tiles,
    batches: &StoredBatches,
    staging: &Staging,
    ex: &Exec,
) -> Result<Option<Arrays>> {
    let cuda = ex.cuda(OP)?;
    let rows = tiles.dims[0] * tiles.n_tiles();
    let count = rows * tiles.groups * TILE_ROWS;
    let new = |dtype, len| Buffer::unspecified_on(ex.device(), dtype, &[len]);
    let mut q = new(DType::U8, rows * tiles.row_bytes())?;
    let mut wide = new(DType::F32, count)?;
    let mut zeros = tiles.own_zeros().then(|| new(DType::U8, count)).transpose()?;
    let mut found = cuda.in_turn(|| Buffer::zeros_on(ex.device(), DType::U32, &[1]))?;
    let args = Addresses {
        args: QuantPackStoredArgs {
            q: cuda.write(OP, "integers", &mut q.view_mut())?,
            scales: cuda.write(OP, "scales", &mut wide.view_mut())?,
            zeros: cuda.write_or_null(OP, "zero points", zeros.as_mut().map(Buffer::view_mut).as_mut())?,
            found: cuda.write(OP, "what was found", &mut found.view_mut())?,
            ..form(tiles, batches)?
        },
    };
    let bring = |scratch: &mut Vec<u8>, batch: &Range<usize>| {
        let launch = |stored: u64, cuda: &CudaExec| {
            let args = QuantPackStoredArgs {
                stored: stored as In,
                first: batch.start as i64,
                count: batch.len() as i64,
                ..args.get()
            };
            // SAFETY: `stored` holds the batch, whose table names places within it; the arrays have room for all tile
            // rows.
            cuda.check(OP, unsafe { ffi::moe_quant_pack_stored(&args, cuda.raw()?) })
        };
        staging.put_through(batches.len(batch), |out| batches.fill(batch, scratch, out), launch)
    };
    staging.read(|| batches.list.par_iter().with_max_len(1).try_for_each_init(Vec::new, bring))?;
    let found = cuda.in_turn(|| {
        let (all, word): (In, Out) = (args.get().scales.cast_const(), args.get().found);
        // SAFETY: `all` are the scales of `rows` tile rows, and `word` is one word.
        cuda.check(OP, unsafe {
            ffi::moe_quant_look_at_scales(all, rows as i64, tiles.groups as i64, word, cuda.raw()?)
        })?;
        Ok(ex.to_host(found.view())?.view().cpu::<u32>()?[0])
    })?;
    if found & (found::BAD_ZERO | found::NAN) != 0 {
        return Ok(None);
    }
    let (dtype, scale_rows) = scale_form(tiles.scheme, found);
    let scales = narrowed(wide, count, (dtype, scale_rows), cuda, ex)?;
    let same = found & (found::ROWS_DIFFER | found::TILES_DIFFER) == 0;
    let in_blocks = dtype == DType::F32 && same && rows.is_multiple_of(BLOCK_TILES);
    Ok(Some(Arrays { q, scales, scale_rows, in_blocks, zeros }))
}

/// Arguments that threads share.
struct Addresses {
    args: QuantPackStoredArgs,
}

// SAFETY: the pointers are addresses of device memory, which the host does not follow; batches write different places.
unsafe impl Sync for Addresses {}

impl Addresses {
    fn get(&self) -> QuantPackStoredArgs {
        self.args
    }
}

/// What the batches of a pack have in common, addresses aside.
fn form(tiles: &Tiles, batches: &StoredBatches) -> Result<QuantPackStoredArgs> {
    let form = &batches.form;
    let none = StoredCoding { row_bits: 0, column_bits: 0, bits: 0, places: 0, plus: 0 };
    let coding = |words: StoredWords| {
        let places = words.place.iter().rev().fold(0, |all, place| all << 4 | u32::from(*place));
        let bits = |n: usize| n.trailing_zeros() as i32;
        let row_bits = bits(words.grid.rows);
        let column_bits = bits(words.grid.columns);
        StoredCoding { row_bits, column_bits, bits: words.bits.into(), places, plus: words.plus }
    };
    Ok(QuantPackStoredArgs {
        stored: std::ptr::null(),
        q: std::ptr::null_mut(),
        scales: std::ptr::null_mut(),
        zeros: std::ptr::null_mut(),
        found: std::ptr::null_mut(),
        first: 0,
        count: 0,
        n: tiles.dims[1] as i64,
        k: tiles.dims[2] as i64,
        n_tiles: tiles.n_tiles() as i64,
        k_packed: tiles.k_packed as i64,
        group: tiles.group as i64,
        groups: tiles.groups as i64,
        column: batches.columns().start as i64,
        stored_group: batches.groups().start as i64,
        rows_to_scale: form.scales.rows as i64,
        code: coding(form.codes),
        zero: form.zeros.map_or(none, coding),
        scale_dtype: Dtype::of(OP, form.scale_dtype)?,
        format: QuantFormat::of(OP, tiles.scheme)?,
        entries: small(OP, batches.entries())?,
        gate_up: i32::from(tiles.gate_up),
    })
}

/// The dtype of the scales, and the number of scales of a tile row in a group. It is the rule of `PackedScales::new`.
fn scale_form(scheme: QuantScheme, found: u32) -> (DType, usize) {
    let has = |bit: u32| found & bit != 0;
    match scheme.codes {
        Codes::E4m3 if has(found::HALVES_DIFFER) => (DType::F32, TILE_ROWS),
        Codes::E4m3 => (DType::F32, 2),
        _ if !has(found::NOT_F16) => (DType::F16, TILE_ROWS),
        _ if !has(found::NOT_BF16) => (DType::BF16, TILE_ROWS),
        _ => (DType::F32, TILE_ROWS),
    }
}

/// Scales [.., 16] in the form that `scale_form` has chosen.
fn narrowed(
    wide: Buffer,
    count: usize,
    (dtype, rows): (DType, usize),
    cuda: &CudaExec,
    ex: &Exec,
) -> Result<Buffer> {
    if (dtype, rows) == (DType::F32, TILE_ROWS) {
        return Ok(wide);
    }
    let len = count / TILE_ROWS * rows;
    let mut scales = Buffer::unspecified_on(ex.device(), dtype, &[len])?;
    let from: In = cuda.read(OP, "scales", wide.view())?;
    let (to, dtype): (Out, _) = (cuda.write(OP, "scales", &mut scales.view_mut())?, Dtype::of(OP, dtype)?);
    // SAFETY: `wide` has `count` scales, and `scales` has room for those that are taken.
    cuda.check(OP, unsafe {
        ffi::moe_quant_narrow_scales(from, len as i64, to, dtype, small(OP, rows)?, cuda.raw()?)
    })?;
    Ok(scales)
}
