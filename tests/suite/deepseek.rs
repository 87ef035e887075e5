//! DeepSeek-V2 on whole models: two expert paths with the same results, two forms of attention, and the invariants of
//! the other models.

use candle_core::{DType, Result};
use model_runtime::{CausalLm, Exec, MlaForm};
use moe_engine::engine::EngineConfig;
use moe_layer::MoePath;
use moe_tests::{Schedule, all_logits, fixture, load, load_deepseek, load_on};

use crate::invariance::{ALONE, bits, check_model, schedules, sequences};
use crate::running::{Done, kv_blocks, requests, run};

const FORMS: [MlaForm; 2] = [MlaForm::Absorbed, MlaForm::Naive];

/// Every DeepSeek fixture in the repository.
fn fixtures() -> Vec<String> {
    let entries = std::fs::read_dir(fixture("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("deepseek-")).collect();
    names.sort();
    names
}

fn logits(model: &dyn CausalLm, lengths: &[usize]) -> Result<Vec<Vec<u32>>> {
    let sequences = sequences(model.info().vocab_size, lengths, 7);
    Ok(bits(&all_logits(model, &sequences, ALONE, &mut Exec::cpu())?))
}

#[test]
fn both_expert_paths_give_the_same_bits() -> Result<()> {
    let names = fixtures();
    assert!(names.len() >= 25, "{names:?}");
    for name in &names {
        // In bf16 the loop multiplies the dequantised floats, and the fused path multiplies the integers.
        let quantised = name.contains("-quant-");
        for dtype in [DType::F32, DType::BF16].into_iter().take(if quantised { 1 } else { 2 }) {
            let on = |path| load_deepseek(name, path, MlaForm::Absorbed, dtype);
            let legacy = on(MoePath::Legacy)?;
            let fused = on(MoePath::Fused)?;
            assert!(logits(&legacy, &[19, 3])? == logits(&fused, &[19, 3])?, "{name} {dtype:?}");
        }
    }
    for name in ["base", "sparse-step", "gelu", "packed-hub"] {
        let legacy = load_on(name, MoePath::Legacy, DType::BF16)?;
        assert!(logits(&legacy, &[19, 3])? == logits(&load(name, DType::BF16)?, &[19, 3])?, "{name}");
    }
    Ok(())
}

#[test]
fn both_paths_and_forms_generate_the_same_tokens() {
    // The test is greedy in f32: sampled text would depend on the different roundings of the forms.
    for name in ["deepseek-v2", "deepseek-v2-lite", "deepseek-norm-topk"] {
        let tokens = |path, form| -> Vec<Vec<u32>> {
            let model = load_deepseek(name, path, form, DType::F32).unwrap();
            let mut requests = requests(&model, &[21, 4, 9], 20);
            requests.iter_mut().for_each(|r| r.sampling.temperature = 0.0);
            let done = run(&model, &requests, &EngineConfig::default());
            done.into_iter().map(|done| done.tokens).collect()
        };
        let first = tokens(MoePath::Legacy, MlaForm::Absorbed);
        assert!(first.iter().all(|tokens| tokens.len() == 20) && first[0] != first[1]);
        assert_eq!(tokens(MoePath::Fused, MlaForm::Absorbed), first, "{name}: fused");
        assert_eq!(tokens(MoePath::Legacy, MlaForm::Naive), first, "{name}: naive");
    }
}

#[test]
fn logits_do_not_depend_on_batch_chunks_blocks_or_threads() -> Result<()> {
    for (form, path) in [(MlaForm::Absorbed, MoePath::Legacy), (MlaForm::Naive, MoePath::Fused)] {
        for (name, dtype, lengths) in [
            ("deepseek-v2", DType::BF16, &[3, 70, 1, 24][..]),
            ("deepseek-v2-lite", DType::F32, &[66, 5]),
            ("deepseek-odd-sizes", DType::F16, &[17, 68]),
        ] {
            let model = load_deepseek(name, path, form, dtype)?;
            check_model(&model, &format!("{name} {form:?}"), lengths, &schedules())?;
        }
    }
    Ok(())
}

#[test]
fn results_do_not_depend_on_how_requests_are_run() {
    for form in FORMS {
        let model = load_deepseek("deepseek-v2", MoePath::Legacy, form, DType::BF16).unwrap();
        let requests = requests(&model, &[5, 40, 1, 40], 16);
        let alone: Vec<Done> = requests
            .iter()
            .flat_map(|r| run(&model, std::slice::from_ref(r), &EngineConfig::default()))
            .collect();
        assert_ne!(alone[0].tokens, alone[1].tokens);
        // Seventy blocks of one slot cannot hold all four requests: some are preempted.
        for (tokens, blocks, block_size) in [(512, 1000, 16), (7, 70, 1), (3, 20, 5)] {
            let config =
                EngineConfig { max_num_batched_tokens: tokens, ..kv_blocks(&model, blocks, block_size) };
            assert!(run(&model, &requests, &config) == alone, "{form:?} {config:?}");
        }
    }
}

#[test]
fn packed_experts_equal_one_by_one() -> Result<()> {
    for path in [MoePath::Legacy, MoePath::Fused] {
        let logits = |name| logits(&load_deepseek(name, path, MlaForm::Absorbed, DType::BF16)?, &[20]);
        assert!(logits("deepseek-saved")? == logits("deepseek-packed")?, "{path:?}");
    }
    Ok(())
}

#[test]
fn the_forms_agree_but_are_not_the_same_arithmetic() -> Result<()> {
    let schedule = Schedule { chunk: 11, block_size: 16, together: true };
    let logits = |form| -> Result<Vec<f32>> {
        let model = load_deepseek("deepseek-long", MoePath::Fused, form, DType::F32)?;
        let sequences = sequences(model.info().vocab_size, &[130], 3);
        Ok(all_logits(&model, &sequences, schedule, &mut Exec::cpu())?.concat())
    };
    let absorbed = logits(MlaForm::Absorbed)?;
    let naive = logits(MlaForm::Naive)?;
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| (x as f64).powi(2)).sum::<f64>().sqrt();
    let error = norm(&mut absorbed.iter().zip(&naive).map(|(a, b)| a - b));
    let relative = error / norm(&mut naive.iter().copied());
    assert!(relative > 0.0 && relative < 1e-5, "{relative}");
    Ok(())
}
