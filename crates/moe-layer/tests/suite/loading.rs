//! Loads blocks and shared experts from checkpoints.

use std::collections::HashMap;

use candle_nn::VarBuilder;
use moe_layer::candle::{Result, Tensor};
use moe_layer::{
    Activation, BlockContext, BlockOptions, DType, Device, GatedMlp, MlpNames, MoePath, NoEp, RouterConfig,
    SharedExperts, SparseMoeBlock, load_block, load_block_on, load_layer_on,
};

use crate::reference::{Problem, Shared, example, problem};
use crate::{bits, message};

/// Returns a checkpoint of the problem: gate, per-expert tensors and shared experts under their usual names.
pub fn checkpoint(p: &Problem) -> Result<HashMap<String, Tensor>> {
    let h = p.hidden;
    let i = p.width;
    let mut tensors = HashMap::from([("mlp.gate.weight".to_string(), p.gate_weight()?)]);
    let mut put_mlp = |prefix: String, w13: &Tensor, w2: &Tensor, i: usize| -> Result<()> {
        tensors.insert(format!("{prefix}.gate_proj.weight"), w13.narrow(0, 0, i)?.copy()?);
        tensors.insert(format!("{prefix}.up_proj.weight"), w13.narrow(0, i, i)?.copy()?);
        tensors.insert(format!("{prefix}.down_proj.weight"), w2.clone());
        Ok(())
    };
    let weights = p.weights()?;
    let w13 = weights.w13().to_tensor()?;
    let w2 = weights.w2().to_tensor()?;
    for e in 0..p.packed() {
        put_mlp(format!("mlp.experts.{e}"), &w13.get(e)?, &w2.get(e)?.copy()?, i)?;
    }
    if let Some(Shared { width, w13, w2, gate }) = &p.shared {
        let w13 = p.tensor(w13, &[2 * width, h])?;
        put_mlp("mlp.shared_expert".into(), &w13, &p.tensor(w2, &[h, *width])?, *width)?;
        if let Some(gate) = gate {
            tensors.insert("mlp.shared_expert_gate.weight".into(), p.tensor(gate, &[1, h])?);
        }
    }
    Ok(tensors)
}

pub fn options(p: &Problem) -> BlockOptions {
    BlockOptions {
        router: p.config.clone(),
        hidden_size: p.hidden,
        intermediate_size: p.width,
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    }
}

fn vb(p: &Problem) -> Result<VarBuilder<'static>> {
    Ok(VarBuilder::from_tensors(checkpoint(p)?, p.dtype, &Device::Cpu).pp("mlp"))
}

#[test]
fn a_loaded_block_has_the_bits_of_one_from_tensors() -> Result<()> {
    let config = example(DType::F32).config;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for shared in [None, Some((7, false)), Some((7, true))] {
            let p = problem((6, 21, 10, 4), config.clone(), shared, dtype, 11);
            let vb = vb(&p)?;
            let (mut block, selection) = load_block(&options(&p), vb.pp("gate"), vb.pp("experts"))?;
            assert_eq!(selection.chosen.name(), "cpu");
            if let Some((width, gated)) = shared {
                let gate = gated.then(|| vb.pp("shared_expert_gate"));
                let mlp = vb.pp("shared_expert");
                let shared = SharedExperts::load(p.hidden, width, Activation::SwiGlu, mlp, gate)?;
                assert_eq!((shared.hidden_size(), shared.dtype()), (p.hidden, dtype));
                block = block.with_shared_experts(shared)?;
            }
            assert_eq!(bits(&block.forward(&p.rows()?)?), bits(&p.standard()?.forward(&p.rows()?)?));
        }
    }
    Ok(())
}

/// A gate in f32 keeps its digits on both paths where the router's configuration says so, and is rounded otherwise.
#[test]
fn digits_of_a_gate_choose_experts_where_the_model_keeps_them() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let p = problem((6, 21, 10, 16), example(DType::F32).config, None, dtype, 11);
        // Rows of two experts each are equal in 16 bits.
        let digits = Tensor::new(&[[1f32], [1.0 + 1e-4]], &Device::Cpu)?.repeat((3, 1))?;
        let pairs = p
            .gate_weight()?
            .to_dtype(DType::F32)?
            .index_select(&Tensor::new(&[0u32, 0, 2, 2, 4, 4], &Device::Cpu)?, 0)?;
        let gate = pairs.broadcast_mul(&digits)?;
        let mut tensors = checkpoint(&p)?;
        tensors.insert("mlp.gate.weight".into(), gate.clone());
        let vb = VarBuilder::from_tensors(tensors, dtype, &Device::Cpu).pp("mlp");
        let loaded = |path, f32_gate| -> Result<Vec<u32>> {
            let router = RouterConfig { f32_gate, ..p.config.clone() };
            let options = BlockOptions { router, ..options(&p) };
            let context = BlockContext::default();
            let (block, _) = load_layer_on(path, &options, &context, vb.pp("gate"), vb.pp("experts"))?;
            Ok(bits(&block.forward(&p.rows()?)?))
        };
        let made = |gate: Tensor| -> Result<Vec<u32>> {
            let prepare = Box::new(NoEp::new());
            let block = SparseMoeBlock::new(gate, p.router()?, prepare, p.standard_experts()?, 0)?;
            Ok(bits(&block.forward(&p.rows()?)?))
        };
        let exact = made(gate.clone())?;
        let rounded = made(gate.to_dtype(dtype)?)?;
        assert!(exact != rounded, "{dtype:?}");
        for path in [MoePath::Fused, MoePath::Legacy] {
            assert!(loaded(path, true)? == exact, "{path:?} {dtype:?}");
            assert!(loaded(path, false)? == rounded, "{path:?} {dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn the_router_weight_on_the_input_reaches_the_loaded_block() -> Result<()> {
    let config =
        moe_layer::RouterConfig { apply_router_weight_on_input: true, ..moe_layer::RouterConfig::new(6, 1) };
    let p = problem((6, 21, 10, 4), config, None, DType::F32, 11);
    let (block, _) = load_block(&options(&p), vb(&p)?.pp("gate"), vb(&p)?.pp("experts"))?;
    assert_eq!(bits(&block.forward(&p.rows()?)?), bits(&p.standard()?.forward(&p.rows()?)?));
    Ok(())
}

#[test]
fn what_is_missing_is_named() -> Result<()> {
    let p = problem((6, 21, 10, 4), example(DType::F32).config, Some((7, true)), DType::F32, 11);
    let without = |name: &str| -> Result<VarBuilder<'static>> {
        let mut tensors = checkpoint(&p)?;
        assert!(tensors.remove(name).is_some(), "{name}");
        Ok(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("mlp"))
    };
    for name in ["mlp.gate.weight", "mlp.experts.3.up_proj.weight", "mlp.experts.0.down_proj.weight"] {
        let vb = without(name)?;
        let e = message(load_block(&options(&p), vb.pp("gate"), vb.pp("experts")));
        assert!(e.contains(name), "{e}");
    }
    for name in ["gate_proj", "up_proj", "down_proj"] {
        let name = format!("mlp.shared_expert.{name}.weight");
        let vb = without(&name)?;
        let act = Activation::SwiGlu;
        let gate = Some(vb.pp("shared_expert_gate"));
        let e = message(SharedExperts::load(p.hidden, 7, act, vb.pp("shared_expert"), gate));
        assert!(e.contains(&name), "{e}");
    }
    let vb = without("mlp.shared_expert_gate.weight")?;
    let gate = Some(vb.pp("shared_expert_gate"));
    let e = message(SharedExperts::load(p.hidden, 7, Activation::SwiGlu, vb.pp("shared_expert"), gate));
    assert!(e.contains("mlp.shared_expert_gate.weight"), "{e}");
    // The checkpoint does not have this size.
    let e = message(GatedMlp::load(p.hidden, 8, Activation::SwiGlu, vb.pp("shared_expert")));
    assert!(e.contains("gate_proj"), "{e}");
    let other = BlockOptions { backend: Some("cpu_batched".into()), ..options(&p) };
    let e = message(load_block(&other, vb.pp("gate"), vb.pp("experts")));
    assert!(e.contains("cpu_batched"), "{e}");
    Ok(())
}

#[test]
fn an_mlp_of_dense_layers_runs_alone() -> Result<()> {
    let p = problem((6, 21, 10, 4), example(DType::F32).config, Some((7, false)), DType::F32, 11);
    let mlp = GatedMlp::load(p.hidden, 7, Activation::SwiGlu, vb(&p)?.pp("shared_expert"))?;
    assert_eq!((mlp.hidden_size(), mlp.intermediate_size(), mlp.dtype()), (21, 7, DType::F32));
    // The whole block is this routed part plus the shared experts.
    let routed = Problem { shared: None, ..p.clone() };
    let sum = (routed.standard()?.forward(&p.rows()?)? + mlp.forward(&p.rows()?)?)?;
    assert_eq!(bits(&sum), bits(&p.standard()?.forward(&p.rows()?)?));
    let none = Tensor::zeros((0, 21), DType::F32, &Device::Cpu)?;
    assert_eq!(mlp.forward(&none)?.dims(), [0, 21]);
    Ok(())
}

/// There are no experts here, so an error about the settings or the gate came before they were looked for.
#[test]
fn faults_are_found_before_experts_are_read() -> Result<()> {
    let gate = Tensor::zeros((4, 8), DType::F32, &Device::Cpu)?;
    let tensors = HashMap::from([("gate.weight".to_string(), gate)]);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let router = |top_k| RouterConfig::new(4, top_k);
    let plain = BlockOptions::new(router(2), 8, 6);
    let said = |options: &BlockOptions| {
        let e = message(load_block(options, vb.pp("gate"), vb.pp("experts")));
        e.lines().next().unwrap_or_default().to_string()
    };
    let missing = said(&plain);
    assert!(missing.contains("experts.3.gate_proj.weight"), "{missing}");
    for (options, want) in [
        (BlockOptions::new(router(5), 8, 6), "top_k = 5 exceeds the 4 experts of the router"),
        (BlockOptions::new(router(2), 8, 0), "`intermediate_size`: expected at least 1, got 0"),
        (BlockOptions::new(router(2), 9, 6), "shape mismatch"),
        (BlockOptions::new(router(2), usize::MAX, 6), "overflow"),
        (
            BlockOptions { activation: Activation::ClampedSwiGlu { limit: 0. }, ..plain.clone() },
            "clamped_swiglu: expected limit to be above 0, got 0",
        ),
        (BlockOptions { backend: Some("warp".to_string()), ..plain.clone() }, "unknown MoE backend \"warp\""),
        (
            BlockOptions::new(RouterConfig { correction_bias: true, ..router(2) }, 8, 6),
            "`gate.e_score_correction_bias`",
        ),
        (
            BlockOptions::new(RouterConfig { num_fused_shared_experts: usize::MAX, ..router(2) }, 8, 6),
            "expert ids can name",
        ),
    ] {
        let got = said(&options);
        assert!(got.contains(want), "expected {want}, got {got}");
    }
    Ok(())
}

/// Tensors of other methods under the block's prefixes are reported by name and not ignored.
#[test]
fn what_a_block_would_not_read_is_refused() -> Result<()> {
    let p = problem((6, 21, 10, 4), example(DType::F32).config, Some((7, true)), DType::F32, 11);
    assert!(!p.config.correction_bias);
    let with = |name: &str, value: f32| -> Result<VarBuilder<'static>> {
        let mut tensors = checkpoint(&p)?;
        tensors.insert(name.to_string(), Tensor::full(value, 6, &Device::Cpu)?);
        Ok(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu).pp("mlp"))
    };
    let block = |vb: &VarBuilder| load_block(&options(&p), vb.pp("gate"), vb.pp("experts"));
    let last = p.packed() - 1;
    for name in [
        "mlp.gate.bias",
        "mlp.gate.e_score_correction_bias",
        "mlp.gate.tid2eid",
        "mlp.gate.weight_scale_inv",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
        "mlp.experts.0.gate_proj.bias",
        &format!("mlp.experts.{last}.down_proj.bias"),
        &format!("mlp.experts.{last}.up_proj.weight_scale"),
        &format!("mlp.experts.{}.gate_proj.weight", last + 1),
    ] {
        let e = message(block(&with(name, 0.5)?));
        assert!(e.contains(name) && e.contains("does not read"), "{name}: {e}");
    }
    // A bias of zeros adds nothing.
    let want = bits(&p.clone().standard()?.forward(&p.rows()?)?);
    for name in ["mlp.gate.bias", "mlp.experts.1.up_proj.bias"] {
        let plain = Problem { shared: None, ..p.clone() };
        let got = block(&with(name, 0.0)?)?.0.forward(&p.rows()?)?;
        assert_eq!(bits(&got), bits(&plain.standard()?.forward(&p.rows()?)?), "{name}");
        assert_ne!(bits(&got), want, "the problem has shared experts");
    }
    let shared = |vb: &VarBuilder| {
        let gate = Some(vb.pp("shared_expert_gate"));
        SharedExperts::load(p.hidden, 7, Activation::SwiGlu, vb.pp("shared_expert"), gate)
    };
    for name in ["mlp.shared_expert.down_proj.bias", "mlp.shared_expert_gate.bias"] {
        let e = message(shared(&with(name, 0.5)?));
        assert!(e.contains(name), "{e}");
        assert!(shared(&with(name, 0.0)?).is_ok());
    }
    Ok(())
}

#[test]
fn experts_under_the_names_of_mixtral_have_the_same_bits() -> Result<()> {
    let p = problem((6, 21, 10, 4), example(DType::F32).config, None, DType::F32, 11);
    let (want, _) = load_block(&options(&p), vb(&p)?.pp("gate"), vb(&p)?.pp("experts"))?;
    let renamed = checkpoint(&p)?.into_iter().map(|(name, tensor)| {
        let name = name.replace("mlp.", "block_sparse_moe.");
        (name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"), tensor)
    });
    let renamed: HashMap<_, _> = renamed.collect();
    let vb = |tensors| VarBuilder::from_tensors(tensors, p.dtype, &Device::Cpu).pp("block_sparse_moe");
    let load = |tensors, names| {
        let vb = vb(tensors);
        let context = BlockContext { names, ..BlockContext::default() };
        load_block_on(&options(&p), &context, vb.pp("gate"), vb.pp("experts"))
    };
    let (got, _) = load(renamed.clone(), MlpNames::MIXTRAL)?;
    let x = p.rows()?;
    assert_eq!(bits(&got.forward(&x)?), bits(&want.forward(&x)?));
    // Tensors with the usual names are missing, and biases are refused under the names of the other scheme.
    assert!(message(load(renamed.clone(), MlpNames::USUAL)).contains("experts.5.gate_proj.weight"));
    let mut biased = renamed;
    biased.insert("block_sparse_moe.experts.2.w3.bias".into(), Tensor::ones(p.width, p.dtype, &Device::Cpu)?);
    assert!(message(load(biased, MlpNames::MIXTRAL)).contains("block_sparse_moe.experts.2.w3.bias"));
    Ok(())
}
