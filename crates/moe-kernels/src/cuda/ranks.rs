//! CUDA ops, other than layers, for ranks that share a model: lookups in a part of a vocabulary, and parts of random
//! weights.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use super::args::Dtype;
use super::{ffi, small};
use crate::arguments::{expect_dims, expect_dtype, expect_matrix, expect_stream};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// out\[t\] = row `ids`\[t\] of a whole table, of which `table` [V_local, H] contains the rows from `first` on. Ids
/// outside of it give zeros, so the sum over all ranks is the whole lookup.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `table` | [V_local, H] f32, bf16 or f16 |
/// | `ids` | \[T\] u32 |
/// | `out` | [T, H] dtype of the table, or f32 |
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims.
pub fn embed_part_into(table: View, first: usize, ids: View, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "embed_part";
    let cuda = ex.cuda("embed_part")?;
    let (count, width) = expect_matrix(op, "table", &table)?;
    expect_dtype(op, "ids", &ids, DType::U32)?;
    expect_dims(op, "out", &out, &[ids.elem_count(), width])?;
    expect_stream(op, "out", &out, table.dtype())?;
    let dtype = Dtype::of(op, table.dtype())?;
    let out_dtype = Dtype::of(op, out.dtype())?;
    let rows = small(op, ids.elem_count())?;
    let width = small(op, width)?;
    let first = small(op, first)?;
    let count = small(op, count)?;
    let table = cuda.read(op, "table", table)?;
    let ids = cuda.read(op, "ids", ids)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: dims and dtypes are checked above; an id outside of the run reads nothing.
    cuda.check(op, unsafe {
        ffi::moe_embed_part(table, ids, out, dtype, out_dtype, rows, width, first, count, stream)
    })
}

/// out [R, N] from the columns of `ranks` ranks, which follow each other in `parts` [R * N]: for each rank [R, its
/// columns]. The ranks have equal shares of the columns, and the first N mod `ranks` ranks one column more. All values
/// are f32.
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims; no rank.
pub fn join_columns_into(parts: View, ranks: usize, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "join_columns";
    let cuda = ex.cuda("join_columns")?;
    let (rows, width) = expect_matrix(op, "out", &out)?;
    expect_dtype(op, "parts", &parts, DType::F32)?;
    expect_dtype(op, "out", &out, DType::F32)?;
    if ranks == 0 || parts.elem_count() != rows * width {
        bail!("{op}: expected the {rows} x {width} elements of {ranks} ranks, got {}", parts.elem_count())
    }
    let rows = small(op, rows)?;
    let width = small(op, width)?;
    let ranks = small(op, ranks)?;
    let parts = cuda.read(op, "parts", parts)?;
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: dims and dtypes are checked above.
    cuda.check(op, unsafe { ffi::moe_join_columns(parts, out, rows, width, ranks, cuda.raw()?) })
}

/// Fills `out` (bf16) with the box `ranges` of the values that [`fill_random_into`](super::fill_random_into) gives a
/// tensor of these `dims` with this seed and stream 0. There may be at most three dimensions.
///
/// # Errors
/// A CPU context; a wrong dtype; a box that is not inside of the tensor, or has another size than `out`.
pub fn fill_random_box_into(
    mut out: ViewMut,
    dims: &[usize],
    ranges: &[Range<usize>],
    seed: u64,
    bound: f32,
    ex: &Exec,
) -> Result<()> {
    let op = "fill_random_box";
    let cuda = ex.cuda("fill_random_box")?;
    expect_dtype(op, "out", &out, DType::BF16)?;
    let inside = |(range, &dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= dim;
    if dims.len() != ranges.len() || dims.len() > 3 || !ranges.iter().zip(dims).all(inside) {
        bail!("{op}: a tensor with dims {dims:?} has no box {ranges:?} of at most three dimensions")
    }
    let [matrices, rows, columns] = last_three(ranges.iter().map(Range::len), 1);
    if matrices * rows * columns != out.elem_count() {
        bail!("{op}: the box {ranges:?} does not fill dims {:?}", out.dims())
    }
    let [_, height, width] = last_three(dims.iter().copied(), 1);
    let [m, r, c] = last_three(ranges.iter().map(|range| range.start), 0);
    let start = (m * height + r) * width + c;
    let out = cuda.write(op, "out", &mut out)?;
    let signed = |n: usize| i64::try_from(n).map_err(candle_core::Error::wrap);
    let matrices = signed(matrices)?;
    let rows = signed(rows)?;
    let columns = signed(columns)?;
    let start = start as u64;
    let matrix = (height * width) as u64;
    let row = width as u64;
    // SAFETY: `out` holds as many bf16 values as the box, by the check above.
    let code = unsafe {
        ffi::moe_fill_random_box(out, matrices, rows, columns, start, matrix, row, seed, bound, cuda.raw()?)
    };
    cuda.check(op, code)
}

/// The values, with `missing` in place of leading dimensions that do not exist.
fn last_three(values: impl Iterator<Item = usize>, missing: usize) -> [usize; 3] {
    let values: Vec<usize> = values.collect();
    let at = |i: usize| (i + values.len()).checked_sub(3).and_then(|i| values.get(i).copied());
    [0, 1, 2].map(|i| at(i).unwrap_or(missing))
}
