//! What a step needs on CUDA besides its layers and sampling: rotary angles, tokens of the step before; and random weights.

use candle_core::{DType, Result};

use super::args::RopeRowsArgs;
use super::{ffi, small};
use crate::door::{expect, expect_dtype};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Rotary frequencies of [`rope_rows_into`].
#[derive(Clone, Copy, Debug)]
pub struct RopeFrequencies<'a> {
    /// [D/2], at most 256.
    pub inv_freq: &'a [f32],
    /// Factor of cosines and sines.
    pub attention_factor: f32,
    /// Dynamic NTK beyond a length: base, scaling factor, and that length.
    pub dynamic: Option<(f32, f32, f32)>,
}

/// cos, sin [T, D/2] f32 of positions \[T\] u32; `rope_len` \[T\] u32 is the length that a row's dynamic
/// frequencies are for.
pub fn rope_rows_into(
    positions: View,
    rope_len: View,
    frequencies: &RopeFrequencies,
    mut cos: ViewMut,
    mut sin: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("rope_rows", ex.cuda("rope_rows")?);
    let dims = [positions.elem_count(), frequencies.inv_freq.len()];
    for (name, view) in [("positions", &positions), ("rope_len", &rope_len)] {
        expect(op, name, view, DType::U32, &dims[..1])?;
    }
    for (name, out) in [("cos", &cos), ("sin", &sin)] {
        expect(op, name, out, DType::F32, &dims)?;
    }
    let (theta, factor, max_len) = frequencies.dynamic.unwrap_or((1., 0., 0.));
    let freq = frequencies.inv_freq.as_ptr();
    let args = RopeRowsArgs {
        positions: cuda.read(op, "positions", positions)?,
        rope_len: cuda.read(op, "rope_len", rope_len)?,
        inv_freq: freq.cast(),
        half: small(op, dims[1])?,
        attention_factor: frequencies.attention_factor,
        theta,
        factor,
        max_len,
        cos: cuda.write(op, "cos", &mut cos)?,
        sin: cuda.write(op, "sin", &mut sin)?,
        rows: small(op, dims[0])?,
    };
    // SAFETY: dims and dtypes are checked above; the launcher refuses more than 256 frequencies.
    cuda.check(op, unsafe { ffi::moe_rope_rows(&args, cuda.raw()?) })
}

/// The first launch of a step. ids\[row\] = sampled[from\[row\]] where `from` is not u32::MAX: tokens
/// that the step before drew. And the number of valid rows, for padded steps. All are u32, `from` and
/// `ids` \[T\], `valid_rows` \[1\]; entries of `from` are below the length of `sampled`.
pub fn take_tokens_into(
    from: View,
    sampled: View,
    valid_rows: View,
    mut ids: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("take_tokens", ex.cuda("take_tokens")?);
    let rows = from.elem_count();
    expect_dtype(op, "from", &from, DType::U32)?;
    expect_dtype(op, "sampled", &sampled, DType::U32)?;
    expect(op, "valid_rows", &valid_rows, DType::U32, &[1])?;
    expect(op, "ids", &ids, DType::U32, &[rows])?;
    let (from, sampled) = (cuda.read(op, "from", from)?, cuda.read(op, "sampled", sampled)?);
    let ids = cuda.write(op, "ids", &mut ids)?;
    let (valid, kept) = (cuda.read(op, "valid_rows", valid_rows)?, cuda.valid_rows()?);
    // SAFETY: dims and dtypes are checked above; the indices are the caller's promise.
    cuda.check(op, unsafe {
        ffi::moe_take_tokens(from, sampled, ids, valid, kept, small(op, rows)?, cuda.raw()?)
    })
}

/// Fills `out` (bf16) with numbers uniform in [-bound, bound), a function of seed and stream_id
/// (below 2^24) alone.
pub fn fill_random_into(mut out: ViewMut, seed: u64, stream_id: u32, bound: f32, ex: &Exec) -> Result<()> {
    let (op, cuda) = ("fill_random", ex.cuda("fill_random")?);
    expect_dtype(op, "out", &out, DType::BF16)?;
    let count = out.elem_count();
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: `out` holds `count` bf16 values.
    cuda.check(op, unsafe { ffi::moe_fill_random(out, count, seed, stream_id.into(), bound, cuda.raw()?) })
}
