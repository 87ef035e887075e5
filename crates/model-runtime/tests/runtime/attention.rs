//! The attention layer against its definition in f64 over whole sequences.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use model_runtime::config::{Config, RopeConfig};
use model_runtime::{
    Attention, AttentionConfig, AttentionNames, AttentionWeights, KvCache, KvLayout, LogitsRows, QkNorm,
    Rope, RotatedPairs, SequenceStep, Step,
};
use proptest::prelude::*;

use crate::message;

const CPU: Device = Device::Cpu;

fn pseudo(seed: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + 1) * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// The layer with random weights, and the same weights by name.
fn layer(config: &AttentionConfig) -> Result<(Attention, HashMap<String, Vec<f32>>)> {
    let h = config.hidden_size;
    let d = config.head_dim;
    let q = config.num_heads * d;
    let kv = config.num_kv_heads * d;
    let mut shapes = vec![
        ("query.weight", vec![q, h]),
        ("k_proj.weight", vec![kv, h]),
        ("v_proj.weight", vec![kv, h]),
        ("o_proj.weight", vec![h, q]),
    ];
    if config.qkv_bias {
        shapes.extend([("query.bias", vec![q]), ("k_proj.bias", vec![kv]), ("v_proj.bias", vec![kv])]);
    }
    if config.o_bias {
        shapes.push(("o_proj.bias", vec![h]));
    }
    match config.qk_norm {
        QkNorm::None => {}
        QkNorm::PerHead => shapes.extend([("q_norm.weight", vec![d]), ("k_norm.weight", vec![d])]),
        QkNorm::AllHeads => shapes.extend([("q_norm.weight", vec![q]), ("k_norm.weight", vec![kv])]),
        other => panic!("no shapes of {other:?} here"),
    }
    if config.sinks {
        shapes.push(("sinks", vec![config.num_heads]));
    }
    let mut tensors = HashMap::new();
    let mut values = HashMap::new();
    for (seed, (name, shape)) in shapes.into_iter().enumerate() {
        let data = pseudo(seed, shape.iter().product());
        tensors.insert(name.to_string(), Tensor::from_vec(data.clone(), shape, &CPU)?);
        values.insert(name.to_string(), data);
    }
    let names = AttentionNames { q: "query", ..AttentionNames::default() };
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    Ok((Attention::load(config.clone(), names, vb)?, values))
}

/// y = x w^T + b in f64.
fn linear(x: &[f64], w: &[f32], b: Option<&Vec<f32>>) -> Vec<f64> {
    let rows = w.chunks(x.len());
    rows.enumerate()
        .map(|(i, w)| {
            let dot: f64 = w.iter().zip(x).map(|(&w, &x)| w as f64 * x).sum();
            dot + b.map_or(0.0, |b| b[i] as f64)
        })
        .collect()
}

/// RMS norm of values by parts of the weight's length.
fn normed(x: Vec<f64>, weight: &[f32], eps: f64) -> Vec<f64> {
    let part = |x: &[f64]| {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt();
        x.iter().zip(weight).map(|(x, &w)| x / rms * w as f64).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(part).collect()
}

/// Rotation of the first `d` dimensions of one head at a position.
fn head(x: &[f64], position: usize, config: &AttentionConfig) -> Vec<f64> {
    let d = config.rotary_dim;
    (0..d)
        .map(|i| {
            let (pair, is_first, other) = match config.rotated_pairs {
                RotatedPairs::Halves => (i % (d / 2), i < d / 2, (i + d / 2) % d),
                RotatedPairs::Neighbours => (i / 2, i % 2 == 0, i ^ 1),
                other => panic!("no definition of {other:?} here"),
            };
            let angle = position as f64 / 10000f64.powf(pair as f64 * 2.0 / d as f64);
            let other = if is_first { -x[other] } else { x[other] };
            x[i] * angle.cos() + other * angle.sin()
        })
        .chain(x[d..].iter().copied())
        .collect()
}

/// The outputs of a sequence from its inputs, by the definition.
fn reference(config: &AttentionConfig, w: &HashMap<String, Vec<f32>>, x: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let d = config.head_dim;
    let group = config.num_heads / config.num_kv_heads;
    let project = |x: &Vec<f32>, name: &str| {
        let x: Vec<f64> = x.iter().map(|&x| x as f64).collect();
        linear(&x, &w[&format!("{name}.weight")], w.get(&format!("{name}.bias")))
    };
    let heads = |x: &Vec<f32>, name: &str, norm: &str, position: usize| -> Vec<Vec<f64>> {
        let projected = match w.get(&format!("{norm}.weight")) {
            Some(weight) => normed(project(x, name), weight, config.rms_norm_eps),
            None => project(x, name),
        };
        projected.chunks(d).map(|h| head(h, position, config)).collect()
    };
    let keys: Vec<_> = x.iter().enumerate().map(|(p, x)| heads(x, "k_proj", "k_norm", p)).collect();
    let values: Vec<Vec<f64>> = x.iter().map(|x| project(x, "v_proj")).collect();
    let row = |(p, x): (usize, &Vec<f32>)| {
        let first = config.sliding_window.map_or(0, |window| (p + 1).saturating_sub(window));
        let mut attended = Vec::new();
        for (h, q) in heads(x, "query", "q_norm", p).iter().enumerate() {
            let scale = config.softmax_scale.unwrap_or(1.0 / (d as f64).sqrt());
            let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * scale;
            let scores: Vec<f64> = (first..=p).map(|j| dot(&keys[j][h / group])).collect();
            let max = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sink = w.get("sinks").map_or(0.0, |sinks| (sinks[h] as f64 - max).exp());
            let total = weights.iter().sum::<f64>() + sink;
            for i in 0..d {
                let v = |j: usize| values[j][h / group * d + i];
                attended.push((first..=p).zip(&weights).map(|(j, w)| w / total * v(j)).sum());
            }
        }
        linear(&attended, &w["o_proj.weight"], w.get("o_proj.bias"))
    };
    x.iter().enumerate().map(row).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Two sequences, each cut into two parts, in one cache: every row equals the definition.
    #[test]
    fn equals_the_definition(
        kv_heads in 1usize..3, group in 1usize..4, half in 1usize..6, pairs in 1usize..6, hidden in 1usize..20,
        qkv_bias: bool, o_bias: bool, sinks: bool,
        qk_norm in prop_oneof![Just(QkNorm::None), Just(QkNorm::PerHead), Just(QkNorm::AllHeads)],
        rotated_pairs in prop_oneof![Just(RotatedPairs::Halves), Just(RotatedPairs::Neighbours)],
        window in prop_oneof![Just(None), (1usize..80).prop_map(Some)],
        scale in prop_oneof![Just(None), Just(Some(0.3))],
        lens in (1usize..90, 1usize..20), cut in 0.0f64..1.0, block_size in 1usize..20,
    ) {
        let config = AttentionConfig {
            hidden_size: hidden, num_heads: kv_heads * group, num_kv_heads: kv_heads, head_dim: 2 * half,
            rotary_dim: 2 * pairs.min(half), rotated_pairs, qkv_bias, o_bias, qk_norm, rms_norm_eps: 1e-5, sliding_window: window, softmax_scale: scale, sinks,
            output_gate: false, zero_centred_norms: false,
        };
        let (attention, weights) = layer(&config).unwrap();
        let rope = RopeConfig::from_config(&Config::parse("{}", "c").unwrap(), 2 * half, 4096).unwrap();
        let rope = Rope::new(RopeConfig { dim: config.rotary_dim, ..rope });
        let layout = KvLayout { num_kv_heads: kv_heads, head_dim: 2 * half, value_dim: Some(2 * half), dtype: DType::F32 };
        let mut kv = KvCache::new(&layout.layers(1), 200, block_size).unwrap();
        let lens = [lens.0, lens.1];
        let inputs = [0, 1].map(|s| -> Vec<Vec<f32>> {
            (0..lens[s]).map(|i| pseudo(50 + 13 * s + 2 * i, hidden)).collect()
        });
        // Interleaved blocks: sequence s has blocks s, s + 2, ...
        let blocks = [0, 1].map(|s| -> Vec<u32> { (0..lens[s].div_ceil(block_size)).map(|b| (2 * b + s) as u32).collect() });
        let mut outputs = [vec![], vec![]];
        let cuts = lens.map(|len| (len as f64 * cut) as usize);
        for spans in [[0..cuts[0], 0..cuts[1]], [cuts[0]..lens[0], cuts[1]..lens[1]]] {
            let ids = [0u32; 100];
            let active: Vec<usize> = (0..2).filter(|&s| !spans[s].is_empty()).collect();
            if active.is_empty() { continue }
            let step = Step::new(active.iter().map(|&s| SequenceStep {
                token_ids: &ids[..spans[s].len()], start: spans[s].start, prompt_len: lens[s], blocks: &blocks[s],
                logits: LogitsRows::None,
                scored: &[],
            }), block_size).unwrap();
            let rows: Vec<Vec<f32>> = active.iter().flat_map(|&s| inputs[s][spans[s].clone()].to_vec()).collect();
            let x = Tensor::new(rows, &CPU).unwrap();
            let out = attention.forward(&x, &step.views().unwrap(), &rope, kv.layer_mut(0).unwrap()).unwrap();
            let mut rows = out.to_vec2::<f32>().unwrap().into_iter();
            for &s in &active {
                outputs[s].extend(rows.by_ref().take(spans[s].len()));
            }
        }
        for s in 0..2 {
            let want = reference(&config, &weights, &inputs[s]);
            for (p, (got, want)) in outputs[s].iter().zip(&want).enumerate() {
                for (got, want) in got.iter().zip(want) {
                    prop_assert!((*got as f64 - want).abs() < 2e-3 * (1.0 + want.abs()), "sequence {s}, row {p}: {got} {want}");
                }
            }
            prop_assert_eq!(outputs[s].len(), want.len());
        }
    }
}

#[test]
fn wrong_configs_and_weights_are_refused() -> Result<()> {
    let config = crate::tiny::attention_config(None);
    let load = |config: AttentionConfig| {
        Attention::load(config, AttentionNames::default(), VarBuilder::zeros(DType::F32, &CPU))
    };
    load(config.clone())?;
    let e = message(load(AttentionConfig { num_heads: 3, ..config.clone() }));
    assert!(e.contains("num_heads divisible by num_kv_heads, got 3 and 2"), "{e}");
    assert!(
        message(load(AttentionConfig { head_dim: 7, ..config.clone() })).contains("even head_dim, got 7")
    );
    let e = message(load(AttentionConfig { head_dim: usize::MAX - 1, ..config.clone() }));
    assert!(e.contains("expected at most 16777216 columns of all heads"), "{e}");
    let e = message(load(AttentionConfig { rotary_dim: 10, ..config.clone() }));
    assert!(e.contains("an even rotary_dim from 2 to head_dim = 8, got 10"), "{e}");
    assert!(message(load(AttentionConfig { sliding_window: Some(0), ..config.clone() })).contains("window"));

    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &CPU);
    let weights = AttentionWeights {
        qkv: zeros(&[64, 24])?,
        qkv_bias: Some(zeros(&[64])?),
        o: zeros(&[24, 32])?,
        o_bias: None,
        qk_norm: Some((zeros(&[8])?, zeros(&[8])?)),
        sinks: None,
    };
    Attention::new(config.clone(), weights.clone())?;
    let wrong = AttentionWeights { o: zeros(&[32, 24])?, ..weights.clone() };
    let e = message(Attention::new(config.clone(), wrong));
    assert!(e.contains("attention: expected o with dims [24, 32], got [32, 24]"), "{e}");
    let wrong = AttentionWeights { o: zeros(&[24, 32])?.to_dtype(DType::BF16)?, ..weights.clone() };
    let e = message(Attention::new(config.clone(), wrong));
    assert!(e.contains("expected o of dtype f32, got bf16"), "{e}");
    let wrong = AttentionWeights { qkv_bias: None, ..weights.clone() };
    let e = message(Attention::new(config.clone(), wrong));
    assert!(
        e.contains("expected qkv_bias to be present, because the config sets `qkv_bias`, got none"),
        "{e}"
    );
    let all_heads = AttentionConfig { qk_norm: QkNorm::AllHeads, ..config.clone() };
    let e = message(Attention::new(all_heads, weights.clone()));
    assert!(e.contains("expected qk_norm of q with dims [32], got [8]"), "{e}");
    let wrong = AttentionWeights { sinks: Some(zeros(&[4])?), ..weights.clone() };
    let e = message(Attention::new(config.clone(), wrong));
    assert!(
        e.contains("expected sinks to be absent, because the config does not set `sinks`, got one"),
        "{e}"
    );
    let with_sinks = AttentionConfig { sinks: true, ..config.clone() };
    let wrong = AttentionWeights { sinks: Some(zeros(&[3])?), ..weights.clone() };
    let e = message(Attention::new(with_sinks, wrong));
    assert!(e.contains("expected sinks with dims [4], got [3]"), "{e}");
    let wrong = AttentionWeights { qk_norm: None, ..weights.clone() };
    let e = message(Attention::new(config.clone(), wrong));
    assert!(e.contains("expected qk_norm to be present"), "{e}");

    // Weights that cannot even be put in the order of the kernels' heads.
    let partial = AttentionConfig { rotary_dim: 4, output_gate: true, ..config };
    for (qkv, expected) in [
        (zeros(&[])?, "expected qkv with dims [96, 24], got []"),
        (zeros(&[64, 24])?, "expected qkv with dims [96, 24], got [64, 24]"),
        (zeros(&[96, 24])?.to_dtype(DType::U32)?, "expected qkv of dtype f32, bf16 or f16, got u32"),
    ] {
        let e = message(Attention::new(partial.clone(), AttentionWeights { qkv, ..weights.clone() }));
        assert!(e.contains(expected), "{e}");
    }
    Ok(())
}

#[test]
fn wrong_arguments_of_a_call_are_refused_by_name() -> Result<()> {
    let config = crate::tiny::attention_config(None);
    let names = AttentionNames::default();
    let attention = Attention::load(config.clone(), names, VarBuilder::zeros(DType::F32, &CPU))?;
    let rope_of = |head_dim: usize, dim: usize| {
        let rope = RopeConfig::from_config(&Config::parse("{}", "c").unwrap(), head_dim, 4096).unwrap();
        Rope::new(RopeConfig { dim, ..rope })
    };
    let layout =
        |heads: usize, dtype| KvLayout { num_kv_heads: heads, head_dim: 8, value_dim: Some(8), dtype };
    let one = SequenceStep {
        token_ids: &[0; 3],
        start: 0,
        prompt_len: 3,
        blocks: &[0],
        logits: LogitsRows::None,
        scored: &[],
    };
    let step = Step::new([one], 4)?;
    let call = |x: &Tensor, rope: &Rope, layout: KvLayout| -> Result<Tensor> {
        let mut kv = KvCache::new(&layout.layers(1), 2, 4)?;
        attention.forward(x, &step.views()?, rope, kv.layer_mut(0)?)
    };
    let x = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &CPU);
    let sound = x(&[3, 24], DType::F32)?;
    let f32_cache = layout(2, DType::F32);
    call(&sound, &rope_of(8, 8), f32_cache)?;
    let wrong_rows = "expected the rows of x to be as many as the step has tokens = 3, got 2";
    for (wrong, expected) in [
        (x(&[3, 23], DType::F32)?, "attention: expected x with dims [.., 24], got [3, 23]"),
        (x(&[], DType::F32)?, "attention: expected x with dims [.., 24], got []"),
        (x(&[3, 24], DType::BF16)?, "attention: expected x of dtype f32, got bf16"),
        (x(&[2, 24], DType::F32)?, wrong_rows),
    ] {
        let e = message(call(&wrong, &rope_of(8, 8), f32_cache));
        assert!(e.contains(expected), "{e}");
    }
    let e = message(call(&sound, &rope_of(16, 16), f32_cache));
    assert!(e.contains("expected the head_dim of rope to be the layer's head_dim = 8, got 16"), "{e}");
    let e = message(call(&sound, &rope_of(8, 4), f32_cache));
    assert!(e.contains("expected the dim of rope to be the layer's rotary_dim = 8, got 4"), "{e}");
    let e = message(call(&sound, &rope_of(8, 8), layout(1, DType::F32)));
    assert!(e.contains("expected the keys of cache with dims [2, 2, 4, 8], got [2, 1, 4, 8]"), "{e}");
    let e = message(call(&sound, &rope_of(8, 8), layout(2, DType::BF16)));
    assert!(e.contains("expected the keys of cache of dtype f32, got bf16"), "{e}");
    Ok(())
}

#[test]
fn tensors_that_the_config_does_not_ask_for_are_refused() -> Result<()> {
    let config = AttentionConfig { qkv_bias: false, ..crate::tiny::attention_config(None) };
    let h = config.hidden_size;
    let d = config.head_dim;
    let q = config.num_heads * d;
    let kv = config.num_kv_heads * d;
    let load = |config: &AttentionConfig, extra: &str, value: f32| {
        let shapes = [
            ("q_proj.weight", vec![q, h]),
            ("k_proj.weight", vec![kv, h]),
            ("v_proj.weight", vec![kv, h]),
            ("o_proj.weight", vec![h, q]),
            ("q_norm.weight", vec![d]),
            ("k_norm.weight", vec![d]),
        ];
        let norms = |name: &&(&str, Vec<usize>)| config.qk_norm != QkNorm::None || !name.0.contains("norm");
        let mut tensors = std::collections::HashMap::new();
        for (name, shape) in shapes.iter().filter(norms) {
            tensors.insert(name.to_string(), Tensor::ones(&shape[..], DType::F32, &CPU).unwrap());
        }
        tensors.insert(extra.to_string(), Tensor::full(value, q, &CPU).unwrap());
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
        Attention::load(config.clone(), AttentionNames::default(), vb)
    };
    for name in ["q_proj.bias", "o_proj.bias", "k_norm.bias", "sinks", "v_proj.weight_scale"] {
        let e = message(load(&config, name, 0.5));
        assert!(e.contains(name) && e.contains("does not read"), "{name}: {e}");
    }
    let plain = AttentionConfig { qk_norm: QkNorm::None, ..config.clone() };
    assert!(message(load(&plain, "q_norm.weight", 1.0)).contains("q_norm.weight"));
    load(&config, "q_proj.bias", 0.0)?;
    load(&plain, "something.else", 1.0).map(drop)
}
