//! Numerics invariants 1 to 3 on whole models: the bits of a token's logits depend on nothing
//! but the model and its own sequence.

use candle_core::{DType, Result};
use model_runtime::{CausalLm, CpuIsa, Exec};
use moe_tests::{Schedule, all_logits, load};
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

/// Every supported instruction set, with several dtypes and thread counts, against one sequence
/// alone, prefilled in bulk, on one thread.
fn check(name: &str, dtype: DType, lengths: &[usize], schedules: &[Schedule]) -> Result<()> {
    check_model(&load(name, dtype)?, name, lengths, schedules)
}

pub fn check_model(
    model: &dyn CausalLm,
    name: &str,
    lengths: &[usize],
    schedules: &[Schedule],
) -> Result<()> {
    let dtype = model.info().kv.dtype;
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

#[test]
fn window_dense_layers_and_long_sequences_keep_the_invariant() -> Result<()> {
    check("long-window", DType::BF16, &[150, 9], &schedules())?;
    check("mlp-only-layers", DType::F32, &[20, 4, 4], &schedules())?;
    check("rope-dynamic-crossing", DType::F32, &[44, 10], &schedules())?;
    check("narrow-experts", DType::BF16, &[33, 2], &schedules())?;
    check("all-experts", DType::BF16, &[17, 30], &schedules())
}

#[test]
fn a_changed_token_changes_the_bits() -> Result<()> {
    // The comparison above would also pass if logits were constant.
    let model = load("base", DType::F32)?;
    let mut ex = Exec::cpu();
    let a = sequences(model.info().vocab_size, &[12], 1);
    let mut b = a.clone();
    b[0][5] ^= 1;
    let (a, b) = (all_logits(&model, &a, ALONE, &mut ex)?, all_logits(&model, &b, ALONE, &mut ex)?);
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
