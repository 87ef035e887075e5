//! Blocks of published models against transformers' own modules: config.json, tensors and outputs that
//! `tests/make_families.py` recorded.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_nn::VarBuilder;
use moe_layer::candle::{Module, Result, Tensor, safetensors};
use moe_layer::{
    ArgumentError, BlockContext, BlockError, CheckpointBlock, CorrectionBiasNames, DType, Device, Geometry,
    MlpNames, QuantError, RouterError, SparseMoeBlock, cause, hf, model_types,
};
use moe_quant::safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::{bits, floats, message};

/// Largest relative error of an output in f32.
const TOLERANCE: f64 = 1e-6;

/// What is recorded of a model type.
struct Recorded {
    config: Value,
    /// Tensors of the block, from its prefix.
    tensors: HashMap<String, Tensor>,
    input: Tensor,
    output: Tensor,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families")
}

/// Model types, some with an option after a dash.
fn cases() -> BTreeSet<String> {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    files.map(|path| path.file_stem().unwrap().display().to_string()).collect()
}

fn recorded(case: &str) -> Result<Recorded> {
    let bytes = std::fs::read(folder().join(format!("{case}.safetensors")))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let config = metadata.metadata().as_ref().unwrap()["config"].as_str();
    let mut tensors = safetensors::load_buffer(&bytes, &Device::Cpu)?;
    Ok(Recorded {
        config: serde_json::from_str(config).unwrap(),
        input: tensors.remove("input").unwrap(),
        output: tensors.remove("output").unwrap(),
        tensors,
    })
}

/// A checkpoint of these tensors below `model.layers.1.mlp`.
fn checkpoint(tensors: &HashMap<String, Tensor>, dtype: DType) -> VarBuilder<'static> {
    let named = tensors.iter().map(|(name, tensor)| (format!("model.layers.1.mlp.{name}"), tensor.clone()));
    VarBuilder::from_tensors(named.collect(), dtype, &Device::Cpu).pp("model.layers.1").pp("mlp")
}

fn relative_error(got: &Tensor, want: &Tensor) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let got = floats(got);
    let want = floats(want);
    let difference = square(&mut got.iter().zip(&want).map(|(a, b)| a - b));
    (difference / square(&mut want.iter().copied())).sqrt()
}

#[test]
fn every_model_type_agrees_with_transformers() -> Result<()> {
    let known: BTreeSet<&str> = model_types().collect();
    let cases = cases();
    let types: BTreeSet<&str> = cases.iter().filter_map(|case| case.split('-').next()).collect();
    assert_eq!(known, types, "each model type of the table is recorded");
    for case in &cases {
        let r = recorded(case)?;
        let block = SparseMoeBlock::from_hf(&r.config, 1, checkpoint(&r.tensors, DType::F32))?;
        let got = block.forward(&r.input)?;
        assert_eq!(got.dims(), r.output.dims());
        let error = relative_error(&got, &r.output);
        println!("{case}: {error:.2e}");
        assert!(error < TOLERANCE, "{case}: relative error {error:e}");
        // Every tensor matters: without one of them, no block.
        for name in r.tensors.keys() {
            let mut rest = r.tensors.clone();
            rest.remove(name);
            let e = message(SparseMoeBlock::from_hf(&r.config, 1, checkpoint(&rest, DType::F32)));
            let part = match name.as_str() {
                // Without a pack of gate and up, experts are looked for one by one.
                "input_linear.weight" => "gate_proj.weight",
                name => name.rsplit('.').nth(1).unwrap_or(name),
            };
            assert!(e.contains(part), "{case} without {name}: {e}");
        }
    }
    Ok(())
}

/// The experts of a block in the packs of transformers 5.
fn packed(
    mut tensors: HashMap<String, Tensor>,
    names: MlpNames,
    experts: usize,
) -> Result<HashMap<String, Tensor>> {
    let mut stack = |matrices: &[&str]| -> Result<Tensor> {
        let expert = |id: usize| {
            let matrix = |name: &&str| tensors.remove(&format!("experts.{id}.{name}.weight")).unwrap();
            Tensor::cat(&matrices.iter().map(matrix).collect::<Vec<_>>(), 0)
        };
        Tensor::stack(&(0..experts).map(expert).collect::<Result<Vec<_>>>()?, 0)
    };
    let gate_up = stack(&[names.gate, names.up])?;
    let down = stack(&[names.down])?;
    tensors.insert("experts.gate_up_proj".to_string(), gate_up);
    tensors.insert("experts.down_proj".to_string(), down);
    Ok(tensors)
}

#[test]
fn packed_experts_have_the_bits_of_experts_one_by_one() -> Result<()> {
    for model_type in model_types().filter(|name| !["llama4_text", "gpt_oss", "granitemoe"].contains(name)) {
        let r = recorded(model_type)?;
        let spec = CheckpointBlock::from_config(&r.config, 1)?;
        let want = spec.load(checkpoint(&r.tensors, DType::F32))?.forward(&r.input)?;
        let mut tensors = packed(r.tensors, spec.names.matrices, spec.options.router.num_experts)?;
        let CorrectionBiasNames { published, packed, .. } = spec.names.correction_bias;
        if let Some(bias) = tensors.remove(published) {
            tensors.insert(packed.to_string(), bias);
        }
        let got = spec.load(checkpoint(&tensors, DType::F32))?.forward(&r.input)?;
        assert_eq!(bits(&got), bits(&want), "{model_type}");
    }
    Ok(())
}

#[test]
fn a_block_is_a_module_whose_clones_share_weights() -> Result<()> {
    let r = recorded("deepseek_v3")?;
    let block = SparseMoeBlock::from_hf(&r.config, 1, checkpoint(&r.tensors, DType::F32))?;
    let want = bits(&block.forward(&r.input)?);
    let modules: Vec<Box<dyn Module + Send + Sync>> = vec![Box::new(block.clone()), Box::new(block.clone())];
    drop(block);
    for module in modules {
        assert_eq!(bits(&module.forward(&r.input)?), want);
    }
    Ok(())
}

#[test]
fn weights_in_rows_have_the_same_bits() -> Result<()> {
    let config = json!({"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 48,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true});
    let spec = CheckpointBlock::from_config(&config, 0)?;
    let mut tensors = HashMap::new();
    let mut put = |name: String, dims: (usize, usize)| -> Result<()> {
        tensors.insert(name, Tensor::randn(0f32, 0.1, dims, &Device::Cpu)?);
        Ok(())
    };
    put("gate.weight".into(), (4, 64))?;
    for expert in 0..4 {
        put(format!("experts.{expert}.gate_proj.weight"), (48, 64))?;
        put(format!("experts.{expert}.up_proj.weight"), (48, 64))?;
        put(format!("experts.{expert}.down_proj.weight"), (64, 48))?;
    }
    let in_rows = BlockContext { cpu_isa: None, ..BlockContext::default() };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (rows, _) = spec.load_on(&in_rows, checkpoint(&tensors, dtype))?;
        let packed = spec.load(checkpoint(&tensors, dtype))?;
        for tokens in [0, 1, 7, 65] {
            let x = Tensor::randn(0f32, 1.0, (tokens, 64), &Device::Cpu)?.to_dtype(dtype)?;
            assert_eq!(bits(&packed.forward(&x)?), bits(&rows.forward(&x)?), "{dtype:?} {tokens}");
        }
    }
    Ok(())
}

#[test]
fn names_of_another_checkpoint_are_data() -> Result<()> {
    let r = recorded("deepseek_v2")?;
    let spec = CheckpointBlock::from_config(&r.config, 1)?;
    let want = spec.load(checkpoint(&r.tensors, DType::F32))?.forward(&r.input)?;
    let rename = |name: &str| {
        let name = name.replace("shared_experts", "common").replace("experts.", "workers.");
        name.replace("gate.weight", "router.weight").replace("up_proj", "u")
    };
    let renamed = r.tensors.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect();
    let mut other = spec.clone();
    other.names.gate = "router";
    other.names.experts = "workers";
    other.names.shared_experts = "common";
    other.names.matrices.up = "u";
    other.names.shared_matrices.up = "u";
    let got = other.load(checkpoint(&renamed, DType::F32))?.forward(&r.input)?;
    assert_eq!(bits(&got), bits(&want));
    Ok(())
}

#[test]
fn every_model_type_of_the_router_has_a_block() {
    let known: Vec<_> = model_types().collect();
    let lacking: Vec<_> = hf::model_types().filter(|model_type| !known.contains(model_type)).collect();
    assert!(lacking.is_empty(), "{lacking:?}");
}

#[test]
fn errors_are_told_apart_by_type() -> Result<()> {
    let r = recorded("qwen3_moe")?;
    let of = |change: Value| {
        let mut config = r.config.clone();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        CheckpointBlock::from_config(&config, 0).unwrap_err()
    };
    let unknown = of(json!({"model_type": "nonsense"}));
    assert!(
        matches!(cause(&unknown), Some(BlockError::UnknownModelType { model_type, .. }) if model_type == "nonsense")
    );
    let missing = of(json!({"hidden_size": null}));
    assert_eq!(cause(&missing), Some(&RouterError::Missing { keys: vec!["hidden_size"] }));
    let quantised = of(json!({"quantization_config": {"quant_method": "nonsense"}}));
    assert!(cause::<QuantError>(&quantised).is_some(), "{quantised}");
    let fp8 = merged(&r.config, &json!({"quantization_config": {"quant_method": "fp8"}}));
    let mut ranks = Geometry::default();
    ranks.moe_tp_size = 2;
    let of_two = BlockContext { geometry: ranks, ..BlockContext::default() };
    let spec = CheckpointBlock::from_config(&fp8, 0)?;
    let refused = spec.load_on(&of_two, checkpoint(&HashMap::new(), DType::F32)).err().unwrap();
    assert!(
        matches!(cause(&refused), Some(BlockError::Unsupported(text)) if text.contains("2 ranks cut")),
        "{refused}"
    );

    let block = SparseMoeBlock::from_hf(&r.config, 1, checkpoint(&r.tensors, DType::F32))?;
    let narrow = Tensor::zeros((3, 19), DType::F32, &Device::Cpu)?;
    let wrong = block.forward(&narrow).unwrap_err();
    assert_eq!(
        wrong.to_string().lines().next().unwrap(),
        "sparse MoE block: expected hidden with dims [.., 20], got [3, 19]"
    );
    assert!(matches!(cause(&wrong), Some(ArgumentError::Dims { name, .. }) if name == "hidden"));
    let wrong = block.forward(&r.input.to_dtype(DType::BF16)?).unwrap_err();
    assert!(matches!(cause(&wrong), Some(ArgumentError::Dtype { got: DType::BF16, .. })), "{wrong}");
    Ok(())
}

#[test]
fn a_block_that_routes_by_token_ids_says_that_it_needs_them() -> Result<()> {
    let r = recorded("deepseek_v4")?;
    let config = merged(&r.config, &json!({"mlp_layer_types": ["hash_moe", "moe"], "vocab_size": 5}));
    let mut tensors = r.tensors.clone();
    tensors.remove("gate.e_score_correction_bias");
    let table: Vec<i64> = (0..15).map(|slot| slot % 8).collect();
    tensors.insert("gate.tid2eid".to_string(), Tensor::from_vec(table, (5, 3), &Device::Cpu)?);
    let block = CheckpointBlock::from_config(&config, 0)?.load(checkpoint(&tensors, DType::F32))?;
    let e = message(block.forward(&r.input));
    assert!(e.contains("carries no token id"), "{e}");
    Ok(())
}

/// A config with some keys replaced.
fn merged(config: &Value, change: &Value) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    config
}

#[test]
fn configs_that_cannot_be_honoured_are_errors_that_say_why() -> Result<()> {
    let config = |change: Value| {
        let mut config = recorded("qwen2_moe").unwrap().config;
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        message(CheckpointBlock::from_config(&config, 0))
    };
    for (change, want) in [
        (json!({"model_type": "nonsense"}), "model_type `nonsense` has no block here"),
        (json!({"model_type": null}), "lacks model_type"),
        (json!({"hidden_act": "tanh"}), "hidden_act `tanh` is not supported; expected silu, gelu"),
        (json!({"shared_expert_intermediate_size": null}), "lacks shared_expert_intermediate_size"),
        (json!({"moe_intermediate_size": "wide"}), "moe_intermediate_size must be a non-negative integer"),
        (json!({"quantization_config": {"quant_method": "nonsense"}}), "nonsense"),
    ] {
        let e = config(change);
        assert!(e.contains(want), "{e}");
    }
    Ok(())
}
