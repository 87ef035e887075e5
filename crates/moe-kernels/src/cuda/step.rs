//! What a step needs on CUDA besides its layers: rotary angles, fed tokens, sampling; and random
//! weights.

use candle_core::{DType, Result, bail};

use super::{ffi, small};
use crate::door::{expect_dims, expect_dtype, expect_matrix};
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
        expect_dtype(op, name, view, DType::U32)?;
        expect_dims(op, name, view, &dims[..1])?;
    }
    for (name, out) in [("cos", &cos), ("sin", &sin)] {
        expect_dtype(op, name, out, DType::F32)?;
        expect_dims(op, name, out, &dims)?;
    }
    let (theta, factor, max_len) = frequencies.dynamic.unwrap_or((1., 0., 0.));
    let freq = frequencies.inv_freq.as_ptr();
    // SAFETY: dims and dtypes are checked above; the launcher refuses more than 256 frequencies.
    let code = unsafe {
        ffi::moe_rope_rows(
            cuda.read(op, "positions", positions)?,
            cuda.read(op, "rope_len", rope_len)?,
            freq,
            small(op, dims[1])?,
            frequencies.attention_factor,
            theta,
            factor,
            max_len,
            cuda.write(op, "cos", &mut cos)?,
            cuda.write(op, "sin", &mut sin)?,
            small(op, dims[0])?,
            cuda.raw()?,
        )
    };
    cuda.check(op, code)
}

/// The first launch of a step. ids\[row\] = sampled[from\[row\]] where `from` is not u32::MAX: tokens
/// that the step before drew. And the number of valid rows, for padded steps. All are u32, `from` and
/// `ids` \[T\], `valid_rows` \[1\]; entries of `from` are below the length of `sampled`.
pub fn feed_tokens_into(
    from: View,
    sampled: View,
    valid_rows: View,
    mut ids: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("feed_tokens", ex.cuda("feed_tokens")?);
    for (name, dtype) in [
        ("from", from.dtype()),
        ("sampled", sampled.dtype()),
        ("valid_rows", valid_rows.dtype()),
        ("ids", ids.dtype()),
    ] {
        if dtype != DType::U32 {
            bail!("{op}: expected {name} of dtype u32, got {}", dtype.as_str())
        }
    }
    let rows = from.elem_count();
    expect_dims(op, "ids", &ids, &[rows])?;
    let (from, sampled) = (cuda.read(op, "from", from)?, cuda.read(op, "sampled", sampled)?);
    let ids = cuda.write(op, "ids", &mut ids)?;
    expect_dims(op, "valid_rows", &valid_rows, &[1])?;
    let (valid, kept) = (cuda.read(op, "valid_rows", valid_rows)?, cuda.valid_rows()?);
    // SAFETY: dims and dtypes are checked above; the indices are the caller's promise.
    let code =
        unsafe { ffi::moe_feed_tokens(from, sampled, ids, valid, kept, small(op, rows)?, cuda.raw()?) };
    cuda.check(op, code)
}

/// Words of a row of [`sample_into`]'s parameters.
pub const SAMPLE_WORDS: usize = 8;

/// The parameters of a row of [`sample_into`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 (below 1e-5) is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Key of the random bits.
    pub seed: u64,
    /// Counter of the random bits: the output position; u64::MAX draws nothing (padding).
    pub position: u64,
}

impl SampleParams {
    /// The row as the kernel reads it.
    pub fn words(&self) -> [u32; SAMPLE_WORDS] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let ([s0, s1], [p0, p1]) = (halves(self.seed), halves(self.position));
        let floats = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        [floats[0], floats[1], floats[2], self.top_k, s0, s1, p0, p1]
    }

    /// The parameters of a row as the kernel reads it.
    pub fn from_words([temperature, top_p, min_p, top_k, s0, s1, p0, p1]: [u32; SAMPLE_WORDS]) -> Self {
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Self {
            temperature: f32::from_bits(temperature),
            top_p: f32::from_bits(top_p),
            min_p: f32::from_bits(min_p),
            top_k,
            seed: whole(s0, s1),
            position: whole(p0, p1),
        }
    }
}

/// Draws a token per row: `tokens` \[R\] u32 from `logits` [R, V] f32 with `params` [R, 8] u32
/// ([`SampleParams::words`]). `status` \[R\] u32: 0 = drawn, 1 = a logit is NaN or +inf (the token is
/// the first such), 2 = every logit is -inf. The same tokens as on the CPU.
pub fn sample_into(
    logits: View,
    params: View,
    mut tokens: ViewMut,
    mut status: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let (op, cuda) = ("sample", ex.cuda("sample")?);
    let (rows, vocab) = expect_matrix(op, "logits", &logits)?;
    expect_dtype(op, "logits", &logits, DType::F32)?;
    expect_dims(op, "params", &params, &[rows, SAMPLE_WORDS])?;
    expect_dtype(op, "params", &params, DType::U32)?;
    for (name, out) in [("tokens", &tokens), ("status", &status)] {
        expect_dtype(op, name, out, DType::U32)?;
        expect_dims(op, name, out, &[rows])?;
    }
    let (logits, params) = (cuda.read(op, "logits", logits)?, cuda.read(op, "params", params)?);
    let tokens = cuda.write(op, "tokens", &mut tokens)?;
    let status = cuda.write(op, "status", &mut status)?;
    let (rows, vocab) = (small(op, rows)?, small(op, vocab)?);
    // SAFETY: dims and dtypes are checked above.
    let code = unsafe { ffi::moe_sample(logits, params, rows, vocab, tokens, status, cuda.raw()?) };
    cuda.check(op, code)
}

/// Fills `out` (bf16) with numbers uniform in [-bound, bound), a function of seed and stream_id
/// (below 2^24) alone.
pub fn fill_random_into(mut out: ViewMut, seed: u64, stream_id: u32, bound: f32, ex: &Exec) -> Result<()> {
    let (op, cuda) = ("fill_random", ex.cuda("fill_random")?);
    expect_dtype(op, "out", &out, DType::BF16)?;
    let count = out.elem_count();
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: `out` holds `count` bf16 values.
    let code = unsafe { ffi::moe_fill_random(out, count, seed, stream_id.into(), bound, cuda.raw()?) };
    cuda.check(op, code)
}
