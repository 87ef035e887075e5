//! Sampling on the device gives exactly the tokens and log-probabilities of the CPU's sampler, for rows with every
//! combination of parameters, over steps in which slots count, are reassigned and are rebuilt.

use candle_core::DType;
use model_runtime::cuda::{
    LOGPROB_WORDS, MAX_EDITS, SAMPLE_WORDS, SampleLogprobs, SampleParams, SampleSlots, SlotReset,
    logprobs_into, reset_slots_into, sample_into,
};
use model_runtime::device_slots::DeviceSlots;
use model_runtime::sampling::{LogitEdits, Sampled, SamplingError, device_logprobs, sample_row};
use model_runtime::{SampleRow, SamplingParams};
use moe_kernels::{Buffer, Exec};

use crate::common::*;

/// A sequence with the state that the engine would keep.
struct Sequence {
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    banned: Vec<u32>,
    min_tokens: usize,
    /// A bit for each token, set if the token is allowed.
    mask: Option<Vec<u32>>,
}

fn pick<T: Copy>(rng: &mut Rng, values: &[T]) -> T {
    values[rng.below(values.len())]
}

/// Every second, 32nd or no token, or all.
fn mask(rng: &mut Rng, vocab: usize) -> Vec<u32> {
    let kind = rng.below(4);
    let word = |rng: &mut Rng| match kind {
        0 => rng.bits() as u32,
        1 => 1 << rng.below(32),
        2 => 0,
        _ => u32::MAX,
    };
    (0..vocab.div_ceil(32)).map(|_| word(rng)).collect()
}

impl Sequence {
    fn new(rng: &mut Rng, vocab: usize) -> Self {
        let ids = |rng: &mut Rng, n: usize| (0..n).map(|_| rng.below(vocab) as u32).collect::<Vec<u32>>();
        // There are few ids, so that some occur twice; values from -8 to 8 are large enough to matter.
        let bias = |rng: &mut Rng| (rng.below(vocab.min(40)) as u32, 8.0 * rng.float());
        let count = pick(rng, &[0, 0, 3, 50]);
        let params = SamplingParams {
            temperature: pick(rng, &[0.0, 1e-6, 0.005, 0.3, 0.7, 1.0, 1.0, 2.5]),
            top_k: pick(rng, &[0, 0, 1, 2, 20, 50, vocab / 2 + 1, vocab, vocab + 5]),
            top_p: pick(rng, &[1.0, 1.0, 0.9, 0.95, 0.5, 0.01, 0.999]),
            min_p: pick(rng, &[0.0, 0.0, 0.05, 0.3, 1.0]),
            repetition_penalty: pick(rng, &[1.0, 1.0, 1.3, 0.7]),
            presence_penalty: pick(rng, &[0.0, 0.0, 1.5, -0.5]),
            frequency_penalty: pick(rng, &[0.0, 0.0, 0.4, -0.2]),
            logit_bias: (0..count).map(|_| bias(rng)).collect(),
            seed: rng.bits(),
            logprobs: pick(rng, &[None, None, Some(0), Some(1), Some(5), Some(32)]),
            ..SamplingParams::default()
        };
        let prompt = rng.below(30) + 1;
        let banned = pick(rng, &[0, 0, 4]);
        Self {
            params,
            prompt: ids(rng, prompt),
            output: Vec::new(),
            banned: ids(rng, banned),
            min_tokens: rng.below(6),
            mask: pick(rng, &[false, false, true]).then(|| mask(rng, vocab)),
        }
    }

    fn banned_now(&self) -> &[u32] {
        if self.output.len() < self.min_tokens { &self.banned } else { &[] }
    }

    fn edits(&self) -> LogitEdits {
        LogitEdits::new(&self.params, self.banned.iter().copied()).unwrap()
    }

    /// The parameters for the device. Every second sequence that needs no slot has one too.
    fn row(&self, slot: u32) -> SampleParams {
        let p = &self.params;
        let edits = self.edits();
        let needed = p.has_penalties() || !edits.list.is_empty();
        let bans = if self.banned_now().is_empty() { 0 } else { edits.bans };
        SampleParams {
            temperature: p.temperature,
            top_p: p.top_p,
            min_p: p.min_p,
            top_k: p.top_k as u32,
            seed: p.seed,
            position: self.output.len() as u64,
            penalties: [p.repetition_penalty, p.frequency_penalty, p.presence_penalty],
            slot: if needed || slot.is_multiple_of(2) { slot } else { u32::MAX },
            edits: [bans, edits.bans, edits.list.len() - edits.bans].map(|n| n as u32),
            logprobs: p.logprobs.map(|n| n as u32),
        }
    }

    fn on_cpu(&self, logits: &[f32]) -> Result<Sampled, SamplingError> {
        let row = SampleRow {
            params: &self.params,
            prompt: &self.prompt,
            output: &self.output,
            banned: self.banned_now(),
            mask: self.mask.as_deref(),
        };
        sample_row(&mut logits.to_vec(), &row)
    }
}

fn rebuild(slots: &mut DeviceSlots, sequences: &[Sequence], which: &[usize], ex: &Exec) {
    let edits: Vec<LogitEdits> = which.iter().map(|&i| sequences[i].edits()).collect();
    let resets: Vec<SlotReset> = (which.iter().zip(&edits))
        .map(|(&i, edits)| SlotReset {
            slot: i as u32,
            prompt: &sequences[i].prompt,
            output: &sequences[i].output,
            edits: &edits.list,
        })
        .collect();
    slots.reset(&resets, ex).unwrap();
}

/// Samples a token for each sequence from its row.
fn on_device(
    logits: &Buffer,
    sequences: &[Sequence],
    slots: &mut DeviceSlots,
    ex: &Exec,
) -> Vec<Result<Sampled, SamplingError>> {
    let rows = sequences.len();
    let vocab = logits.dims()[1];
    let place = Place::new(ex.clone());
    let words_of = |(i, s): (usize, &Sequence)| s.row(i as u32).words();
    let params =
        place.put(&words(sequences.iter().enumerate().flat_map(words_of).collect(), &[rows, SAMPLE_WORDS]));
    let device = place.put(logits);
    let mut tokens = place.out(DType::U32, &[rows]);
    let mut status = place.out(DType::U32, &[rows]);
    let mut found = place.out(DType::U32, &[rows, LOGPROB_WORDS]);
    let width = vocab.div_ceil(32);
    let bits = |s: &Sequence| s.mask.clone().unwrap_or_else(|| vec![u32::MAX; width]);
    let masks = place.put(&words(sequences.iter().flat_map(bits).collect(), &[rows, width]));
    // If no sequence has a mask, the masks may be omitted.
    let masks = sequences.iter().any(|s| s.mask.is_some()).then(|| masks.view());
    let slots = Some(slots.views());
    let tokens_out = tokens.view_mut();
    sample_into(device.view(), params.view(), slots, masks, tokens_out, status.view_mut(), ex).unwrap();
    logprobs_into(device.view(), params.view(), tokens.view(), found.view_mut(), ex).unwrap();
    assert_same("logits", logits, &device.host(&place));
    let [tokens, status, found] = [tokens, status, found].map(|out| values::<u32>(&out.host(&place)));
    let draw = |i: usize| {
        let token_id = tokens[i];
        match status[i] {
            0 => {}
            1 => return Err(SamplingError::NotFinite { token_id, value: f32::NAN }),
            _ => return Err(SamplingError::Empty),
        }
        let list = |n: usize| {
            SampleLogprobs::read(&found[i * LOGPROB_WORDS..][..LOGPROB_WORDS], n.min(vocab)).unwrap()
        };
        let logprobs =
            sequences[i].params.logprobs.map(|n| device_logprobs(list(n), token_id)).transpose()?;
        Ok(Sampled { token_id, logprobs })
    };
    (0..rows).map(draw).collect()
}

/// Fails unless both sampled the same; NaN and +inf count as equal.
fn assert_equal(gpu: &Result<Sampled, SamplingError>, cpu: &Result<Sampled, SamplingError>, what: &str) {
    match (gpu, cpu) {
        (
            Err(SamplingError::NotFinite { token_id: a, .. }),
            Err(SamplingError::NotFinite { token_id: b, .. }),
        ) => assert_eq!(a, b, "{what}"),
        _ => assert_eq!(gpu, cpu, "{what}"),
    }
}

#[test]
fn draws_are_those_of_the_cpu_for_every_combination_and_over_steps() {
    let mut rng = Rng::new();
    let ex = cuda();
    let cases = [(1, 3, 3), (7, 9, 20), (40, 4, 3), (1000, 64, 30), (4097, 40, 20), (151_936, 24, 6)];
    for (vocab, rows, steps) in small(cases, 500, |case| case.0 * case.1 * case.2) {
        let mut slots = DeviceSlots::new(rows, vocab, 64 + steps, &ex).unwrap();
        let mut sequences: Vec<Sequence> = (0..rows).map(|_| Sequence::new(&mut rng, vocab)).collect();
        rebuild(&mut slots, &sequences, &(0..rows).collect::<Vec<_>>(), &ex);
        for step in 0..steps {
            let spread = pick(&mut rng, &[1.0, 6.0, 40.0]);
            let mut logits: Vec<f32> = (0..rows * vocab).map(|_| spread * rng.float()).collect();
            if step % 3 == 1 {
                // Ties, zeros of both signs, excluded tokens.
                logits.iter_mut().for_each(|x| *x = x.round());
                (0..logits.len() / 3).for_each(|_| logits[rng.below(rows * vocab)] = f32::NEG_INFINITY);
            }
            if step % 5 == 4 {
                logits[rng.below(rows * vocab)] = pick(&mut rng, &[f32::NAN, f32::INFINITY]);
                logits[..vocab].fill(f32::NEG_INFINITY);
            }
            // Values of tokens that a mask excludes may be NaN.
            for (row, s) in
                logits.chunks_mut(vocab).zip(&sequences).filter(|(_, s)| s.params.logprobs.is_none())
            {
                let Some(mask) = &s.mask else { continue };
                let excluded = (0..vocab).step_by(3).filter(|t| mask[t / 32] >> (t % 32) & 1 == 0);
                excluded.for_each(|t| row[t] = f32::NAN);
            }
            let buffer = Buffer::from_vec(logits, &[rows, vocab]).unwrap();
            let got = on_device(&buffer, &sequences, &mut slots, &ex);
            let logits = values::<f32>(&buffer);
            // Sequences end and new ones take their slots. Some slots are rebuilt although they need not be.
            let mut stale = Vec::new();
            for i in 0..rows {
                let want = sequences[i].on_cpu(&logits[i * vocab..(i + 1) * vocab]);
                assert_equal(
                    &got[i],
                    &want,
                    &format!("V={vocab} step {step} row {i} {:?}", sequences[i].params),
                );
                match want {
                    Ok(sampled) if rng.below(12) > 0 => sequences[i].output.push(sampled.token_id),
                    _ => sequences[i] = Sequence::new(&mut rng, vocab),
                }
                if sequences[i].output.is_empty() || rng.below(20) == 0 {
                    stale.push(i);
                }
            }
            rebuild(&mut slots, &sequences, &stale, &ex);
        }
    }
}

/// A padding row samples nothing and touches nothing.
#[test]
fn padding_rows_draw_nothing() {
    let mut rng = Rng::new();
    let ex = cuda();
    let place = Place::new(ex.clone());
    let logits = place.put(&rng.floats(DType::F32, &[2, 500]));
    let greedy = SampleParams { position: 0, ..SampleParams::PADDING };
    let rows = [SampleParams::PADDING.words(), greedy.words()].concat();
    let params = place.put(&words(rows, &[2, SAMPLE_WORDS]));
    let mut tokens = place.out(DType::U32, &[2]);
    let mut status = place.out(DType::U32, &[2]);
    sample_into(logits.view(), params.view(), None, None, tokens.view_mut(), status.view_mut(), &ex).unwrap();
    let tokens = values::<u32>(&tokens.host(&place));
    assert!(tokens[0] == u32::MAX && tokens[1] < 500, "{tokens:?}");
    assert_eq!(values::<u32>(&status.host(&place)), [0, 0]);
    let short = place.put(&words(vec![0; 32], &[4, 8]));
    let mut refused = |params: &Placed, masks: Option<&Placed>| {
        let masks = masks.map(|masks| masks.view());
        let mut tokens = place.out(DType::U32, &[2]);
        sample_into(logits.view(), params.view(), None, masks, tokens.view_mut(), status.view_mut(), &ex)
    };
    assert_error(refused(&short, None), &["params", "[2, 16]", "[4, 8]"]);
    assert_error(refused(&params, Some(&short)), &["masks", "[2, 16]", "[4, 8]"]);
}

/// Memory after the slots stays unchanged: a row that names a slot there is sampled without a slot, and a reset of it
/// does nothing.
#[test]
fn a_slot_that_is_not_there_is_no_slot() {
    let mut rng = Rng::new();
    let ex = cuda();
    let vocab = 500;
    let place = Place::new(ex.clone());
    let logits = rng.floats(DType::F32, &[1, vocab]);
    let likeliest = |x: &[f32]| (0..vocab).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap() as u32;
    let best = likeliest(&values::<f32>(&logits));
    let logits = place.put(&logits);
    let row = SampleParams { position: 0, slot: 1, edits: [1, 0, 0], ..SampleParams::PADDING };
    let params = place.put(&words(row.words().to_vec(), &[1, SAMPLE_WORDS]));
    let uses = words(vec![7; 2 * vocab], &[2, vocab]);
    let edits = [best, f32::NEG_INFINITY.to_bits()];
    let edits = words(edits.repeat(2 * MAX_EDITS), &[2, MAX_EDITS, 2]);
    let mut held_uses = place.put(&uses);
    let mut held_edits = place.put(&edits);
    for there in [true, false] {
        let slots = there.then(|| SampleSlots {
            uses: held_uses.view_mut().narrow(0, 1).unwrap(),
            edits: held_edits.view_mut().narrow(0, 1).unwrap(),
        });
        let mut tokens = place.out(DType::U32, &[1]);
        let mut status = place.out(DType::U32, &[1]);
        sample_into(logits.view(), params.view(), slots, None, tokens.view_mut(), status.view_mut(), &ex)
            .unwrap();
        assert_eq!(values::<u32>(&tokens.host(&place)), [best], "slots: {there}");
    }
    let mut reset = vec![0; 64];
    let of_absent = SlotReset { slot: 1, prompt: &[1, 2], output: &[3], edits: &[(4, 1.0)] };
    SlotReset::write(&[of_absent], &mut reset).unwrap();
    // For an existing slot: ids that are too large, too many edits, and edits after the last word.
    let beyond: [[u32; 8]; 4] = [
        [0, 9, 0, 4, 8, 0, 0, 0],
        [0, 8, 0, 0, 8, MAX_EDITS as u32 + 1, 0, 0],
        [0, 8, 0, 0, 11, 1, 0, 0],
        [0, u32::MAX, 0, 2, 8, 0, 0, 0],
    ];
    for reset in beyond.iter().map(|entry| [&entry[..], &[1, 2, 3, 4]].concat()).chain([reset]) {
        let reset = place.put(&words(reset.clone(), &[reset.len()]));
        let slots = SampleSlots {
            uses: held_uses.view_mut().narrow(0, 1).unwrap(),
            edits: held_edits.view_mut().narrow(0, 1).unwrap(),
        };
        reset_slots_into(reset.view(), 1, slots, &ex).unwrap();
    }
    assert_same("uses", &uses, &held_uses.host(&place));
    assert_same("edits", &edits, &held_edits.host(&place));
}
