//! Compares from_hf and routing with the routers of transformers (`make_transformers.py`).

use std::sync::Arc;

use moe_router::candle::{Device, Result, Tensor};
use moe_router::{Exec, Router, RouterConfig, RouterParams, Selection, StepContext, hf};
use serde_json::{Value, json};

use crate::{absent, rows};

const REFERENCE: &str = include_str!("../transformers.json");

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(floats).collect(),
        other => vec![other.as_f64().unwrap_or(f64::NAN) as f32],
    }
}

/// Returns the case's router: that of the first layer for hash cases, and of the last layer for the others.
fn build(case: &Value) -> Result<Router> {
    let hash = case.get("table").is_some();
    let config = RouterConfig::from_hf_layer(&case["config"], usize::from(!hash))?;
    let mut params = RouterParams::default();
    if config.correction_bias {
        params.correction_bias = Some(Tensor::new(floats(&case["bias"]), &Device::Cpu)?);
    }
    if let Selection::Hash { vocab_size } = config.selection {
        let table: Vec<i64> = floats(&case["table"]).iter().map(|&x| x as i64).collect();
        params.hash_table = Some(Tensor::from_vec(table, (vocab_size, config.top_k), &Device::Cpu)?);
    }
    Router::new(config, params)
}

#[test]
fn routers_of_transformers() -> Result<()> {
    let cases: Vec<Value> = serde_json::from_str(REFERENCE).expect("the reference");
    assert_eq!(cases.len(), 21);
    for case in &cases {
        let name = &case["name"];
        let router = build(case)?;
        let config = router.config();
        let mut context = StepContext::default();
        if case.get("tokens").is_some() {
            context.token_ids =
                Some(floats(&case["tokens"]).iter().map(|&t| t as u32).collect::<Arc<[u32]>>());
        }
        let logits = Tensor::from_vec(floats(&case["logits"]), (5, 16), &Device::Cpu)?;
        let routed = router.route_step(&logits, None, 0, &mut context, &mut Exec::cpu())?;
        let zero = routed.zero_expert_weights.as_ref().map(Tensor::to_vec1::<f32>).transpose()?;
        for (t, (ids, weights)) in rows(&routed)?.into_iter().enumerate() {
            let mut want: Vec<(u32, f32)> =
                floats(&case["ids"][t]).iter().map(|&i| i as u32).zip(floats(&case["weights"][t])).collect();
            let identity: f32 =
                want.iter().filter(|(id, _)| *id as usize >= config.num_experts).map(|(_, w)| w).sum();
            want.retain(|(id, _)| (*id as usize) < config.num_experts);
            let mut got: Vec<(u32, f32)> =
                ids.into_iter().zip(weights).filter(|(id, _)| !absent(*id)).collect();
            got.sort_by_key(|(id, _)| *id);
            want.sort_by_key(|(id, _)| *id);
            assert_eq!(got.len(), want.len(), "{name} row {t}: {got:?} {want:?}");
            for ((id, w), (want_id, want_w)) in got.iter().zip(&want) {
                assert_eq!(id, want_id, "{name} row {t}: {got:?} {want:?}");
                assert!((w - want_w).abs() <= 2e-6 * want_w, "{name} row {t} expert {id}: {w} {want_w}");
            }
            let zero = zero.as_ref().map_or(0.0, |z| z[t]);
            assert!((zero - identity).abs() <= 2e-6 * identity, "{name} row {t}: {zero} {identity}");
        }
    }
    Ok(())
}

#[test]
fn missing_keys_get_the_defaults_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(REFERENCE).expect("the reference");
    for case in &cases {
        // deepseek_v2 and dots1 have no default for some sizes, so both sides get them.
        let mut spelled_out = case["defaults"].clone();
        let mut minimal = json!({ "model_type": spelled_out["model_type"] });
        for (key, value) in [("num_experts_per_tok", 4), ("n_routed_experts", 8)] {
            if spelled_out.get(key).is_some_and(Value::is_null) {
                spelled_out[key] = json!(value);
                minimal[key] = json!(value);
            }
        }
        let want = RouterConfig::from_hf(&spelled_out).expect("spelled out");
        assert_eq!(RouterConfig::from_hf(&minimal).expect("minimal"), want, "{}", case["name"]);
    }
}

/// The model types whose modelling code names `gate.weight` in `_keep_in_fp32_modules_strict`, in transformers 5.24.
#[test]
fn gates_in_f32_are_those_that_transformers_keeps_so() {
    let keeps = |model_type: &&str| {
        let config = json!({"model_type": model_type, "n_routed_experts": 256, "num_experts_per_tok": 1});
        RouterConfig::from_hf(&config).expect("a model type").f32_gate
    };
    let kept: Vec<&str> = hf::model_types().filter(keeps).collect();
    let expected = [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4v_moe_text",
        "solar_open",
        "glm_moe_dsa",
        "exaone_moe",
        "glm4_moe_lite",
        "dots1",
        "ernie4_5_moe",
    ];
    assert_eq!(kept, expected);
}
