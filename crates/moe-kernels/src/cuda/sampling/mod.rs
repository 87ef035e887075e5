//! Sampling tokens on CUDA: with penalties and edits of single logits, values for log-probabilities, and slots that
//! store a sequence's tokens so far for these penalties.

use candle_core::{DType, Result, bail};

use super::{ffi, small};
use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Words of a row of [`sample_into`]'s parameters.
pub const SAMPLE_WORDS: usize = 16;
/// The largest number of edits of a slot.
pub const MAX_EDITS: usize = 1024;
/// The largest number of top tokens that [`logprobs_into`] lists.
pub const MAX_LOGPROBS: usize = 32;
/// Words of a row of [`logprobs_into`]'s result.
pub const LOGPROB_WORDS: usize = LOGPROB_HEADER + 2 * MAX_LOGPROBS;
const LOGPROB_HEADER: usize = 8;
/// Words of an entry of [`reset_slots_into`].
const RESET_WORDS: usize = 8;

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
    /// Counter of the random bits: the output position; u64::MAX samples nothing (padding).
    pub position: u64,
    /// Repetition, frequency and presence penalty; 1, 0, 0 change nothing.
    pub penalties: [f32; 3],
    /// The sequence's slot. If no such slot exists, for example u32::MAX, there are neither penalties nor edits.
    pub slot: u32,
    /// The number of edits from the first one on, then the number of further edits and the index of their first one.
    pub edits: [u32; 3],
    /// Number of top tokens to list, at most [`MAX_LOGPROBS`]; `None` computes no log-probabilities.
    pub logprobs: Option<u32>,
}

impl SampleParams {
    /// A row that samples nothing.
    pub const PADDING: Self = Self {
        temperature: 0.,
        top_p: 1.,
        min_p: 0.,
        top_k: 0,
        seed: 0,
        position: u64::MAX,
        penalties: [1., 0., 0.],
        slot: u32::MAX,
        edits: [0; 3],
        logprobs: None,
    };

    /// The row in the form that the kernel reads.
    pub fn words(&self) -> [u32; SAMPLE_WORDS] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let [s0, s1] = halves(self.seed);
        let [p0, p1] = halves(self.position);
        let [t, top_p, min_p] = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        let [repetition, frequency, presence] = self.penalties.map(f32::to_bits);
        let [bans, from, count] = self.edits;
        let logprobs = self.logprobs.map_or(0, |n| n + 1);
        [
            t, top_p, min_p, self.top_k, s0, s1, p0, p1, repetition, frequency, presence, self.slot, bans,
            count, from, logprobs,
        ]
    }

    /// The parameters from a row in the form that the kernel reads.
    pub fn from_words(words: [u32; SAMPLE_WORDS]) -> Self {
        let [t, top_p, min_p, top_k, s0, s1, p0, p1, repetition, frequency, presence, slot, ..] = words;
        let [.., bans, count, from, logprobs] = words;
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Self {
            temperature: f32::from_bits(t),
            top_p: f32::from_bits(top_p),
            min_p: f32::from_bits(min_p),
            top_k,
            seed: whole(s0, s1),
            position: whole(p0, p1),
            penalties: [repetition, frequency, presence].map(f32::from_bits),
            slot,
            edits: [bans, from, count],
            logprobs: logprobs.checked_sub(1),
        }
    }
}

/// The contents of the slots, for the kernels.
#[derive(Debug)]
pub struct SampleSlots<'a> {
    /// How often each token occurred, [S, V] u32: bit 31 is set if it is in the prompt, the other bits count it in the
    /// output.
    pub uses: ViewMut<'a>,
    /// Edits of single logits, [S, [`MAX_EDITS`], 2] u32: an id and the bits of a bias; -inf excludes the token. The
    /// edits of one id follow each other.
    pub edits: ViewMut<'a>,
}

impl SampleSlots<'_> {
    /// Returns S after it has checked dims and dtypes.
    fn count(&self, op: &str, vocab: usize) -> Result<usize> {
        let (slots, _) = expect_matrix(op, "uses", &self.uses)?;
        expect(op, "uses", &self.uses, DType::U32, &[slots, vocab])?;
        expect(op, "edits", &self.edits, DType::U32, &[slots, MAX_EDITS, 2])?;
        Ok(slots)
    }
}

/// Samples a token per row: `tokens` \[R\] u32 from `logits` [R, V] f32 with `params` [R, 16] u32
/// ([`SampleParams::words`]). `status` \[R\] u32: 0 = sampled, 1 = a logit is NaN or +inf (the token is the first such
/// id), 2 = every logit is -inf. The tokens are the same as on the CPU, and the logits are not changed.
///
/// With `masks` [R, ceil(V / 32)] u32, a token whose bit is not set is excluded before anything else: token i is bit i
/// % 32 of word i / 32.
///
/// A row that names one of `slots` reads it and counts its token there; no two rows may name the same slot. A row that
/// names a slot outside of `slots` is sampled without a slot.
pub fn sample_into(
    logits: View,
    params: View,
    slots: Option<SampleSlots>,
    masks: Option<View>,
    mut tokens: ViewMut,
    mut status: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let op = "sample";
    let cuda = ex.cuda("sample")?;
    let (rows, vocab) = expect_matrix(op, "logits", &logits)?;
    expect_dtype(op, "logits", &logits, DType::F32)?;
    expect(op, "params", &params, DType::U32, &[rows, SAMPLE_WORDS])?;
    for (name, out) in [("tokens", &tokens), ("status", &status)] {
        expect(op, name, out, DType::U32, &[rows])?;
    }
    let mut uses = std::ptr::null_mut();
    let mut edits = std::ptr::null();
    let mut count = 0;
    if let Some(mut slots) = slots {
        count = small(op, slots.count(op, vocab)?)?;
        uses = cuda.write(op, "uses", &mut slots.uses)?;
        edits = cuda.read(op, "edits", slots.edits.as_view())?;
    }
    let mut bits = std::ptr::null();
    if let Some(masks) = masks {
        expect(op, "masks", &masks, DType::U32, &[rows, vocab.div_ceil(u32::BITS as usize)])?;
        bits = cuda.read(op, "masks", masks)?;
    }
    let logits = cuda.read(op, "logits", logits)?;
    let params = cuda.read(op, "params", params)?;
    let tokens = cuda.write(op, "tokens", &mut tokens)?;
    let status = cuda.write(op, "status", &mut status)?;
    let rows = small(op, rows)?;
    let vocab = small(op, vocab)?;
    // SAFETY: dims and dtypes are checked above; the kernel checks the slots of rows against their number.
    cuda.check(op, unsafe {
        ffi::moe_sample(logits, params, uses, edits, count, bits, rows, vocab, tokens, status, cuda.raw()?)
    })
}

/// A slot that gets the tokens of another sequence, or tokens that it does not have yet.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotReset<'a> {
    /// The slot.
    pub slot: u32,
    /// The prompt.
    pub prompt: &'a [u32],
    /// The tokens that were generated so far.
    pub output: &'a [u32],
    /// At most [`MAX_EDITS`] ids and biases, -inf to exclude a token. The edits of one id follow each other.
    pub edits: &'a [(u32, f32)],
}

impl SlotReset<'_> {
    /// Number of words in the array of [`reset_slots_into`].
    pub fn words(&self) -> usize {
        RESET_WORDS + self.prompt.len() + self.output.len() + 2 * self.edits.len()
    }

    /// The array of several resets; fails if it is longer than `words`, or a slot has no room for its edits.
    pub fn write(resets: &[SlotReset], words: &mut [u32]) -> Result<usize> {
        if let Some(reset) = resets.iter().find(|reset| reset.edits.len() > MAX_EDITS) {
            let slot = reset.slot;
            let edits = reset.edits.len();
            bail!("reset_slots: expected at most {MAX_EDITS} edits of slot {slot}, got {edits}")
        }
        let len = resets.iter().map(SlotReset::words).sum::<usize>();
        let available = words.len();
        let Some(words) = words.get_mut(..len) else {
            bail!("reset_slots: expected at most {available} words, got {len}")
        };
        let (entries, mut rest) = words.split_at_mut(RESET_WORDS * resets.len());
        let mut at = entries.len();
        for (entry, reset) in entries.chunks_exact_mut(RESET_WORDS).zip(resets) {
            let edits = reset.edits.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]);
            let ids = reset.prompt.iter().chain(reset.output).copied();
            let history = reset.prompt.len() + reset.output.len();
            let numbers =
                [at, reset.prompt.len(), history, at + history, reset.edits.len()].map(|n| n as u32);
            entry.copy_from_slice(&[&[reset.slot], &numbers[..], &[0, 0]].concat());
            let (own, after) = std::mem::take(&mut rest).split_at_mut(reset.words() - RESET_WORDS);
            own.iter_mut().zip(ids.chain(edits)).for_each(|(word, value)| *word = value);
            at += own.len();
            rest = after;
        }
        Ok(len)
    }
}

/// Rebuilds the slots in the first `count` entries of `words` ([`SlotReset::write`]), which must all be different. An
/// entry whose slot does not exist, or that points beyond the end of `words`, changes nothing.
pub fn reset_slots_into(words: View, count: usize, mut slots: SampleSlots, ex: &Exec) -> Result<()> {
    let op = "reset_slots";
    let cuda = ex.cuda("reset_slots")?;
    expect_dtype(op, "words", &words, DType::U32)?;
    let (_, vocab) = expect_matrix(op, "uses", &slots.uses)?;
    let all = small(op, slots.count(op, vocab)?)?;
    let len = words.elem_count();
    if len / RESET_WORDS < count {
        bail!("{op}: expected {count} entries of {RESET_WORDS} words, got {len} words")
    }
    let words = cuda.read(op, "words", words)?;
    let uses = cuda.write(op, "uses", &mut slots.uses)?;
    let edits = cuda.write(op, "edits", &mut slots.edits)?;
    let len = small(op, len)?;
    let count = small(op, count)?;
    let vocab = small(op, vocab)?;
    // SAFETY: dims and dtypes are checked above; the kernel checks slots and offsets.
    cuda.check(op, unsafe { ffi::moe_reset_slots(words, len, count, uses, edits, all, vocab, cuda.raw()?) })
}

/// The values for the log-probabilities of rows of `logits` [R, V] f32 and one token of each (`tokens` \[R\]): `out`
/// [R, [`LOGPROB_WORDS`]] u32, which [`SampleLogprobs::read`] reads. The last word of each row of `params` [R, W] u32
/// is one plus the number of top tokens to list ([`SampleParams::words`] ends with it). Rows where it is 0, and rows
/// whose token is not in the vocabulary, are not written.
pub fn logprobs_into(logits: View, params: View, tokens: View, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "logprobs";
    let cuda = ex.cuda("logprobs")?;
    let (rows, vocab) = expect_matrix(op, "logits", &logits)?;
    expect_dtype(op, "logits", &logits, DType::F32)?;
    let (_, words) = expect_matrix(op, "params", &params)?;
    expect(op, "params", &params, DType::U32, &[rows, words])?;
    expect(op, "tokens", &tokens, DType::U32, &[rows])?;
    expect(op, "out", &out, DType::U32, &[rows, LOGPROB_WORDS])?;
    let logits = cuda.read(op, "logits", logits)?;
    let params = cuda.read(op, "params", params)?;
    let tokens = cuda.read(op, "tokens", tokens)?;
    let out = cuda.write(op, "out", &mut out)?;
    let rows = small(op, rows)?;
    let vocab = small(op, vocab)?;
    let words = small(op, words)?;
    // SAFETY: dims and dtypes are checked above.
    cuda.check(op, unsafe { ffi::moe_logprobs(logits, params, words, tokens, rows, vocab, out, cuda.raw()?) })
}

/// A row of [`logprobs_into`]'s result.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleLogprobs {
    /// 0 = valid; 1 = a logit is NaN or +inf, and `rank` is the first such id; 2 = every logit is -inf. With 1 and 2 no
    /// other field is set.
    pub status: u32,
    /// The token's rank (higher logit first, then lower id), from 1.
    pub rank: u32,
    /// The largest logit.
    pub max: f32,
    /// The token's logit.
    pub logit: f32,
    /// Sum of the weights of all tokens at temperature 1, in units of 2^-38.
    pub total: u64,
    /// Keys of the top tokens, in any order: logit and id as one integer (`moe_sample`'s).
    pub top: Vec<u64>,
}

impl SampleLogprobs {
    /// Reads a row that lists `n` tokens.
    pub fn read(row: &[u32], n: usize) -> Result<Self> {
        let Some((header, keys)) =
            row.split_at_checked(LOGPROB_HEADER).filter(|(_, keys)| 2 * n <= keys.len())
        else {
            bail!("logprobs: expected {n} tokens in a row of {LOGPROB_WORDS} words, got {} words", row.len())
        };
        let long = |low: u32, high: u32| (high as u64) << 32 | low as u64;
        Ok(Self {
            status: header[0],
            rank: header[1],
            max: f32::from_bits(header[2]),
            logit: f32::from_bits(header[3]),
            total: long(header[4], header[5]),
            top: keys.chunks_exact(2).take(n).map(|key| long(key[0], key[1])).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_from_their_words() {
        let row = SampleParams {
            temperature: 0.7,
            top_p: 0.9,
            min_p: 0.1,
            top_k: 40,
            seed: 1 << 40 | 3,
            position: 5 << 32 | 7,
            penalties: [1.5, -0.5, 0.25],
            slot: 9,
            edits: [1, 2, 3],
            logprobs: Some(0),
        };
        for row in [row, SampleParams::PADDING] {
            assert_eq!(SampleParams::from_words(row.words()), row);
        }
    }

    #[test]
    fn resets_name_their_words() {
        let all = [
            SlotReset { slot: 3, prompt: &[10, 11], output: &[12], edits: &[(7, 0.5)] },
            SlotReset { slot: 1, prompt: &[20], output: &[], edits: &[] },
        ];
        let mut words = [u32::MAX; 23];
        assert_eq!(SlotReset::write(&all, &mut words).unwrap(), 22);
        assert_eq!(words[..8], [3, 16, 2, 3, 19, 1, 0, 0]);
        assert_eq!(words[8..16], [1, 21, 1, 1, 22, 0, 0, 0]);
        assert_eq!(words[16..], [10, 11, 12, 7, 0.5f32.to_bits(), 20, u32::MAX]);
        assert!(SlotReset::write(&all, &mut words[..21]).is_err());
    }

    #[test]
    fn a_slot_has_room_for_so_many_edits() {
        let edits = vec![(7, 0.5); MAX_EDITS + 1];
        let reset = |edits| SlotReset { slot: 3, prompt: &[], output: &[], edits };
        let mut words = vec![0; reset(&edits).words()];
        SlotReset::write(&[reset(&edits[1..])], &mut words).unwrap();
        let refused = SlotReset::write(&[reset(&edits)], &mut words).unwrap_err().to_string();
        assert!(refused.contains("expected at most 1024 edits of slot 3, got 1025"), "{refused}");
    }

    #[test]
    fn a_row_of_log_probabilities_is_read_back() {
        let mut row = [0; LOGPROB_WORDS];
        row[..8].copy_from_slice(&[0, 4, 2f32.to_bits(), 1f32.to_bits(), 5, 6, 0, 0]);
        row[8..12].copy_from_slice(&[1, 2, 3, 4]);
        let read = SampleLogprobs::read(&row, 2).unwrap();
        assert_eq!((read.rank, read.max, read.logit, read.total), (4, 2., 1., 6 << 32 | 5));
        assert_eq!(read.top, [2 << 32 | 1, 4 << 32 | 3]);
        assert!(SampleLogprobs::read(&row, MAX_LOGPROBS + 1).is_err());
    }
}
