//! Tests of GPTQ. It is better than rounding to nearest for correlated inputs and the same for uncorrelated ones. Whole
//! checkpoints are tested as well.

use candle_core::{Device, Tensor};
use moe_quant::{Format, GptqZeros, IntFormat, QuantGroup};
use moe_quantize::{
    Calibration, Feedback, FileFormat, Grid, Hessian, Indivisible, Method, NoFactor, TextSettings, gptq,
    loss, quantize, round_to_nearest,
};
use safetensors::Dtype;

use crate::support::{bundled, error, fixture, json, repository, settings, tensors};

/// Generates approximately normal samples as sums of uniform ones.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        let mut uniform = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..4).map(|_| uniform()).sum::<f32>() * 1.7
    }

    fn many(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// Returns inputs [rows, k] that are mixtures of k / 8 sources with a little noise. Some are ten times larger.
fn correlated(noise: &mut Noise, rows: usize, k: usize) -> Tensor {
    let sources = k / 8;
    let mix = noise.many(sources * k);
    let mut x = Vec::new();
    for _ in 0..rows {
        let source = noise.many(sources);
        for column in 0..k {
            let sum: f32 = (0..sources).map(|s| source[s] * mix[s * k + column]).sum();
            let size = if column % 37 == 5 { 10. } else { 1. };
            x.push(size * (sum / (sources as f32).sqrt() + 0.2 * noise.next()));
        }
    }
    Tensor::from_vec(x, (rows, k), &Device::Cpu).unwrap()
}

fn format(bits: u8, group: QuantGroup, zero_point: bool, act_order: bool) -> Format {
    Format::Gptq { int: IntFormat { bits, group, zero_point, act_order }, zeros: GptqZeros::V1 }
}

fn feedback(hessian: &Hessian, act_order: bool) -> Feedback {
    Feedback::new(hessian, act_order, 0.01).unwrap()
}

#[test]
fn halves_the_error_of_rounding_where_inputs_go_together() {
    let mut noise = Noise(1);
    for k in [64, 384] {
        let n = 48;
        let x = correlated(&mut noise, 4 * k, k);
        let weights = noise.many(n * k);
        let hessian = Hessian::of(&x).unwrap();
        for bits in [4, 8] {
            for group in [QuantGroup::Size(32), QuantGroup::Size(64), QuantGroup::Channel] {
                for zero_point in [false, true] {
                    let plain = Grid::new(format(bits, group, zero_point, false), Dtype::F16).unwrap();
                    let nearest = round_to_nearest(&plain, &weights, n, k).unwrap();
                    let nearest = hessian.output_error(&weights, &nearest.weights().unwrap()).unwrap();
                    // In order; in an order of their own; in another order, but with groups in order.
                    let by_row = group == QuantGroup::Channel;
                    for (act_order, reorder) in [(false, false), (!by_row, true), (false, true)] {
                        let grid = Grid::new(format(bits, group, zero_point, act_order), Dtype::F16).unwrap();
                        let made = gptq(&grid, &weights, (n, k), &feedback(&hessian, reorder)).unwrap();
                        let error = hessian.output_error(&weights, &made.weights().unwrap()).unwrap();
                        assert!(
                            error < 0.5 * nearest,
                            "{bits} {group:?} {zero_point} {act_order}: {error} {nearest}"
                        );
                        assert_eq!(made.g_idx.is_some(), act_order);
                    }
                }
            }
        }
    }
}

#[test]
fn rounds_to_nearest_where_inputs_have_nothing_in_common() {
    let n = 8;
    let k = 256;
    let weights = Noise(2).many(n * k);
    let x = Tensor::eye(k, candle_core::DType::F32, &Device::Cpu).unwrap();
    let hessian = Hessian::of(&x).unwrap();
    for group in [QuantGroup::Size(48), QuantGroup::Size(128), QuantGroup::Size(256), QuantGroup::Channel] {
        let k = if group == QuantGroup::Size(48) { 240 } else { k };
        let hessian = if k == 240 { &Hessian::of(&x.narrow(1, 0, k).unwrap()).unwrap() } else { &hessian };
        let grid = Grid::new(format(4, group, true, false), Dtype::BF16).unwrap();
        let made = gptq(&grid, &weights[..n * k], (n, k), &feedback(hessian, false)).unwrap();
        assert_eq!(made, round_to_nearest(&grid, &weights[..n * k], n, k).unwrap());
    }
}

#[test]
fn an_order_puts_the_largest_inputs_first() {
    let n = 4;
    let k = 64;
    let mut noise = Noise(3);
    let sizes: Vec<f32> = (0..k).map(|column| 1. + (column * 29 % k) as f32).collect();
    let x: Vec<f32> =
        (0..500).flat_map(|_| noise.many(k)).zip(sizes.iter().cycle()).map(|(x, s)| x * s).collect();
    let hessian = Hessian::of(&Tensor::from_vec(x, (500, k), &Device::Cpu).unwrap()).unwrap();
    let grid = Grid::new(format(4, QuantGroup::Size(16), false, true), Dtype::F32).unwrap();
    let groups = gptq(&grid, &noise.many(n * k), (n, k), &feedback(&hessian, true)).unwrap().g_idx.unwrap();
    let mean = |group: u32| {
        let members = groups.iter().zip(&sizes).filter(|(g, _)| **g == group);
        members.map(|(_, size)| size).sum::<f32>() / 16.
    };
    assert!(mean(0) > mean(1) && mean(1) > mean(2) && mean(2) > mean(3));
    for group in 0..4 {
        assert_eq!(groups.iter().filter(|g| **g == group).count(), 16);
    }
}

#[test]
fn inputs_that_were_never_seen_are_rounded_to_nearest() {
    let n = 4;
    let k = 32;
    let weights = Noise(4).many(n * k);
    let x = Tensor::zeros((10, k), candle_core::DType::F32, &Device::Cpu).unwrap();
    let grid = Grid::new(format(4, QuantGroup::Channel, false, false), Dtype::F16).unwrap();
    let made = gptq(&grid, &weights, (n, k), &feedback(&Hessian::of(&x).unwrap(), false)).unwrap();
    assert_eq!(made, round_to_nearest(&grid, &weights, n, k).unwrap());
}

#[test]
fn what_does_not_fit_is_refused() {
    let x = Tensor::ones((3, 8), candle_core::DType::F32, &Device::Cpu).unwrap();
    let hessian = Hessian::of(&x).unwrap();
    let grid = Grid::new(format(4, QuantGroup::Channel, false, false), Dtype::F16).unwrap();
    let e = error(gptq(&grid, &[0.; 8], (1, 16), &feedback(&hessian, false)));
    assert!(e.contains("expected weights [1, 16]"), "{e}");
    let e = error(gptq(&grid, &[0.; 16], (1, 16), &feedback(&hessian, false)));
    assert!(e.contains("expected inputs of 16 columns") && e.contains("got 8"), "{e}");
    for size in [0, 3, 16] {
        let grid = Grid::new(format(4, QuantGroup::Size(size), false, false), Dtype::F16).unwrap();
        for act_order in [false, true] {
            let e = error(gptq(&grid, &[0.; 8], (1, 8), &feedback(&hessian, act_order)));
            assert!(e.contains(&format!("groups of {size} columns do not divide 8")), "{e}");
        }
    }
    let e = error(gptq(&grid, &[f32::NAN; 8], (1, 8), &feedback(&hessian, false)));
    assert!(e.contains("row 0 holds weights that are not finite"), "{e}");
    let ordered = Grid::new(format(4, QuantGroup::Size(4), false, true), Dtype::F16).unwrap();
    let e = error(gptq(&ordered, &[0.; 8], (1, 8), &feedback(&hessian, false)));
    assert!(e.contains("the order of falling inputs"), "{e}");
    for (weights, rounded) in [(12, 12), (8, 16)] {
        let e = error(hessian.output_error(&vec![0.; weights], &vec![0.; rounded]));
        assert!(e.contains(&format!("rows of 8 columns, at least 1, got {weights} and {rounded}")), "{e}");
    }
    let none = Hessian::of(&x.narrow(1, 0, 0).unwrap()).unwrap();
    assert!(error(none.output_error(&[], &[])).contains("at least 1"));
    let e = error(Hessian::of(&(x * f64::INFINITY).unwrap()));
    assert!(e.contains("not finite"), "{e}");
}

#[test]
fn damping_that_is_none_is_told_from_inputs_without_a_factor() {
    let zeros = Tensor::zeros((3, 8), candle_core::DType::F32, &Device::Cpu).unwrap();
    let hessian = Hessian::of(&zeros).unwrap();
    let made = |damping| Feedback::new(&hessian, false, damping).map(drop);
    assert!(made(0.01).is_ok());
    let none = made(0.0).unwrap_err();
    assert!(none.is::<NoFactor>() && none.to_string().contains("no Cholesky factor"), "{none}");
    for damping in [f64::NAN, f64::INFINITY, -0.01] {
        let error = made(damping).unwrap_err();
        assert!(!error.is::<NoFactor>() && error.to_string().contains("of at least 0"), "{error}");
    }
}

fn calibration(samples: usize, length: usize) -> Calibration {
    // Nobody edits this text. Assertions about a checkpoint's predictions must not depend on the wording of a page.
    let text = TextSettings { file: repository().join("LICENSE-APACHE"), samples, length };
    Calibration { text, damping: 0.01, min_tokens: 32 }
}

#[test]
fn a_calibrated_checkpoint_predicts_closer_to_its_source_than_a_rounded_one() {
    let dir = tempfile::tempdir().unwrap();
    let calibration = calibration(24, 128);
    let mut settings = settings(FileFormat::Gptq, 4, QuantGroup::Size(128));
    settings.indivisible = Indivisible::Channel;
    let nearest = dir.path().join("rtn");
    quantize(&bundled(), &nearest, &settings).unwrap();
    // The test does not compare the loss itself. The text is so different from the training data that rounding may even
    // improve the small model.
    let rounded = loss(&nearest, Some(&bundled()), &calibration.text).unwrap();
    for (format, desc_act) in
        [(FileFormat::Gptq, false), (FileFormat::Gptq, true), (FileFormat::CompressedTensors, true)]
    {
        settings.format = format;
        settings.method = Method::Gptq(calibration.clone());
        settings.desc_act = desc_act;
        let out = dir.path().join(format!("{format:?}-{desc_act}"));
        let report = quantize(&bundled(), &out, &settings).unwrap();
        let calibrated = loss(&out, Some(&bundled()), &calibration.text).unwrap();
        assert!(
            calibrated.divergence.unwrap() < 0.7 * rounded.divergence.unwrap(),
            "{rounded:?} {calibrated:?}"
        );
        assert_eq!(report.calibrated.0 + report.fallback.len(), report.quantised);
        let names = |dir: &std::path::Path| tensors(dir).into_keys().collect::<Vec<_>>();
        assert!(format != FileFormat::Gptq || names(&out) == names(&nearest));
        assert!(!names(&out).iter().any(|name| name.ends_with("weight_g_idx")));
    }
}

#[test]
fn experts_that_saw_few_tokens_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut settings = settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel);
    settings.method = Method::Gptq(calibration(2, 48));
    settings.lm_head = true;
    let report = quantize(&fixture("deepseek-text"), &out, &settings).unwrap();
    assert!(!report.fallback.is_empty() && report.calibrated.0 > 0);
    assert!(
        report
            .fallback
            .iter()
            .all(|(module, why)| module.contains("experts.") && why.contains("fewer than 32"))
    );
    let written = json(&out.join("quantization_report.json"));
    let listed = written["rounded_to_nearest_instead"].as_array().unwrap();
    assert_eq!(listed.len(), report.fallback.len());
    assert_eq!(written["calibrated_modules"], report.calibrated.0);
    assert!(tensors(&out).contains_key("lm_head.weight_packed"));
    let text = calibration(2, 48).text;
    let before = loss(&fixture("deepseek-text"), None, &text).unwrap();
    let after = loss(&out, None, &text).unwrap();
    assert!((before.nats_per_token - after.nats_per_token).abs() < 0.02 * before.nats_per_token);
}

/// There are fewer tokens than columns, so without damping no inputs have a factor.
#[test]
fn modules_whose_inputs_have_no_factor_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel);
    settings.method = Method::Gptq(Calibration { damping: 0., min_tokens: 1, ..calibration(1, 32) });
    settings.ignore = vec!["*.experts.*".to_string()];
    let report = quantize(&bundled(), &dir.path().join("out"), &settings).unwrap();
    assert_eq!((report.calibrated.0, report.fallback.len()), (0, report.quantised));
    assert!(report.fallback.iter().all(|(_, why)| why.contains("no Cholesky factor")));
}

#[test]
fn texts_and_damping_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let run = |model: &std::path::Path, change: fn(&mut Calibration)| {
        let mut calibration = calibration(2, 48);
        change(&mut calibration);
        let mut settings = settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel);
        settings.method = Method::Gptq(calibration);
        let e = error(quantize(model, &dir.path().join("out"), &settings));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        e
    };
    for (change, part) in [
        ((|c| c.text.samples = 100_000) as fn(&mut Calibration), "expected at least 4800000 tokens"),
        (|c| c.text.length = 513, "the model's context has 512 tokens"),
        (|c| c.text.samples = 0, "at least 1 window"),
        (|c| c.text.file = "no-such-file".into(), "cannot read the text no-such-file"),
        (|c| c.damping = f64::NAN, "damping: expected a finite number of at least 0, got NaN"),
        (|c| c.damping = -0.01, "damping: expected a finite number of at least 0, got -0.01"),
    ] {
        let e = run(&bundled(), change);
        assert!(e.contains(part), "{e}");
    }
    let e = run(&fixture("base"), |_| {});
    assert!(e.contains("tokenizer"), "{e}");
}

#[test]
fn a_model_does_not_diverge_from_itself_and_others_do_not_compare() {
    let text = calibration(2, 48).text;
    let same = loss(&bundled(), Some(&bundled()), &text).unwrap();
    assert_eq!(same.divergence, Some(0.));
    let e = error(loss(&bundled(), Some(&fixture("text")), &text));
    assert!(e.contains("expected a vocabulary of 2048"), "{e}");
}
