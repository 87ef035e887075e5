//! Numerics invariants 1 to 3 on whole models: the bits of a token's logits depend only on the model and its own
//! sequence.

use candle_core::{DType, Result};
use model_runtime::{CausalLm, CpuIsa, Exec, KvCache, LogitsRows, SequenceStep, Step, StepContext, run_step};
use moe_kernels::ExpertHeat;
use moe_tests::{Schedule, all_logits, load, load_hybrid};
use proptest::prelude::*;

pub const ALONE: Schedule = Schedule { chunk: usize::MAX >> 1, block_size: 16, together: false };

/// Sequences of different lengths, some beyond one attention block of 64 positions.
pub fn sequences(vocab: usize, lengths: &[usize], seed: u32) -> Vec<Vec<u32>> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocab as u32
    };
    lengths.iter().map(|&n| (0..n).map(|_| token()).collect()).collect()
}

pub fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

fn isas() -> impl Iterator<Item = CpuIsa> {
    CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// Every supported instruction set, with several dtypes and numbers of threads, compared with one sequence alone that
/// is prefilled at once on one thread.
fn check(name: &str, dtype: DType, lengths: &[usize], schedules: &[Schedule]) -> Result<()> {
    check_model(&load(name, dtype)?, name, lengths, schedules)
}

pub fn check_model(
    model: &dyn CausalLm,
    name: &str,
    lengths: &[usize],
    schedules: &[Schedule],
) -> Result<()> {
    let dtype = model.info().dtype;
    let sequences = sequences(model.info().vocab_size, lengths, lengths.len() as u32);
    for isa in isas() {
        let mut ex = Exec::cpu().with_isa(isa)?.with_threads(1)?;
        let expected = bits(&all_logits(model, &sequences, ALONE, &mut ex)?);
        for threads in [1, 3] {
            let mut ex = Exec::cpu().with_isa(isa)?.with_threads(threads)?;
            for schedule in schedules {
                let got = bits(&all_logits(model, &sequences, *schedule, &mut ex)?);
                assert!(
                    got == expected,
                    "{name} {dtype:?} {}: {schedule:?} on {threads} threads differs",
                    isa.name()
                );
            }
        }
    }
    Ok(())
}

pub fn schedules() -> Vec<Schedule> {
    vec![
        Schedule { chunk: 1, block_size: 16, together: true },
        Schedule { chunk: 7, block_size: 1, together: true },
        Schedule { chunk: 64, block_size: 5, together: true },
        Schedule { chunk: 1000, block_size: 64, together: true },
        Schedule { chunk: 13, block_size: 128, together: false },
    ]
}

#[test]
fn logits_do_not_depend_on_batch_chunks_blocks_or_threads() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        check("base", dtype, &[3, 70, 1, 24], &schedules())?;
        check("odd-sizes", dtype, &[5, 66], &schedules())?;
    }
    Ok(())
}

/// The recurrence of linear attention has no blocks. Prompts are also cut at 63, 64 and 65 positions, next to the usual
/// size of chunks for this recurrence.
#[test]
fn linear_attention_keeps_the_invariant() -> Result<()> {
    let edges = [63, 64, 65].map(|chunk| Schedule { chunk, block_size: 16, together: true });
    let all = [&schedules()[..], &edges].concat();
    let check =
        |name: &str, dtype, lengths: &[usize]| check_model(&load_hybrid(name, dtype)?, name, lengths, &all);
    check("qwen3-next", DType::F32, &[3, 70, 1, 24])?;
    check("qwen3-next", DType::BF16, &[130, 66])?;
    check("qwen3_5", DType::BF16, &[5, 66])
}

#[test]
fn window_dense_layers_and_long_sequences_keep_the_invariant() -> Result<()> {
    check("long-window", DType::BF16, &[150, 9], &schedules())?;
    check("mlp-only-layers", DType::F32, &[20, 4, 4], &schedules())?;
    check("rope-dynamic-crossing", DType::F32, &[44, 10], &schedules())?;
    check("narrow-experts", DType::BF16, &[33, 2], &schedules())?;
    check("all-experts", DType::BF16, &[17, 30], &schedules())
}

/// Two steps of three sequences. The first has all tokens but the last ones, and some of them need logits; the second
/// has the rest, which read what the first has cached. Returns the logits of each sequence in each step.
fn two_steps(
    model: &dyn CausalLm,
    sequences: &[Vec<u32>],
    wanted: [LogitsRows; 3],
    context: &mut StepContext,
) -> Result<Vec<Vec<u32>>> {
    const LAST: usize = 2;
    let mut kv = KvCache::new(&model.info().states, 12, 8)?;
    let blocks: Vec<Vec<u32>> = (0..3).map(|s| (4 * s..4 * s + 4).collect()).collect();
    let mut got = Vec::new();
    for is_second in [false, true] {
        let step = Step::new(
            sequences.iter().zip(&blocks).zip(wanted).map(|((tokens, blocks), wanted)| {
                let (before, last) = tokens.split_at(tokens.len() - LAST);
                SequenceStep {
                    token_ids: if is_second { last } else { before },
                    start: if is_second { before.len() } else { 0 },
                    prompt_len: tokens.len(),
                    blocks,
                    logits: if is_second { LogitsRows::All } else { wanted },
                    scored: &[],
                }
            }),
            8,
        )?;
        let logits = run_step(model, &step, &mut kv, None, context, &mut Exec::cpu())?;
        let logits = logits.view().cpu::<f32>()?.to_vec();
        let vocab = model.info().vocab_size;
        let rows = |s| step.logits_range(s).flat_map(|row| &logits[row * vocab..(row + 1) * vocab]);
        got.extend((0..3).map(|s| rows(s).map(|x| x.to_bits()).collect::<Vec<u32>>()));
    }
    Ok(got)
}

/// Rows whose logits are not needed end with the last layer's attention. The other rows and the cache have the same
/// bits as if all rows were computed. A step that records its routing computes all rows.
#[test]
fn rows_without_logits_change_no_bits() -> Result<()> {
    use LogitsRows::{All, Last, None};
    for (name, dtype) in [("base", DType::F32), ("base", DType::BF16), ("mlp-only-layers", DType::F32)] {
        let model = load(name, dtype)?;
        let vocab = model.info().vocab_size;
        let sequences = sequences(vocab, &[11, 24, 5], 7);
        let all = two_steps(&model, &sequences, [All; 3], &mut StepContext::default())?;
        for wanted in [[None, Last, All], [Last; 3], [None; 3], [All, None, Last]] {
            for counts in [false, true] {
                let mut context = StepContext::default();
                if let Some(moe) = model.info().moe.as_ref().filter(|_| counts) {
                    context.heat = Some(ExpertHeat::new(moe.layers.len(), moe.num_experts));
                }
                let got = two_steps(&model, &sequences, wanted, &mut context)?;
                assert!(got[3..] == all[3..], "{name} {dtype:?} {wanted:?}: the second step differs");
                for s in 0..3 {
                    let want = match wanted[s] {
                        None => &[],
                        Last => &all[s][all[s].len() - vocab..],
                        All => &all[s][..],
                    };
                    assert!(got[s] == want, "{name} {dtype:?} {wanted:?}: sequence {s} differs");
                }
                if let Some((heat, moe)) = context.heat.zip(model.info().moe.as_ref()) {
                    for layer in 0..moe.layers.len() {
                        assert_eq!(heat.layer(layer).iter().sum::<u64>(), (40 * moe.top_k) as u64);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_changed_token_changes_the_bits() -> Result<()> {
    // The comparison above would also pass if logits were constant.
    let model = load("base", DType::F32)?;
    let mut ex = Exec::cpu();
    let a = sequences(model.info().vocab_size, &[12], 1);
    let mut b = a.clone();
    b[0][5] ^= 1;
    let a = all_logits(&model, &a, ALONE, &mut ex)?;
    let b = all_logits(&model, &b, ALONE, &mut ex)?;
    let vocab = model.info().vocab_size;
    assert_eq!(a[0][..5 * vocab], b[0][..5 * vocab], "earlier positions do not see a later token");
    assert_ne!(a[0][5 * vocab..], b[0][5 * vocab..]);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_schedule_gives_the_same_bits(
        lengths in prop::collection::vec(1usize..90, 1..5),
        chunk in 1usize..100,
        block_size in 1usize..80,
        together: bool,
        threads in 1usize..4,
    ) {
        let model = load("f32", DType::BF16).unwrap();
        let sequences = sequences(model.info().vocab_size, &lengths, chunk as u32);
        let mut one = Exec::cpu().with_threads(1).unwrap();
        let mut many = Exec::cpu().with_threads(threads).unwrap();
        let expected = all_logits(&model, &sequences, ALONE, &mut one).unwrap();
        let got = all_logits(&model, &sequences, Schedule { chunk, block_size, together }, &mut many).unwrap();
        prop_assert!(bits(&got) == bits(&expected));
    }
}
