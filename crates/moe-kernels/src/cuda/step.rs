//! The CUDA ops of a step other than layers and sampling: uploading its arrays, tokens of the step before, rotary
//! angles; also random weights.

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Result, bail};

use super::args::RopeRowsArgs;
use super::{PinnedWords, ffi, small};
use crate::arguments::{expect, expect_dtype};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Rotary frequencies of [`rope_rows_into`].
#[derive(Clone, Copy, Debug)]
pub struct RopeFrequencies<'a> {
    /// [D/2], at most 256.
    pub inv_freq: &'a [f32],
    /// Factor of the cosines and sines of frequencies above 0. Dimensions of the frequency 0 are not rotated.
    pub attention_factor: f32,
    /// Dynamic NTK: base, scaling factor, and the length beyond which it applies.
    pub dynamic: Option<(f32, f32, f32)>,
}

/// cos, sin [T, D/2] f32 of positions \[T\] u32. `rope_len` \[T\] u32 is the length that determines a row's dynamic
/// frequencies.
pub fn rope_rows_into(
    positions: View,
    rope_len: View,
    frequencies: &RopeFrequencies,
    mut cos: ViewMut,
    mut sin: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "rope_rows";
    let cuda = ex.cuda("rope_rows")?;
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

/// The places of the rows' token values in a step's arrays, which follow each other in one buffer.
#[derive(Clone, Copy, Debug)]
pub struct StepTokens {
    /// First word of the ids.
    pub ids: usize,
    /// First word of the sources: the index of a token of the step before, or u32::MAX to keep the id.
    pub source: usize,
    /// Rows T.
    pub rows: usize,
}

/// The results of the step before on the device.
pub struct LastStep<'a> {
    /// u32 words; the first ones are the sampled ids.
    pub sampled: View<'a>,
    /// The destination of its first words, and how many, if the host has not read them yet.
    pub read_back: Option<(&'a mut PinnedWords, usize)>,
}

/// The first launch of a step. It copies the step's arrays `from` page-locked memory to `to`, u32 words, the first of
/// which is the number of valid rows of a padded step. A row whose source is not u32::MAX gets the id sampled\[source\]
/// of the step before; sources are below the length of `sampled`. The same launch also reads back the results of that
/// step, because each launch between two steps costs time on the device. It returns at once.
///
/// # Errors
/// A context on the CPU; other dtypes; fewer words in `from` than in `to`; tokens outside of the arrays; too little
/// room for the words that are read back, or more words than exist.
pub fn upload_step_into(
    from: &mut PinnedWords,
    last: LastStep,
    tokens: StepTokens,
    mut to: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "upload_step";
    let cuda = ex.cuda("upload_step")?;
    let LastStep { sampled, read_back } = last;
    expect_dtype(op, "sampled", &sampled, DType::U32)?;
    let left = sampled.elem_count();
    let results = read_back.as_ref().map_or(0, |(_, words)| *words);
    if results > left {
        bail!("{op}: expected at most {left} words to read back, got {results}")
    }
    expect_dtype(op, "to", &to, DType::U32)?;
    let words = to.elem_count();
    let StepTokens { ids, source, rows } = tokens;
    if ids.max(source).saturating_add(rows) > words {
        bail!("{op}: {tokens:?} are not within {words} words")
    }
    let sampled = cuda.read(op, "sampled", sampled)?;
    let to = cuda.write(op, "to", &mut to)?;
    let from = from.first(op, words)?;
    let kept = cuda.valid_rows()?;
    let stream = cuda.raw()?;
    let mut back = read_back.map(|(host, words)| host.first(op, words)).transpose()?;
    let back_to = back.as_mut().map_or(std::ptr::null_mut(), |host| host.words.as_mut_ptr());
    // SAFETY: both sides of each copy have its words. The host's words stay alive (dropping them waits for the stream),
    // and devices can access page-locked memory by its own address. The caller promises that the sources are valid.
    cuda.check(op, unsafe {
        let from = from.words.as_ptr();
        ffi::moe_upload_step(from, to, words, sampled, ids, source, rows, kept, back_to, results, stream)
    })?;
    if let Some(host) = back {
        host.copied.record(&cuda.stream).w()?;
    }
    from.copied.record(&cuda.stream).w()
}

/// Fills `out` (bf16) with uniform numbers in [-bound, bound), which depend only on seed and stream_id (below 2^24).
pub fn fill_random_into(mut out: ViewMut, seed: u64, stream_id: u32, bound: f32, ex: &Exec) -> Result<()> {
    let op = "fill_random";
    let cuda = ex.cuda("fill_random")?;
    expect_dtype(op, "out", &out, DType::BF16)?;
    let count = out.elem_count();
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: `out` holds `count` bf16 values.
    cuda.check(op, unsafe { ffi::moe_fill_random(out, count, seed, stream_id.into(), bound, cuda.raw()?) })
}
