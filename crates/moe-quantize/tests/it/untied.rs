//! Tests of vocabulary projections that are tied to the embedding. When they are quantised, they become matrices of
//! their own.

use std::path::Path;

use candle_core::DType;
use candle_nn::var_builder::SimpleBackend;
use model_runtime::{CausalLm, Geometry};
use moe_engine::LoadOptions;
use moe_quant::QuantGroup;
use moe_quantize::{
    Calibration, Dequantised, FileFormat, Indivisible, Method, RandomSettings, Settings, TextSettings,
    model_of, quantize, random_checkpoint,
};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};

use crate::support::{bf16, bundled, json, loaded, logits_of, repository, settings, tensors, weights};

/// The number of ids and the hidden size of the bundled model.
const SHAPE: (usize, usize) = (2048, 256);
const EMBEDDING: &str = "model.embed_tokens.weight";

fn with_head(format: FileFormat, bits: u8) -> Settings {
    let group = if bits == 8 { QuantGroup::Channel } else { QuantGroup::Size(32) };
    Settings { lm_head: true, indivisible: Indivisible::Channel, ..settings(format, bits, group) }
}

/// Loads the model with the floats that its integers mean.
fn dequantised(dir: &Path) -> Box<dyn CausalLm> {
    let config = json(&dir.join("config.json"));
    let weights = Dequantised::open(dir, &config).unwrap();
    let model = model_of(&config, "config.json").unwrap();
    let expected = model.layout(&Geometry::default(), &|name| weights.contains_tensor(name)).unwrap().tensors;
    model.load(&LoadOptions::default(), weights.only(&expected).var_builder()).unwrap().model
}

fn logits(model: &dyn CausalLm) -> Vec<f32> {
    let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % SHAPE.0 as u32).collect();
    logits_of(model, &ids)
}

/// Returns the largest difference of the logits, relative to the largest value of `want`.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
    got.iter().zip(want).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// Checks that the projection's integers are within half a step of the embedding, and that the embedding is unchanged.
fn check_head(source: &Path, made: &Path) {
    check_head_of(source, made, EMBEDDING);
}

/// Does the same as [`check_head`] for a projection that comes from this tensor.
fn check_head_of(source: &Path, made: &Path, of: &str) {
    assert_eq!(json(&made.join("config.json"))["tie_word_embeddings"], false);
    let before = tensors(source);
    let after = tensors(made);
    assert_eq!(before[EMBEDDING], after[EMBEDDING]);
    assert!(!after.contains_key("lm_head.weight"));
    let (format, got) = weights(made, "lm_head", SHAPE);
    let int = format.int().unwrap();
    let size = format.scheme().group_size(SHAPE.1);
    for (floats, got) in bf16(&before[of].2).chunks(size).zip(got.chunks(size)) {
        let largest = floats.iter().fold(0f32, |most, w| most.max(w.abs()));
        let bound = largest / ((1u32 << int.bits) - 1) as f32 * (1. + 1. / 64.);
        floats.iter().zip(got).for_each(|(a, b)| assert!((a - b).abs() <= bound, "{a} {b}"));
    }
}

#[test]
fn the_logits_are_those_of_the_floats_that_it_means() {
    let dir = tempfile::tempdir().unwrap();
    for format in [FileFormat::Gptq, FileFormat::CompressedTensors] {
        for bits in [4, 8] {
            let out = dir.path().join(format!("{format:?}-{bits}"));
            let report = quantize(&bundled(), &out, &with_head(format, bits)).unwrap();
            assert_eq!(report.quantised, 4 * (4 + 16 * 3) + 1);
            check_head(&bundled(), &out);
            let want = logits(dequantised(&out).as_ref());
            let exact = loaded(&out, DType::F32);
            let short = loaded(&out, DType::BF16);
            let error = distance(&logits(exact.as_ref()), &want);
            assert!(error < 1e-5, "{format:?} {bits}: {error}");
            let error = distance(&logits(short.as_ref()), &want);
            assert!(error < 0.05, "{format:?} {bits}: bf16 {error}");
            // Rounding has changed the projection, so it differs from the tied one.
            let tied = dir.path().join(format!("{format:?}-{bits}-tied"));
            quantize(&bundled(), &tied, &Settings { lm_head: false, ..with_head(format, bits) }).unwrap();
            assert_eq!(json(&tied.join("config.json"))["tie_word_embeddings"], true);
            let other = logits(dequantised(&tied).as_ref());
            assert!(distance(&other, &want) > if bits == 8 { 1e-4 } else { 1e-3 });
        }
    }
}

/// The calibrated model is closer to the float model than the model that is rounded to nearest.
#[test]
fn it_is_calibrated_as_other_layers_are() {
    let dir = tempfile::tempdir().unwrap();
    let text = TextSettings { file: repository().join("LICENSE-APACHE"), samples: 8, length: 128 };
    let mut settings = with_head(FileFormat::Gptq, 4);
    settings.ignore = vec!["model.layers.*".to_string()];
    let divergence = |name: &str, settings: &Settings| {
        let out = dir.path().join(name);
        let report = quantize(&bundled(), &out, settings).unwrap();
        assert_eq!(report.quantised, 1);
        check_head_shape(&out);
        moe_quantize::loss(&out, Some(&bundled()), &text).unwrap().divergence.unwrap()
    };
    let nearest = divergence("nearest", &settings);
    settings.method = Method::Gptq(Calibration { text: text.clone(), damping: 0.01, min_tokens: 128 });
    let calibrated = divergence("calibrated", &settings);
    assert!(calibrated < 0.9 * nearest, "{calibrated} {nearest}");
}

fn check_head_shape(made: &Path) {
    let (format, got) = weights(made, "lm_head", SHAPE);
    assert!(format.int().is_some() && got.len() == SHAPE.0 * SHAPE.1);
}

/// Writes the bundled checkpoint, whose config ties both, with a projection of these bytes and another tensor.
fn with_projection(dir: &Path, head: &[u8], extra: &str) {
    std::fs::create_dir(dir).unwrap();
    std::fs::copy(bundled().join("config.json"), dir.join("config.json")).unwrap();
    let stored = tensors(&bundled());
    let mut views: Vec<(&str, TensorView)> = stored
        .iter()
        .map(|(name, (_, shape, bytes))| {
            (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
        })
        .collect();
    views.push(("lm_head.weight", TensorView::new(Dtype::BF16, vec![SHAPE.0, SHAPE.1], head).unwrap()));
    views.push((extra, TensorView::new(Dtype::BF16, vec![32, 32], &head[..2048]).unwrap()));
    std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
}

/// A copy of the embedding under the name of the projection counts as tied. Other values are kept, even if the config
/// ties them. Tensors that the model does not use are left out and reported.
#[test]
fn a_projection_that_is_stored_is_kept_if_it_is_not_the_embedding() {
    let dir = tempfile::tempdir().unwrap();
    let same = tensors(&bundled())[EMBEDDING].2.clone();
    let mut other = same.clone();
    other.rotate_left(2 * SHAPE.1);
    for (name, head, of) in [("same", &same, EMBEDDING), ("other", &other, "lm_head.weight")] {
        let source = dir.path().join(name);
        let out = dir.path().join(format!("{name}-out"));
        with_projection(&source, head, "model.layers.4.self_attn.q_proj.weight");
        let report = quantize(&source, &out, &with_head(FileFormat::CompressedTensors, 8)).unwrap();
        check_head_of(&source, &out, of);
        assert!(!tensors(&out).keys().any(|name| name.contains("layers.4.")), "{name}");
        let notes = report.notes.concat();
        assert!(notes.contains("model.layers.4.*"), "{notes}");
        assert_eq!(notes.contains("ties the vocabulary projection"), name == "other", "{notes}");
        let floats = Settings { lm_head: false, ..with_head(FileFormat::CompressedTensors, 8) };
        let out = dir.path().join(format!("{name}-floats"));
        quantize(&source, &out, &floats).unwrap();
        assert_eq!(json(&out.join("config.json"))["tie_word_embeddings"], name == "same");
        assert_eq!(tensors(&out)["lm_head.weight"].2, **head);
    }
}

#[test]
fn a_projection_that_stays_in_floats_stays_tied() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut settings = with_head(FileFormat::CompressedTensors, 8);
    settings.ignore = vec!["lm_head".to_string()];
    quantize(&bundled(), &out, &settings).unwrap();
    let config = json(&out.join("config.json"));
    assert_eq!(config["tie_word_embeddings"], true);
    assert!(config["quantization_config"]["ignore"].as_array().unwrap().contains(&"lm_head".into()));
    assert!(!tensors(&out).keys().any(|name| name.starts_with("lm_head")));
    let error = distance(&logits(loaded(&out, DType::F32).as_ref()), &logits(dequantised(&out).as_ref()));
    assert!(error < 1e-5, "{error}");
}

#[test]
fn a_random_checkpoint_has_one_too() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let quantised = Some(with_head(FileFormat::Gptq, 4));
    let settings = RandomSettings { quantised, dtype: None, layers: Some(1), seed: 3 };
    random_checkpoint(&bundled(), &out, &settings).unwrap();
    assert_eq!(json(&out.join("config.json"))["tie_word_embeddings"], false);
    check_head_shape(&out);
    let error = distance(&logits(loaded(&out, DType::F32).as_ref()), &logits(dequantised(&out).as_ref()));
    assert!(error < 1e-5, "{error}");
}
