//! Cards without machine code in this build: the kernels that are built as PTX, as the plan chooses them, compared with
//! the CPU.
//!
//! Tests of this program run again in a separate process, with a variable that disables tuned kernels (`ptx_only` in
//! cuda/ptx/common.cuh). The plan then chooses as for a later card, and a launch of any other kernel is an error. The
//! process runs the machine code of the portable kernels. The driver could translate their PTX instead
//! (`CUDA_FORCE_PTX_JIT`), but then it would also do so for cuBLAS, which has no PTX for Hopper.

use std::process::Command;

use candle_core::DType;
use model_runtime::{CausalLm, Exec};
use moe_engine::engine::Engine;
use moe_layer::PlanStep;
use moe_tests::{Schedule, all_logits};

use crate::common::cuda;
use crate::engine::{config, model_on, requests, run};

/// The tests that run again: whole models with both kinds of attention, and every op that has a portable kernel, each
/// compared with the CPU.
const AGAIN: [&str; 20] = [
    "ptx::logits_are_those_of_the_cpu",
    "ptx::an_engine_runs_on_the_kernels_of_its_plan",
    "deepseek::logits_are_those_of_the_cpu",
    "align::groups_and_local_ids_are_the_same",
    "align::batched_rows_go_and_come_back",
    "attention::attention_agrees_on_mixed_steps",
    "attention::attention_agrees_on_decoding_prefill_and_nothing",
    "delta::gated_delta_rules_agree",
    "delta_chunks::chunks_compute_the_rule_of_rows",
    "mla_rows::latents_queries_and_values_agree",
    "mla_rows::rows_of_products_agree",
    "products::dense_products_agree",
    "products::expert_layers_agree_for_every_activation",
    "quant::quantised_packs_mean_the_same_floats",
    "quant::quantised_dense_products_agree",
    "quant::quantised_expert_layers_agree_for_every_scheme",
    "route::every_method_routes_as_on_the_cpu",
    "rows::gathered_rows_are_those_of_the_table",
    "rows::norms_agree",
    "rows::softmax_gates_and_fills_agree",
];

#[test]
fn portable_kernels_compute_as_the_cpu() {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--test-threads", "1", "--exact"]).args(AGAIN).env("MOE_PTX_ONLY", "1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = format!("{} passed", AGAIN.len());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(&passed), "{text}\n{errors}");
}

#[test]
fn logits_are_those_of_the_cpu() {
    let prompts: Vec<Vec<u32>> = (1..5).map(|n| (0..n * 17).map(|i| i * 11 % 1000).collect()).collect();
    for chunk in [8, 100] {
        let schedule = Schedule { chunk, block_size: 16, together: true };
        let logits = |mut ex: Exec| {
            all_logits(&model_on(DType::F32, ex.device()), &prompts, schedule, &mut ex).unwrap().concat()
        };
        let want = logits(Exec::cpu());
        let got = logits(cuda());
        let largest = want.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        let off = want.iter().zip(&got).fold(0f32, |most, (w, g)| most.max((w - g).abs()));
        assert!(off < 1e-4 * largest, "chunks of {chunk}: off by {off} of {largest}");
    }
}

/// Runs the engine in bf16: decoding and prompts in one step, and sampling on the host if the card has no clusters.
#[test]
fn an_engine_runs_on_the_kernels_of_its_plan() {
    let ex = cuda();
    let model = model_on(DType::BF16, ex.device());
    let mut engine = Engine::new(&model, ex.clone(), None, &config(9, false)).unwrap();
    let tokens = run(&mut engine, requests(9, 12));
    assert!(tokens.iter().all(|tokens| tokens.len() == 12) && tokens[0] != tokens[1], "{tokens:?}");
    let gpu = ex.machine().gpu.unwrap();
    let kernels = |step: PlanStep| -> Vec<String> {
        let layers = model.plan(&step, &ex.machine());
        let stages = layers.iter().flat_map(|layer| layer.attention.iter().chain(&layer.mlp));
        stages.map(|stage| stage.kernel.clone()).collect()
    };
    let all = [PlanStep::decode(1), PlanStep::decode(64), PlanStep::prompts(600)].map(kernels).concat();
    let products = all.iter().filter(|kernel| kernel.starts_with("any_")).count();
    match gpu.tuned {
        Some(_) => assert!(engine.num_graph_steps() > 0),
        None => {
            assert_eq!(engine.num_graph_steps(), 0);
            let tuned =
                ["_stream", "_tensor", "gate_route", "attention_decode", "attention_prefill", "cublas"];
            assert!(products > 0, "{all:?}");
            assert!(all.iter().all(|kernel| !tuned.iter().any(|name| kernel.contains(name))), "{all:?}");
        }
    }
}
