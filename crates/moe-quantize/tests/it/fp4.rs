//! Tests of checkpoints in floats of 4 bits.

use moe_quant::{Format, Fp4Tensors, QuantGroup};
use moe_quantize::{FileFormat, Indivisible, Settings, loss, quantize};

use crate::support::{bf16, bundled, error, fixture, json, settings, tensors, weights};

fn fp4(format: FileFormat) -> Settings {
    Settings { indivisible: Indivisible::Keep, ..settings(format, 4, format.usual_group()) }
}

#[test]
fn weights_are_near_their_source() {
    let dir = tempfile::tempdir().unwrap();
    for (format, stored, share, most) in [
        // The largest weight of a block is 6 scales or, where the scale was rounded, nearly so.
        (FileFormat::Nvfp4, Format::Nvfp4(Fp4Tensors::Packed), 1.07 / 6.0, 0.11),
        // It is between 2 and 8 scales.
        (FileFormat::Mxfp4, Format::Mxfp4(Fp4Tensors::Packed), 1.0 / 4.0, 0.13),
    ] {
        let out = dir.path().join(stored.name());
        let report = quantize(&bundled(), &out, &fp4(format)).unwrap();
        // As in integers: 4 layers of 4 projections and 16 experts of 3, of which down_proj has 72 columns.
        assert_eq!(report.quantised, 4 * (4 + 16 * 2));
        assert!(
            report.relative_error() > 0.03 && report.relative_error() < most,
            "{}",
            report.relative_error()
        );
        let block = stored.scheme().group_size(1);
        let after = tensors(&out);
        for (name, (_, shape, bytes)) in tensors(&bundled()) {
            let module = name.strip_suffix(".weight").unwrap();
            if after.contains_key(&name) {
                continue;
            }
            let (found, got) = weights(&out, module, (shape[0], shape[1]));
            assert_eq!(found, stored);
            for (floats, got) in bf16(&bytes).chunks(block).zip(got.chunks(block)) {
                let largest = floats.iter().fold(0f32, |most, w| most.max(w.abs()));
                for (a, b) in floats.iter().zip(got) {
                    assert!((a - b).abs() <= share * largest, "{name}: {a} {b} of {largest}");
                }
            }
        }
        let written = json(&out.join("config.json"));
        assert_eq!(written["quantization_config"]["format"], stored.name());
        // The model still predicts text.
        let text = moe_quantize::TextSettings { file: bundled().join("config.json"), samples: 2, length: 64 };
        let loss = loss(&out, Some(&bundled()), &text).unwrap();
        assert!(loss.divergence.unwrap() < 0.5, "{:?}", loss.divergence);
    }
}

#[test]
fn matrices_of_zeros_and_large_weights() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("base").join(file), source.join(file)).unwrap();
    }
    let path = source.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let meta: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let range = |name: &str| {
        let at = |i: usize| 8 + header + meta[name]["data_offsets"][i].as_u64().unwrap() as usize;
        at(0)..at(1)
    };
    // The only matrices here whose columns blocks divide.
    let zeros = range("model.layers.0.self_attn.o_proj.weight");
    bytes[zeros].fill(0);
    let large = range("model.layers.1.self_attn.o_proj.weight");
    bytes[large.start..large.start + 2].copy_from_slice(&half::bf16::MAX.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    for format in [FileFormat::Nvfp4, FileFormat::Mxfp4] {
        let out = dir.path().join(format!("{format:?}"));
        let report = quantize(&source, &out, &fp4(format)).unwrap();
        assert_eq!(report.quantised, 3);
        assert!(report.relative_error() < 0.3, "{}", report.relative_error());
    }
}

#[test]
fn settings_of_integers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (change, part) in [
        ((|s| s.bits = 8) as fn(&mut Settings), "`bits`: nvfp4-pack-quantized has 4, got 8"),
        (|s| s.group = QuantGroup::Size(32), "`group`: nvfp4-pack-quantized has blocks of 16 columns"),
        (|s| s.symmetric = false, "`symmetric` false: nvfp4-pack-quantized has no zero points"),
        (|s| s.desc_act = true, "`desc_act`: the order of columns comes from calibration"),
        (|s| s.indivisible = Indivisible::Refuse, "blocks of 16 columns do not divide 72"),
        (|s| s.indivisible = Indivisible::Channel, "blocks of 16 columns do not divide 72"),
    ] {
        let mut settings = fp4(FileFormat::Nvfp4);
        change(&mut settings);
        let error = error(quantize(&bundled(), &dir.path().join("out"), &settings));
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
