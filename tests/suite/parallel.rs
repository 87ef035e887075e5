//! Numerics invariant 4 on whole models: any tensor, data and expert parallelism, any backend and
//! any chunk size give the bits of one rank.

use candle_core::DType;
use model_runtime::MlaForm;
use moe_comm::ParallelConfig;
use moe_layer::MoePath;

use crate::geometries::{Case, Origin, backends, check, one_rank};

/// Checkpoints with uneven experts, dense layers, biases, packed and tied weights, and the trained one.
const QWEN: [&str; 10] = [
    "f32",
    "base",
    "narrow-experts",
    "mlp-only-layers",
    "packed",
    "tied",
    "top-1",
    "attention-bias",
    "all-experts",
    "embedded",
];

/// Routing by groups, queries with and without a latent, dense layers between sparse ones, biases, no
/// shared experts, packed and tied weights, sizes that no tensor parallelism cuts.
const DEEPSEEK: [&str; 11] = [
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-attention-bias",
    "deepseek-layer-freq",
    "deepseek-no-shared-saved",
    "deepseek-packed-hub",
    "deepseek-tied",
    "deepseek-sigmoid",
    "deepseek-norm-topk",
    "deepseek-odd-sizes",
    WIDE,
];

/// Experts that four ranks can cut, of random weights.
const WIDE: &str = r#"{
    "model_type": "deepseek_v2", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 24,
    "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 12,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 10,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 5, "topk_group": 2,
    "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5, "max_position_embeddings": 512
}"#;

/// Expert names that only Mixtral has, experts stored one by one and packed, and a window.
const MIXTRAL: [&str; 4] = ["mixtral", "mixtral-window", "mixtral-packed", "mixtral-minimal-config"];

/// Norms over all heads, which ranks compute together: with as many key heads as query heads, and with fewer key heads
/// than ranks; and biases.
const OLMOE: [&str; 5] =
    ["olmoe", "olmoe-grouped", "olmoe-attention-bias", "olmoe-packed", "olmoe-minimal-config"];

/// Windows in some layers, and a shared expert with a gate.
const QWEN2: [&str; 4] = ["qwen2", "qwen2-windows", "qwen2-layer-types", "qwen2-packed"];

/// Heads of which only a part is rotated: with biases, with norms of heads, and with a quarter rotated; and a
/// correction bias.
const GLM4: [&str; 4] = ["glm4", "glm4-qk-norm", "glm4-quarter", "glm4-packed"];

/// DeepSeek-V3's network with and without a query latent, without groups or shared experts, and with biases; and
/// GLM-4.7-Flash's network.
const DEEPSEEK_V3: [&str; 4] = ["deepseek3", "deepseek3-moonlight", "deepseek3-plain", "deepseek3-packed"];
const KIMI: [&str; 1] = ["kimi"];
const GLM4_LITE: [&str; 3] = ["glm4-lite", "glm4-lite-groups", "glm4-lite-packed"];

/// Norms over all heads, of which only a part is rotated; and a correction bias that is stored outside of the gate.
const MINIMAX: [&str; 3] = ["minimax", "minimax-plain", "minimax-packed"];

/// Heads whose neighbouring dimensions are rotated together; and a correction bias that is stored as a row.
const ERNIE: [&str; 3] = ["ernie", "ernie-interval", "ernie-packed"];

/// Two ranks can cut each of these models, and four ranks can cut the first one.
const GPT_OSS: [&str; 3] = ["gpt-oss", "gpt-oss-plain", "gpt-oss-minimal-config"];

/// Linear attention, whose heads and states are cut over ranks, with its input product stored in both ways; attention
/// with an output gate; and a shared expert with a gate.
const LINEAR: [&str; 2] = ["qwen3-next", "qwen3_5"];

/// Every geometry, backend and chunk size in both dtypes, each on one of the models in turn.
fn qwen(dtype: DType) -> Vec<Case> {
    let all =
        backends().into_iter().flat_map(|p| [None, Some(1), Some(7), Some(256)].map(|chunk| (p, chunk)));
    let turn = usize::from(dtype == DType::BF16);
    let case = |(i, (parallel, chunk))| Case {
        chunk,
        ..Case::new(QWEN[(i * 3 + i / 4 + turn) % QWEN.len()], dtype, parallel)
    };
    all.enumerate().map(case).collect()
}

/// Every geometry, backend and chunk size on both expert paths and in both forms of attention, each on
/// the next model that the geometry can cut; dtypes take turns.
fn deepseek() -> Vec<Case> {
    let mut models = DEEPSEEK.map(|name| (name, Origin::open(name)));
    let mut cases = Vec::new();
    for parallel in backends() {
        for chunk in [None, Some(1), Some(7)] {
            for path in [MoePath::Legacy, MoePath::Fused] {
                for form in [MlaForm::Absorbed, MlaForm::Naive] {
                    let next = models.iter().position(|(_, origin)| origin.fits(&parallel)).unwrap();
                    models[next..].rotate_left(1);
                    let model = models[DEEPSEEK.len() - 1].0;
                    let dtype = if cases.len() % 5 < 2 { DType::BF16 } else { DType::F32 };
                    let case = Case::new(model, dtype, parallel);
                    cases.push(Case { chunk, path: Some(path), mla: Some(form), ..case });
                }
            }
        }
    }
    cases
}

fn check_qwen(dtype: DType) {
    let cases = qwen(dtype);
    let seen = check(&cases);
    assert!(cases.len() >= 150 && seen.len() == QWEN.len(), "{} cases, {seen:?}", cases.len());
}

#[test]
fn any_geometry_backend_and_chunk_gives_the_bits_of_one_rank_in_f32() {
    check_qwen(DType::F32);
}

#[test]
fn any_geometry_backend_and_chunk_gives_the_bits_of_one_rank_in_bf16() {
    check_qwen(DType::BF16);
}

#[test]
fn any_geometry_path_and_form_of_latent_attention_gives_the_bits_of_one_rank() {
    let cases = deepseek();
    let seen = check(&cases);
    assert!(cases.len() >= 500 && seen.len() == DEEPSEEK.len(), "{} cases, {seen:?}", cases.len());
}

/// Two and four ranks, with parts of experts and with whole ones, in both dtypes; each model in each of them that can
/// cut it.
fn over_ranks(models: &[&'static str]) -> Vec<Case> {
    let sizes =
        [(2, 1), (4, 1), (2, 2)].map(|(tp, dp)| ParallelConfig { tp, dp, ..ParallelConfig::default() });
    let expert = |p: ParallelConfig| ParallelConfig { enable_expert_parallel: true, ..p };
    let ways: Vec<_> = sizes.into_iter().flat_map(|p| [p, expert(p)]).collect();
    let mut cases = Vec::new();
    for model in models {
        let origin = Origin::open(model);
        for parallel in ways.iter().filter(|parallel| origin.fits(parallel)) {
            cases.extend([DType::F32, DType::BF16].map(|dtype| Case::new(model, dtype, *parallel)));
        }
    }
    cases
}

#[test]
fn norms_over_all_heads_and_names_of_another_scheme_give_the_bits_of_one_rank() {
    let models = [&MIXTRAL[..], &OLMOE].concat();
    let cases = over_ranks(&models);
    assert!(cases.iter().any(|case| case.parallel.tp == 4 && case.model == "olmoe-grouped"));
    assert_eq!(check(&cases).len(), models.len());
}

#[test]
fn windows_of_some_layers_and_heads_rotated_in_part_give_the_bits_of_one_rank() {
    let models = [QWEN2, GLM4].concat();
    let cases = over_ranks(&models);
    assert!(
        models.iter().all(|model| cases.iter().any(|case| case.model == *model && case.parallel.tp == 4))
    );
    assert_eq!(check(&cases).len(), models.len());
}

#[test]
fn families_that_choose_experts_with_a_correction_bias_give_the_bits_of_one_rank() {
    let models = [&DEEPSEEK_V3[..], &KIMI, &GLM4_LITE, &MINIMAX, &ERNIE].concat();
    let cases = over_ranks(&models);
    assert!(
        models.iter().all(|model| cases.iter().any(|case| case.model == *model && case.parallel.tp == 4))
    );
    assert_eq!(check(&cases).len(), models.len());
}

#[test]
fn sinks_and_biases_of_experts_give_the_bits_of_one_rank() {
    let cases = over_ranks(&GPT_OSS);
    assert!(cases.iter().any(|case| case.model == "gpt-oss" && case.parallel.tp == 4));
    assert!(GPT_OSS.iter().all(|model| cases.iter().any(|case| case.model == *model)));
    assert_eq!(check(&cases).len(), GPT_OSS.len());
}

#[test]
fn linear_attention_gives_the_bits_of_one_rank() {
    let cases = over_ranks(&LINEAR);
    assert!(
        LINEAR.iter().all(|model| cases.iter().any(|case| case.model == *model && case.parallel.tp == 4))
    );
    assert_eq!(check(&cases).len(), LINEAR.len());
}

#[test]
fn the_comparison_can_fail() {
    let case = |model| Case::new(model, DType::F32, ParallelConfig::default());
    let a = one_rank(&case("f32"));
    let b = one_rank(&case("base"));
    assert!(a.0 != b.0 && a.1 != b.1);
    assert_eq!(a.1.len(), 19 + 1 + 2 + 3);
    assert!(a.0.iter().all(|d| d.routed.is_some() && !d.logprobs.is_empty() && d.prompt_logprobs.is_some()));
    let naive = Case { mla: Some(MlaForm::Naive), ..case("deepseek-v2") };
    let a = one_rank(&case("deepseek-v2"));
    let b = one_rank(&naive);
    assert!(a.1 != b.1, "the forms round at other places");
}
