//! Tests that calibration computes the same values, layer by layer, as the model computes with the resulting
//! checkpoint.

use std::path::{Path, PathBuf};

use moe_quant::QuantGroup;

use super::*;
use crate::loss;
use crate::settings::{FileFormat, Indivisible, Method, Settings, TextSettings};

/// Returns the loss from the hidden states of the calibration, and the loss of the written checkpoint.
fn losses(model: &Path, text: &Path, settings: impl Fn(Calibration) -> Settings) -> (f64, f64) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let text = TextSettings { file: text.to_path_buf(), samples: 6, length: 40 };
    let calibration = Calibration { text: text.clone(), damping: 0.01, min_tokens: 16 };
    let settings = settings(calibration.clone());
    let source = Source::open(model).unwrap();
    let mut job = Job::begin(&source, &out, &settings).unwrap();
    let vocab = source.model.decoder().vocab_size;
    let windows = windows(model, &text, vocab, 512).unwrap();
    let (layers, others) = by_layer(std::mem::take(&mut job.items), "model.layers");
    for (item, dtype) in others {
        let tensor = job.read(&item).unwrap();
        job.copy(&item, dtype, &tensor).unwrap();
    }
    let hidden = through_layers(&source, &mut job, &calibration, layers, &windows).unwrap();
    job.finish().unwrap();
    let tied = source.model.decoder().tie_word_embeddings;
    let head = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let head = source.tensors.tensor(head).unwrap().to_dtype(DType::F32).unwrap();
    let logits = hidden.matmul(&head.t().unwrap()).unwrap();
    let rows = candle_nn::ops::log_softmax(&logits, 1).unwrap().to_vec2::<f32>().unwrap();
    let mut sum = 0.0;
    let mut tokens = 0;
    for (window, rows) in windows.iter().zip(rows.chunks(text.length)) {
        for (row, next) in rows.iter().zip(&window[1..]) {
            sum -= f64::from(row[*next as usize]);
            tokens += 1;
        }
    }
    (sum / f64::from(tokens), loss(&out, None, &text).unwrap().nats_per_token)
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn settings(calibration: Calibration, group: QuantGroup) -> Settings {
    Settings {
        format: FileFormat::CompressedTensors,
        bits: 4,
        group,
        symmetric: false,
        desc_act: false,
        method: Method::Gptq(calibration),
        lm_head: false,
        ignore: Vec::new(),
        indivisible: Indivisible::Keep,
    }
}

#[test]
fn layers_one_by_one_are_the_model() {
    let text = repository().join("docs/architecture.md");
    for (model, group) in [
        ("models/families/checkpoint", QuantGroup::Size(32)),
        ("tests/fixtures/text", QuantGroup::Channel),
        ("tests/fixtures/deepseek-text", QuantGroup::Channel),
        ("tests/fixtures/mixtral-text", QuantGroup::Channel),
        ("tests/fixtures/olmoe-text", QuantGroup::Channel),
        ("tests/fixtures/minimax-text", QuantGroup::Channel),
        ("tests/fixtures/ernie-text", QuantGroup::Channel),
    ] {
        let (seen, made) =
            losses(&repository().join(model), &text, |calibration| settings(calibration, group));
        assert!((seen - made).abs() < 1e-4 * made, "{model}: {seen} {made}");
    }
}
