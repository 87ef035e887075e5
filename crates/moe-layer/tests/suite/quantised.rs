//! Loads blocks of quantised checkpoints from candle's `VarBuilder`.

use std::collections::HashMap;

use candle_nn::VarBuilder;
use moe_layer::candle::{Result, Tensor};
use moe_layer::{BlockContext, CheckpointBlock, DType, Device, SparseMoeBlock, load_block};
use moe_quant::write::{IntMatrix, header, pack, round_scale};
use moe_quant::{Format, GptqZeros, IntFormat, QuantConfig, QuantGroup, safetensors::Dtype};
use serde_json::{Value, json};

use crate::{floats, message};

/// A checkpoint, as tensors by name.
type Tensors = HashMap<String, Tensor>;

const HIDDEN: usize = 64;
const WIDTH: usize = 32;
const EXPERTS: usize = 4;

fn config(quantisation: Option<Value>) -> Value {
    let mut config = json!({"model_type": "qwen2_moe", "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "shared_expert_intermediate_size": WIDTH});
    if let Some(header) = quantisation {
        config["quantization_config"] = header;
    }
    config
}

/// Returns the quantised modules of the block, with the dims of their matrices.
fn modules() -> Vec<(String, (usize, usize))> {
    let mlps = (0..EXPERTS).map(|expert| format!("experts.{expert}")).chain(["shared_expert".to_string()]);
    let of = |mlp: String| {
        let rows = (WIDTH, HIDDEN);
        let columns = (HIDDEN, WIDTH);
        [("gate_proj", rows), ("up_proj", rows), ("down_proj", columns)]
            .map(|(name, dims)| (format!("mlp.{mlp}.{name}"), dims))
    };
    mlps.flat_map(of).collect()
}

/// Returns the tensors that are floats in every checkpoint.
fn gates() -> Result<Tensors> {
    let randn = |rows: usize| Tensor::randn(0f32, 0.1, (rows, HIDDEN), &Device::Cpu);
    Ok(HashMap::from([
        ("mlp.gate.weight".to_string(), randn(EXPERTS)?),
        ("mlp.shared_expert_gate.weight".to_string(), randn(1)?),
    ]))
}

/// Converts a tensor of a file to candle's form.
fn tensor(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<Tensor> {
    let dtype = match dtype {
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::F16 => DType::F16,
        other => panic!("no test writes {other:?}"),
    };
    Tensor::from_raw_buffer(bytes, dtype, shape, &Device::Cpu)
}

/// Returns a checkpoint in an integer format, and the same weights in floats.
fn integers(format: Format) -> Result<[Tensors; 2]> {
    let mut quantised = gates()?;
    let mut plain = quantised.clone();
    let int = format.int().unwrap();
    for (at, (module, (n, k))) in modules().into_iter().enumerate() {
        let groups = k / int.group.columns(k);
        let code = |i: usize| ((i * 7919 + at * 104_729) % (1 << int.bits)) as u8;
        let scale = |i: usize| round_scale(0.01 + 0.001 * (i % 5) as f32, Dtype::F16).unwrap();
        let matrix = IntMatrix {
            n,
            k,
            q: (0..n * k).map(code).collect(),
            scale: (0..n * groups).map(scale).collect(),
            zero: vec![1 << (int.bits - 1); n * groups],
            g_idx: None,
        };
        for part in pack(&module, format, &matrix, Dtype::F16)? {
            let stored = tensor(part.spec.dtype, &part.spec.shape, &part.bytes)?;
            quantised.insert(format!("{module}.{}", part.spec.suffix), stored);
        }
        let floats = Tensor::from_vec(matrix.weights()?, (n, k), &Device::Cpu)?;
        plain.insert(format!("{module}.weight"), floats);
    }
    Ok([quantised, plain])
}

/// Returns a checkpoint in FP8 with blocks of 128 x 128, and the same weights in floats. These small matrices have one
/// scale each.
fn fp8() -> Result<[Tensors; 2]> {
    let mut quantised = gates()?;
    let mut plain = quantised.clone();
    for (module, dims) in modules() {
        let codes = Tensor::randn(0f32, 1.0, dims, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
        let floats = (codes.to_dtype(DType::F32)? * 0.125)?;
        quantised.insert(format!("{module}.weight"), codes);
        let scale = Tensor::new(&[[0.125f32]], &Device::Cpu)?;
        quantised.insert(format!("{module}.weight_scale_inv"), scale);
        plain.insert(format!("{module}.weight"), floats);
    }
    Ok([quantised, plain])
}

/// The value of the `i`-th of codes that are two to a byte, the first in the lower half.
fn e2m1(bytes: &[u8], i: usize) -> f32 {
    let code = bytes[i / 2] >> (4 * (i % 2)) & 15;
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// ModelOpt's NVFP4.
fn nvfp4() -> Result<[Tensors; 2]> {
    const FACTOR: f32 = 0.0125;
    let mut quantised = gates()?;
    let mut plain = quantised.clone();
    for (at, (module, (n, k))) in modules().into_iter().enumerate() {
        let bytes: Vec<u8> = (0..n * k / 2).map(|i| ((i * 7919 + at) % 251) as u8).collect();
        let scales: Vec<f32> = (0..n * k / 16).map(|i| 0.25 * (1 + i % 7) as f32).collect();
        let weight = |i: usize| scales[i / 16] * FACTOR * e2m1(&bytes, i);
        let floats = Tensor::from_vec((0..n * k).map(weight).collect(), (n, k), &Device::Cpu)?;
        plain.insert(format!("{module}.weight"), floats);
        let scales = Tensor::from_vec(scales, (n, k / 16), &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
        quantised.insert(format!("{module}.weight_scale"), scales);
        quantised.insert(format!("{module}.weight_scale_2"), Tensor::new(FACTOR, &Device::Cpu)?);
        quantised.insert(format!("{module}.weight"), Tensor::from_vec(bytes, (n, k / 2), &Device::Cpu)?);
    }
    Ok([quantised, plain])
}

fn vb(tensors: Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("mlp")
}

fn int4() -> Result<Format> {
    let header = json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true,
        "desc_act": false}});
    let config = QuantConfig::from_json(&header)?.unwrap();
    Ok(config.format_of("mlp.experts.0.up_proj")?)
}

fn packed_int4() -> Format {
    let int = IntFormat { bits: 4, group: QuantGroup::Size(16), zero_point: false, act_order: false };
    Format::PackQuantized { int }
}

/// Returns quantised checkpoints with their headers, each with the same weights in floats.
fn checkpoints() -> Result<Vec<(Value, [Tensors; 2])>> {
    let gptq = int4()?;
    assert!(matches!(gptq, Format::Gptq { zeros: GptqZeros::V1, .. }));
    let fp8_header = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    Ok(vec![
        (header(gptq, false, &[])?, integers(gptq)?),
        (header(packed_int4(), false, &[])?, integers(packed_int4())?),
        (fp8_header, fp8()?),
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*gate"]}), nvfp4()?),
    ])
}

/// The block with its quantised matrices loaded as floats.
fn as_floats(mut spec: CheckpointBlock, quantised: Tensors) -> Result<SparseMoeBlock> {
    spec.quant = spec.quant.map(QuantConfig::dequantised);
    let (block, selection) = spec.load_on(&BlockContext::default(), vb(quantised))?;
    assert_eq!(selection.spec.quant.to_string(), "none");
    Ok(block)
}

#[test]
fn a_quantised_block_computes_what_its_integers_mean() -> Result<()> {
    let x = Tensor::randn(0f32, 1.0, (5, HIDDEN), &Device::Cpu)?;
    for (header, [quantised, plain]) in checkpoints()? {
        let method = header["quant_method"].clone();
        let spec = CheckpointBlock::from_config(&config(Some(header)), 0)?;
        let (block, selection) = spec.load_on(&BlockContext::default(), vb(quantised.clone()))?;
        assert_eq!(selection.chosen.name(), "cpu", "{method}");
        let want = SparseMoeBlock::from_hf(&config(None), 0, vb(plain))?.forward(&x)?;
        let want = floats(&want);
        let largest = want.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (got, want) in floats(&block.forward(&x)?).iter().zip(&want) {
            // Integer kernels quantise activations to 8 bits or more, so the results are close to floats.
            assert!((got - want).abs() < 1e-2 * largest, "{method}: {got} {want}");
        }
        assert_eq!(floats(&as_floats(spec, quantised)?.forward(&x)?), want, "{method} as floats");
    }
    Ok(())
}

/// A block of gpt-oss as it is published: packs of codes and scales of all experts, rows of gate and up in turns,
/// biases in floats. And the same weights in floats, in gpt-oss's packs by columns.
fn gpt_oss() -> Result<(Value, [Tensors; 2])> {
    let config = json!({"model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"}});
    let randn = |dims: &[usize]| Tensor::randn(0f32, 0.1, dims, &Device::Cpu);
    let mut quantised = HashMap::from([
        ("mlp.router.weight".to_string(), randn(&[EXPERTS, HIDDEN])?),
        ("mlp.router.bias".to_string(), randn(&[EXPERTS])?),
        ("mlp.experts.gate_up_proj_bias".to_string(), randn(&[EXPERTS, 2 * WIDTH])?),
        ("mlp.experts.down_proj_bias".to_string(), randn(&[EXPERTS, HIDDEN])?),
    ]);
    let mut plain = quantised.clone();
    for (name, n, k) in [("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)] {
        let bytes: Vec<u8> = (0..EXPERTS * n * k / 2).map(|i| (i * 7919 % 251) as u8).collect();
        let exponents: Vec<u8> = (0..EXPERTS * n * k / 32).map(|i| 122 + (i % 5) as u8).collect();
        let weight = |i: usize| e2m1(&bytes, i) * 2f32.powi(i32::from(exponents[i / 32]) - 127);
        let floats: Vec<f32> = (0..EXPERTS * n * k).map(weight).collect();
        let floats =
            Tensor::from_vec(floats, (EXPERTS, n, k), &Device::Cpu)?.transpose(1, 2)?.contiguous()?;
        plain.insert(format!("mlp.experts.{name}"), floats);
        let blocks = Tensor::from_vec(bytes.clone(), (EXPERTS, n, k / 32, 16), &Device::Cpu)?;
        quantised.insert(format!("mlp.experts.{name}_blocks"), blocks);
        let scales = Tensor::from_vec(exponents.clone(), (EXPERTS, n, k / 32), &Device::Cpu)?;
        quantised.insert(format!("mlp.experts.{name}_scales"), scales);
    }
    Ok((config, [quantised, plain]))
}

#[test]
fn packs_of_quantised_experts_stay_quantised() -> Result<()> {
    let (config, [quantised, plain]) = gpt_oss()?;
    let mut floats_config = config.clone();
    floats_config.as_object_mut().unwrap().remove("quantization_config");
    let x = Tensor::randn(0f32, 1.0, (5, HIDDEN), &Device::Cpu)?;
    let want = floats(&SparseMoeBlock::from_hf(&floats_config, 0, vb(plain))?.forward(&x)?);
    let mut spec = CheckpointBlock::from_config(&config, 0)?;
    for (backend, name, scheme) in
        [(None, "cpu", "fp4 group 32"), (Some("emulation"), "emulation", "fp4 group 32")]
    {
        spec.options.backend = backend.map(str::to_string);
        let (block, selection) = spec.load_on(&BlockContext::default(), vb(quantised.clone()))?;
        assert_eq!(selection.chosen.name(), name);
        assert_eq!(selection.spec.quant.to_string(), scheme);
        // f32 activations: the weights are the same floats.
        assert_eq!(floats(&block.forward(&x)?), want, "{name}");
    }
    spec.options.backend = None;
    assert_eq!(floats(&as_floats(spec.clone(), quantised.clone())?.forward(&x)?), want, "as floats");
    for (name, part) in [("gate_up_proj_scales", "gate_up_proj_scales"), ("down_proj_bias", "down_proj")] {
        let mut rest = quantised.clone();
        rest.remove(&format!("mlp.experts.{name}"));
        let e = message(spec.load(vb(rest)));
        assert!(e.contains(part), "without {name}: {e}");
    }
    let mut short = quantised.clone();
    let scales = &quantised["mlp.experts.down_proj_scales"];
    short.insert("mlp.experts.down_proj_scales".into(), scales.narrow(0, 0, EXPERTS - 1)?.contiguous()?);
    let e = message(spec.load(vb(short)));
    assert!(
        e.contains("down_proj_scales: expected a pack of all experts in MXFP4, got shape [3, 64, 1]"),
        "{e}"
    );
    Ok(())
}

#[test]
fn a_quantised_checkpoint_without_its_header_is_refused_as_such() -> Result<()> {
    for (header, [quantised, _]) in checkpoints()? {
        let spec = CheckpointBlock::from_config(&config(None), 0)?;
        let vb = vb(quantised);
        let errors = [
            message(spec.load(vb.clone())),
            message(load_block(&spec.options, vb.pp("gate"), vb.pp("experts"))),
        ];
        for e in errors {
            assert!(e.contains("quantised") && e.contains("mlp.experts.0."), "{header}: {e}");
        }
    }
    Ok(())
}

#[test]
fn a_tensor_that_the_header_needs_is_named() -> Result<()> {
    let [(header, [mut quantised, _]), ..] = <[_; 4]>::try_from(checkpoints()?).unwrap();
    quantised.remove("mlp.experts.2.up_proj.scales");
    let e = message(SparseMoeBlock::from_hf(&config(Some(header)), 0, vb(quantised)));
    assert!(e.contains("mlp.experts.2.up_proj.scales"), "{e}");
    Ok(())
}
