//! What the plan counts, and what it says of memory that is too small.

use model_runtime::KvLayout;

use super::*;

const GIB: u64 = 1 << 30;

/// Approximately the footprint of Qwen3-30B-A3B in bf16.
fn footprint() -> Footprint {
    let weights = 57 * GIB;
    let copies = GIB;
    let experts = 54 * GIB;
    let floats = 55 * GIB;
    Footprint { weights, copies, experts, floats, float_size: 2, stored: None, ranks: 1 }
}

fn refused(footprint: &Footprint, free: u64, place: &Place) -> String {
    let error = footprint.check_weights(free, place).unwrap_err();
    assert!(error.downcast_ref::<crate::UsageError>().is_some(), "{error}");
    error.to_string()
}

#[test]
fn weights_that_do_not_fit_name_what_would() {
    let footprint = footprint();
    let cpu = Place::default();
    assert!(footprint.check_weights(58 * GIB, &cpu).is_ok());
    let error = refused(&footprint, 24 * GIB, &cpu);
    let expected = "the weights need 57.00 GiB of memory, and 1.00 GiB more while they are loaded, but 24.00 GiB are \
                    available; what would fit: a checkpoint quantised to 4 bits, about 16.18 GiB; leave out this check (`check_memory`)";
    assert!(error.starts_with(expected), "{error}");
    assert!(
        refused(&footprint, 40 * GIB, &cpu).contains("8 bits, about 29.93 GiB; a checkpoint quantised to 4")
    );
    assert!(refused(&footprint, 2 * GIB, &cpu).contains("no form of it that this program knows fits"));
    let dequantised = Footprint { stored: Some(16 * GIB), ..footprint.clone() };
    let error = refused(&dequantised, 24 * GIB, &cpu);
    assert!(error.contains("as they are stored, about 16.00 GiB: leave out `dequantise`"), "{error}");
    let wide = Footprint { float_size: 4, ..footprint };
    assert!(refused(&wide, 40 * GIB, &cpu).contains("`dtype` bf16, about 28.50 GiB"));
}

#[test]
fn a_gpu_has_host_memory_and_other_gpus() {
    let gpu = Place { on_gpu: true, host_free: Some(100 * GIB), gpus: 4, ..Place::default() };
    assert!(footprint().check_weights(57 * GIB, &gpu).is_ok(), "packs are not copied there");
    let error = refused(&footprint(), 24 * GIB, &gpu);
    assert!(error.contains("need 57.00 GiB of GPU memory, but 24.00 GiB are available"), "{error}");
    assert!(error.contains("`expert_offload` 34") && error.contains("`tp` 4"), "{error}");
    let offloading = Place { offload: 34 * GIB, ..gpu.clone() };
    assert!(footprint().check_weights(24 * GIB, &offloading).is_ok());
    assert!(refused(&footprint(), 20 * GIB, &offloading).contains("`expert_offload` 38"));
    let alone = Place { host_free: Some(10 * GIB), gpus: 1, ..gpu };
    let error = refused(&footprint(), 24 * GIB, &alone);
    assert!(!error.contains("`expert_offload`") && !error.contains("`tp`"), "{error}");
}

#[test]
fn a_cache_has_room_next_to_the_weights() {
    let kv = KvLayout { num_kv_heads: 4, head_dim: 128, value_dim: Some(128), dtype: DType::BF16 };
    let states = kv.layers(48);
    let sizes = StepSizes { max_context_len: 40_960, vocab_size: 151_936, hidden_size: 2048 };
    let check = |engine: &EngineConfig, free| {
        footprint().check_cache(free, &states, &sizes, engine, &Place::default())
    };
    let asked = EngineConfig { kv_cache_memory: Some(8 << 30), ..EngineConfig::default() };
    assert!(check(&asked, 70 * GIB).is_ok());
    let error = check(&asked, 64 * GIB).unwrap_err().to_string();
    assert!(error.contains("`kv_cache_memory` needs 8589") && error.contains("have room for"), "{error}");
    let long = EngineConfig { max_model_len: Some(40_960), ..EngineConfig::default() };
    assert!(check(&long, 70 * GIB).is_ok());
    let error = check(&long, 60 * GIB).unwrap_err().to_string();
    assert!(error.contains("ask for shorter ones (`max_model_len`"), "{error}");
    assert!(
        check(&EngineConfig::default(), 60 * GIB).is_ok(),
        "a cache without a set size takes the memory that is left"
    );
}

#[test]
fn a_gate_that_keeps_its_digits_is_counted_in_f32() {
    let bytes = |dtype, exact: &[&str]| {
        let mut layout = TensorLayout::new(&Geometry::default());
        layout.whole("gate.weight", &[4, 8]);
        layout.whole("norm.weight", &[8]);
        layout.exact.extend(exact.iter().map(|name| name.to_string()));
        let mut footprint = Footprint::default();
        footprint.add(&layout, None, None, 1.0, dtype).unwrap();
        (footprint.weights, footprint.copies)
    };
    assert_eq!(bytes(DType::BF16, &[]), (2 * (32 + 8), 2 * 32));
    assert_eq!(bytes(DType::BF16, &["gate.weight"]), (4 * 32 + 2 * 8, 4 * 32));
    assert_eq!(bytes(DType::F32, &["gate.weight"]), (4 * (32 + 8), 4 * 32));
}

#[test]
fn routers_and_embeddings_stay_floats() {
    for (name, quantised) in [
        ("model.layers.0.mlp.experts.3.up_proj.weight", true),
        ("model.layers.0.mlp.gate.weight", false),
        ("model.layers.0.self_attn.q_proj.weight", true),
        ("model.embed_tokens.weight", false),
        ("lm_head.weight", false),
    ] {
        assert_eq!(is_quantisable(name, &[8, 8]), quantised, "{name}");
    }
    assert!(!is_quantisable("model.layers.0.input_layernorm.weight", &[8]));
}
