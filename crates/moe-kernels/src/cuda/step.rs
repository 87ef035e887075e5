//! What a step needs on CUDA besides its layers and sampling: its arrays, tokens of the step before, rotary angles; and random
//! weights.

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Result, bail};

use super::args::RopeRowsArgs;
use super::{PinnedWords, ffi, small};
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

/// Where the values of its rows' tokens are in a step's arrays, which lie one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct StepTokens {
    /// First word of the ids.
    pub ids: usize,
    /// First word of where they come from: a token of the step before, or u32::MAX for the id that is there.
    pub source: usize,
    /// Rows T.
    pub rows: usize,
}

/// What the step before has left on the device.
pub struct LastStep<'a> {
    /// u32 words, of which sampled ids are the first.
    pub sampled: View<'a>,
    /// Where its first words go, and how many, if the host has not asked for them yet.
    pub read_back: Option<(&'a mut PinnedWords, usize)>,
}

/// The first launch of a step: its arrays `from` page-locked memory to `to`, u32 words, of which the first is the number of
/// valid rows of a padded step. A row whose source is not u32::MAX takes the id sampled\[source\], which the step before has
/// left; sources are below the length of `sampled`. The same launch reads back what that step has left: between two steps
/// the device waits for each launch. Returns at once.
///
/// # Errors
/// A context on the CPU; other dtypes; fewer words in `from` than in `to`; tokens that lie beyond them; less room for what is
/// read back than its words, or more words than there are.
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
        bail!("{op}: {tokens:?} do not lie in {words} words")
    }
    let sampled = cuda.read(op, "sampled", sampled)?;
    let to = cuda.write(op, "to", &mut to)?;
    let from = from.first(op, words)?;
    let kept = cuda.valid_rows()?;
    let stream = cuda.raw()?;
    let mut back = read_back.map(|(host, words)| host.first(op, words)).transpose()?;
    let back_to = back.as_mut().map_or(std::ptr::null_mut(), |host| host.words.as_mut_ptr());
    // SAFETY: both sides of each copy hold its words, the host's live on (dropping them waits for the stream), and devices
    // reach page-locked memory by its own address; the sources are the caller's promise.
    cuda.check(op, unsafe {
        let from = from.words.as_ptr();
        ffi::moe_upload_step(from, to, words, sampled, ids, source, rows, kept, back_to, results, stream)
    })?;
    if let Some(host) = back {
        host.copied.record(&cuda.stream).w()?;
    }
    from.copied.record(&cuda.stream).w()
}

/// Fills `out` (bf16) with numbers uniform in [-bound, bound), a function of seed and stream_id
/// (below 2^24) alone.
pub fn fill_random_into(mut out: ViewMut, seed: u64, stream_id: u32, bound: f32, ex: &Exec) -> Result<()> {
    let op = "fill_random";
    let cuda = ex.cuda("fill_random")?;
    expect_dtype(op, "out", &out, DType::BF16)?;
    let count = out.elem_count();
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: `out` holds `count` bf16 values.
    cuda.check(op, unsafe { ffi::moe_fill_random(out, count, seed, stream_id.into(), bound, cuda.raw()?) })
}
