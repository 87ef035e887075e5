//! Tests of random checkpoints: they have the shapes of the config, weights of a plausible size, and the same values
//! for the same seed.

use moe_quant::QuantGroup;
use moe_quantize::{FileFormat, RandomSettings, random_checkpoint};

use crate::support::{bundled, error, fixture, json, settings, tensors, weights};

fn random(quantised: Option<moe_quantize::Settings>) -> RandomSettings {
    RandomSettings { quantised, dtype: None, layers: None, seed: 1 }
}

fn deviation(weights: &[f32]) -> f64 {
    (weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / weights.len() as f64).sqrt()
}

#[test]
fn quantised_weights_have_the_shapes_and_the_deviation_of_a_model() {
    let dir = tempfile::tempdir().unwrap();
    for format in [FileFormat::Gptq, FileFormat::CompressedTensors] {
        for (bits, symmetric, desc_act) in
            [(4, true, false), (4, false, true), (8, true, true), (8, false, false)]
        {
            let mut settings = settings(format, bits, QuantGroup::Size(8));
            let desc_act = desc_act && format == FileFormat::Gptq;
            (settings.symmetric, settings.desc_act) = (symmetric, desc_act);
            let out = dir.path().join(format!("{format:?}-{bits}-{symmetric}"));
            random_checkpoint(&bundled(), &out, &random(Some(settings))).unwrap();
            for (module, shape) in [
                ("model.layers.0.self_attn.q_proj", (256, 256)),
                ("model.layers.3.mlp.experts.15.down_proj", (256, 72)),
            ] {
                let (format, weights) = weights(&out, module, shape);
                let scheme = format.int().unwrap();
                assert_eq!((scheme.zero_point, scheme.act_order), (!symmetric, desc_act));
                let got = deviation(&weights);
                assert!((0.019..0.0225).contains(&got), "{module}: {got}");
                let mean = weights.iter().map(|w| f64::from(*w)).sum::<f64>() / weights.len() as f64;
                assert!(mean.abs() < 0.001, "{module}: {mean}");
            }
            assert!(out.join("tokenizer.json").exists());
        }
    }
}

#[test]
fn rows_that_fill_no_word_end_in_zeros() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let settings = settings(FileFormat::CompressedTensors, 4, QuantGroup::Channel);
    random_checkpoint(&fixture("deepseek-v2").join("config.json"), &out, &random(Some(settings))).unwrap();
    let made = tensors(&out);
    // Of the 14 columns, 8 are in the first word of a row and 6 in the second.
    let (_, shape, bytes) = &made["model.layers.1.mlp.experts.0.down_proj.weight_packed"];
    assert_eq!(shape, &[40, 2]);
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    assert!(words.iter().skip(1).step_by(2).all(|word| word >> 24 == 0));
    assert!(words.iter().step_by(2).any(|word| word >> 24 != 0));
}

#[test]
fn plain_weights_are_those_of_a_seed() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str, seed: u64, layers: Option<usize>| {
        let out = dir.path().join(name);
        random_checkpoint(&fixture("base"), &out, &RandomSettings { layers, seed, ..random(None) }).unwrap();
        out
    };
    let first = made("a", 1, None);
    let again = made("b", 1, None);
    let other = made("c", 2, None);
    assert_eq!(tensors(&first), tensors(&again));
    assert_ne!(tensors(&first), tensors(&other));
    let shapes = |dir: &std::path::Path| -> Vec<_> {
        tensors(dir).into_iter().map(|(name, (dtype, shape, _))| (name, dtype, shape)).collect()
    };
    assert_eq!(shapes(&first), shapes(&fixture("base")));
    let short = made("d", 1, Some(1));
    assert_eq!(json(&short.join("config.json"))["num_hidden_layers"], 1);
    assert!(!tensors(&short).keys().any(|name| name.contains("layers.1.")));
}

#[test]
fn floats_have_the_dtype_that_the_config_names() {
    let dir = tempfile::tempdir().unwrap();
    // transformers 5 writes `dtype`; older versions wrote `torch_dtype`, some with the prefix.
    for (at, (keys, expected)) in [
        (serde_json::json!({"dtype": "float16"}), Ok(("F16", "float16"))),
        (serde_json::json!({"torch_dtype": "torch.float32"}), Ok(("F32", "float32"))),
        (serde_json::json!({"dtype": "float16", "torch_dtype": "float16"}), Ok(("F16", "float16"))),
        (serde_json::json!({}), Ok(("BF16", "bfloat16"))),
        (serde_json::json!({"dtype": "float8"}), Err("`dtype`: expected")),
        (
            serde_json::json!({"dtype": "float16", "torch_dtype": "float32"}),
            Err("the same setting but differ"),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut config = json(&fixture("base").join("config.json"));
        let map = config.as_object_mut().unwrap();
        ["dtype", "torch_dtype"].iter().for_each(|key| drop(map.remove(*key)));
        map.extend(keys.as_object().unwrap().clone());
        let file = dir.path().join(format!("{at}.json"));
        let out = dir.path().join(format!("{at}"));
        std::fs::write(&file, config.to_string()).unwrap();
        let made = random_checkpoint(&file, &out, &random(None));
        match expected {
            Ok((stored, named)) => {
                made.unwrap();
                assert!(tensors(&out).values().all(|(got, ..)| got == stored), "{keys}");
                let config = json(&out.join("config.json"));
                assert_eq!((&config["torch_dtype"], config.get("dtype")), (&named.into(), None));
            }
            Err(part) => {
                let error = error(made);
                assert!(error.contains(part), "{error}");
            }
        }
    }
}

#[test]
fn a_config_that_is_none_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error =
        error(random_checkpoint(&dir.path().join("config.json"), &dir.path().join("out"), &random(None)));
    assert!(error.contains("cannot read"), "{error}");
    assert!(!dir.path().join("out").exists());
}

#[test]
fn an_order_that_the_format_has_not_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(FileFormat::CompressedTensors, 4, QuantGroup::Size(8));
    settings.desc_act = true;
    let error = error(random_checkpoint(&bundled(), &dir.path().join("out"), &random(Some(settings))));
    assert!(error.contains("`desc_act`") && error.contains("`format` gptq"), "{error}");
}
