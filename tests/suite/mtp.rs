//! The head for multi-token prediction against its definition in Python (`tests/reference/mtp_definition.py`).

use std::collections::HashMap;
use std::fs;

use candle_core::{DType, Device, Result, Tensor};
use model_families::spec::DecoderSpec;
use model_runtime::{
    CausalLm, Checkpoint, Config, Decoder, Exec, KvCache, LogitsRows, MtpHead, Observed, Observer,
    SequenceStep, Step, StepContext, View, run_step,
};
use moe_engine::{LoadOptions, ModelSpec};
use moe_tests::{fixture, hybrid, load, load_hybrid};

/// Experts stored one by one, and packed in a model that also sees pictures.
const FIXTURES: [&str; 2] = ["qwen3-next-mtp", "qwen3_5-part"];
const BLOCK: usize = 16;

fn open(name: &str) -> (Checkpoint, DecoderSpec) {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let spec = hybrid(&checkpoint.config).unwrap();
    (checkpoint, spec)
}

/// The last hidden states of all rows of a step.
struct Last {
    layers: usize,
    rows: Vec<f32>,
}

impl Observer for Last {
    fn observe(&mut self, what: Observed, data: View) -> Result<()> {
        if what == Observed::HiddenStates(self.layers) {
            self.rows = data.to_f32_vec()?;
        }
        Ok(())
    }
}

/// A step of one sequence that computes these tokens from `start` on, and wants all logits.
fn step(ids: &[u32], start: usize, blocks: &[u32]) -> Result<Step> {
    let sequence =
        SequenceStep { token_ids: ids, start, prompt_len: 1, blocks, logits: LogitsRows::All, scored: &[] };
    Step::new([sequence], BLOCK)
}

/// [T, H] f32 after the last norm.
fn hidden(model: &Decoder, ids: &[u32]) -> Result<Tensor> {
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK) as u32).collect();
    let mut kv = KvCache::new(&model.info().states, blocks.len(), BLOCK)?;
    let mut last = Last { layers: model.info().num_layers, rows: Vec::new() };
    let context = &mut StepContext::default();
    run_step(model, &step(ids, 0, &blocks)?, &mut kv, Some(&mut last), context, &mut Exec::cpu())?;
    Tensor::from_vec(last.rows, (ids.len(), model.info().hidden_size), &Device::Cpu)
}

/// The head's logits of all rows but the last, [T - 1, V], in steps that end at `cuts`.
fn predict(head: &MtpHead, hidden: &Tensor, ids: &[u32], cuts: &[usize]) -> Result<Vec<f32>> {
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK) as u32).rev().collect();
    let mut kv = KvCache::new(&head.info().states, blocks.len(), BLOCK)?;
    let mut logits = Vec::new();
    let mut start = 0;
    for &end in cuts.iter().chain([&(ids.len() - 1)]) {
        let rows = hidden.narrow(0, start, end - start)?.contiguous()?;
        let next = step(&ids[start + 1..=end], start, &blocks)?;
        let context = &mut StepContext::default();
        let out = run_step(&head.after(&rows), &next, &mut kv, None, context, &mut Exec::cpu())?;
        logits.extend_from_slice(out.view().cpu::<f32>()?);
        start = end;
    }
    Ok(logits)
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(want);
    sum(&mut pairs.map(|(a, b)| f64::from(*a) - f64::from(*b))) / sum(&mut want.iter().map(|b| f64::from(*b)))
}

#[test]
fn the_head_agrees_with_its_definition() -> Result<()> {
    for name in FIXTURES {
        let (checkpoint, spec) = open(name);
        let reference =
            candle_core::safetensors::load(fixture(name).join("reference.safetensors"), &Device::Cpu)?;
        for (dtype, most) in [(DType::F32, 2e-6), (DType::BF16, 0.2)] {
            let model = load_hybrid(name, dtype)?;
            let head = spec.load_mtp(&checkpoint, &model, &LoadOptions::default())?;
            for sequence in 0..reference["input_ids"].dim(0)? {
                let ids = reference["input_ids"].get(sequence)?.to_vec1::<i64>()?;
                let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
                let want = reference["mtp_logits"].get(sequence)?.flatten_all()?.to_vec1::<f32>()?;
                let hidden = hidden(&model, &ids)?;
                let whole = predict(&head, &hidden, &ids, &[])?;
                assert_eq!(whole.len(), want.len());
                let error = relative_error(&whole, &want);
                println!("{name} {dtype:?}: relative error {error:.2e}");
                assert!(error < most, "{name} {dtype:?}, sequence {sequence}: {error:.2e}");
                // A head that ignored what it is given would fail; one without a cache of its own would fail here.
                let singly: Vec<usize> = (1..ids.len() - 1).collect();
                for cuts in [&[5][..], &[1, 16, 17], &singly] {
                    assert!(
                        predict(&head, &hidden, &ids, cuts)? == whole,
                        "{name} {dtype:?}: cut at {cuts:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// A copy of a fixture with other tensors.
fn altered(
    name: &str,
    alter: impl FnOnce(&mut HashMap<String, Tensor>),
) -> Result<(tempfile::TempDir, Checkpoint)> {
    let dir = tempfile::tempdir()?;
    fs::copy(fixture(name).join("config.json"), dir.path().join("config.json"))?;
    let mut tensors = candle_core::safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu)?;
    alter(&mut tensors);
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    Ok((dir, checkpoint))
}

#[test]
fn what_is_not_there_is_said() -> Result<()> {
    let options = LoadOptions::default();
    let refused = |spec: &DecoderSpec, checkpoint: &Checkpoint, model: &Decoder| {
        spec.load_mtp(checkpoint, model, &options).map(drop).unwrap_err().to_string()
    };
    let name = FIXTURES[0];
    let model = load_hybrid(name, DType::F32)?;
    let (_, spec) = open(name);
    // A checkpoint without the head, one with a part of it, and one with another shape.
    let (plain, _) = open("qwen3-next");
    let error = refused(&spec, &plain, &model);
    assert!(error.contains("it has no head for multi-token prediction (expected `mtp.fc.weight`"), "{error}");
    let (_dir, cut) = altered(name, |tensors| drop(tensors.remove("mtp.norm.weight")))?;
    let error = refused(&spec, &cut, &model);
    assert!(error.contains("1 missing:\n  mtp.norm.weight [40]") && !error.contains("unexpected"), "{error}");
    let square = Tensor::zeros((40, 40), DType::F32, &Device::Cpu)?;
    let (_dir, square) = altered(name, |tensors| drop(tensors.insert("mtp.fc.weight".into(), square)))?;
    let error = refused(&spec, &square, &model);
    assert!(error.contains("mtp.fc.weight: expected [40, 80], got [40, 40]"), "{error}");
    // A family without one, and configs with others.
    let base = Checkpoint::open(fixture("base")).unwrap();
    let other = model_families::qwen3_moe::read(&base.config).unwrap();
    assert!(ModelSpec::mtp(&other).is_none());
    let error = refused(&other, &base, &load("base", DType::F32)?);
    assert!(error.contains("of this family no such head is known"), "{error}");
    let text = fs::read_to_string(fixture(name).join("config.json"))?;
    for (fields, said) in [
        (r#""mtp_num_hidden_layers": 2"#, "2 layers"),
        (r#""num_nextn_predict_layers": 0"#, "no layers of it"),
        (r#""mtp_use_dedicated_embeddings": true"#, "an embedding of its own"),
    ] {
        let config = Config::parse(&text.replacen('{', &format!("{{{fields},"), 1), "c").unwrap();
        let error = refused(&hybrid(&config).unwrap(), &cut, &model);
        assert!(error.contains(said), "{error}");
    }
    // Hidden states of other rows.
    let (checkpoint, spec) = open(name);
    let head = spec.load_mtp(&checkpoint, &model, &options)?;
    let mut kv = KvCache::new(&head.info().states, 1, BLOCK)?;
    let rows = hidden(&model, &[1, 2])?;
    let context = &mut StepContext::default();
    let run = run_step(&head.after(&rows), &step(&[2], 0, &[0])?, &mut kv, None, context, &mut Exec::cpu());
    let error = run.map(drop).unwrap_err().to_string();
    assert!(error.contains("expected hidden states [1, 40] of the step's rows, got [2, 40]"), "{error}");
    Ok(())
}
