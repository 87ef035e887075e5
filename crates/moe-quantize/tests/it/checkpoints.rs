//! Tests of whole checkpoints that are rounded to nearest: names, kept floats, integers, headers and files.

use moe_quant::{Format, QuantGroup};
use moe_quantize::{FileFormat, Indivisible, quantize};
use serde_json::Value;

use crate::support::{bf16, bundled, fixture, json, settings, tensors, weight_files, weights};

/// Checks that every tensor of the source exists, either as integers within half a step or unchanged.
fn compare(source: &std::path::Path, made: &std::path::Path) -> (usize, usize) {
    let before = tensors(source);
    let mut after = tensors(made);
    let mut quantised = 0;
    let mut kept = 0;
    for (name, (dtype, shape, bytes)) in &before {
        if let Some(same) = after.remove(name) {
            assert_eq!((dtype, shape, bytes), (&same.0, &same.1, &same.2), "{name}");
            kept += 1;
            continue;
        }
        let module = name.strip_suffix(".weight").unwrap();
        let n = shape[0];
        let k = shape[1];
        let (format, got) = weights(made, module, (n, k));
        let int = format.int().unwrap();
        let size = format.scheme().group_size(k);
        let floats = bf16(bytes);
        for (group, (floats, got)) in floats.chunks(size).zip(got.chunks(size)).enumerate() {
            let largest = floats.iter().fold(0f32, |most, w| most.max(w.abs()));
            // For symmetric integers the step is 2 / (2^bits - 1) of the largest weight. Rounding the scale to F16 or
            // BF16 makes it slightly larger.
            let bound = largest / ((1u32 << int.bits) - 1) as f32 * (1. + 1. / 64.);
            for (a, b) in floats.iter().zip(got) {
                assert!((a - b).abs() <= bound, "{name} group {group}: {a} {b}");
            }
        }
        quantised += 1;
        after.retain(|name, _| name.rsplit_once('.').unwrap().0 != module);
    }
    assert!(after.is_empty(), "unexpected: {:?}", after.keys().collect::<Vec<_>>());
    (quantised, kept)
}

#[test]
fn the_bundled_model_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    for format in [FileFormat::Gptq, FileFormat::CompressedTensors] {
        for (bits, group, indivisible) in [
            (4, QuantGroup::Size(128), Indivisible::Channel),
            (4, QuantGroup::Size(32), Indivisible::Keep),
            (8, QuantGroup::Channel, Indivisible::Refuse),
        ] {
            let out = dir.path().join(format!("{format:?}-{bits}-{group:?}"));
            let mut settings = settings(format, bits, group);
            settings.indivisible = indivisible;
            let report = quantize(&bundled(), &out, &settings).unwrap();
            let (quantised, kept) = compare(&bundled(), &out);
            // There are 4 layers, each with 4 projections of attention and 16 experts of 3 matrices. If `down_proj`,
            // which has 72 columns, stays in floats, an expert has 2 quantised matrices.
            let experts = if indivisible == Indivisible::Keep { 2 } else { 3 };
            assert_eq!(quantised, 4 * (4 + 16 * experts));
            assert_eq!(report.quantised, quantised);
            assert_eq!(kept, 4 * 5 + 2 + 64 * (3 - experts));
            let bound = if bits == 8 { 0.02 } else { 0.2 };
            assert!(report.relative_error() < bound, "{}", report.relative_error());
            for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
                assert_eq!(
                    std::fs::read(out.join(file)).unwrap(),
                    std::fs::read(bundled().join(file)).unwrap()
                );
            }
            let written = json(&out.join("quantization_report.json"));
            assert_eq!(written["quantised_modules"], quantised);
        }
    }
}

#[test]
fn shards_stay_the_sources() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let source = fixture("sharded");
    quantize(&source, &out, &settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel)).unwrap();
    assert_eq!(weight_files(&source), weight_files(&out));
    compare(&source, &out);
    let index = json(&out.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), tensors(&out).len());
    assert!(map.values().all(|file| weight_files(&out).contains(&file.as_str().unwrap().to_string())));
    let bytes: usize = tensors(&out).values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
}

#[test]
fn packed_experts_become_separate_ones() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str| {
        let out = dir.path().join(name);
        let mut settings = settings(FileFormat::CompressedTensors, 4, QuantGroup::Channel);
        settings.ignore = vec!["*.experts.3.up_proj".to_string()];
        quantize(&fixture(name), &out, &settings).unwrap();
        out
    };
    for name in ["packed", "deepseek-packed-hub"] {
        let source = tensors(&fixture(name));
        let out = made(name);
        let after = tensors(&out);
        let (pack, (_, shape, bytes)) =
            source.iter().find(|(name, _)| name.ends_with("gate_up_proj")).unwrap();
        let prefix = pack.strip_suffix(".gate_up_proj").unwrap();
        let rows = shape[1] / 2;
        let k = shape[2];
        let floats = bf16(bytes);
        // An ignored expert keeps its rows of the pack.
        let up = &floats[(3 * 2 * rows + rows) * k..][..rows * k];
        assert_eq!(bf16(&after[&format!("{prefix}.3.up_proj.weight")].2), up);
        let (_, gate) = weights(&out, &format!("{prefix}.2.gate_proj"), (rows, k));
        for (a, b) in floats[2 * 2 * rows * k..][..rows * k].chunks(k).zip(gate.chunks(k)) {
            let largest = a.iter().fold(0f32, |most, w| most.max(w.abs()));
            a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() <= largest / 15. * 1.02));
        }
        assert!(!after.contains_key(pack));
    }
}

#[test]
fn deepseek_with_shared_experts_and_zero_points() {
    let dir = tempfile::tempdir().unwrap();
    for (name, format) in
        [("deepseek-text", FileFormat::CompressedTensors), ("deepseek-v2", FileFormat::Gptq)]
    {
        let out = dir.path().join(name);
        let mut settings = settings(format, 8, QuantGroup::Channel);
        (settings.symmetric, settings.indivisible, settings.lm_head) = (false, Indivisible::Keep, true);
        let report = quantize(&fixture(name), &out, &settings).unwrap();
        compare(&fixture(name), &out);
        let after = tensors(&out);
        let scales = if format == FileFormat::Gptq { "scales" } else { "weight_scale" };
        assert!(after.contains_key(&format!("lm_head.{scales}")));
        assert!(after.contains_key("model.layers.1.mlp.gate.weight"));
        assert!(report.quantised > 10);
        if name == "deepseek-v2" {
            // 14 columns do not fill whole words of 4.
            assert!(report.kept.iter().any(|name| name.ends_with("experts.0.down_proj")));
        }
    }
}

#[test]
fn an_exception_of_one_layer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut settings = settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel);
    settings.ignore = vec!["model.layers.2.self_attn.*".to_string()];
    quantize(&bundled(), &out, &settings).unwrap();
    let ignore = json(&out.join("config.json"))["quantization_config"]["ignore"].clone();
    let ignore: Vec<&str> = ignore.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(ignore.contains(&r"re:model\.layers\.2\.self_attn\.o_proj$"), "{ignore:?}");
    assert!(ignore.contains(&r"re:model\.layers\.\d+\.mlp\.gate$"), "{ignore:?}");
    let config = moe_quant::QuantConfig::from_json(&json(&out.join("config.json"))).unwrap().unwrap();
    assert_eq!(config.format_of("model.layers.2.self_attn.q_proj").unwrap(), Format::Plain);
    assert_ne!(config.format_of("model.layers.1.self_attn.q_proj").unwrap(), Format::Plain);
}
