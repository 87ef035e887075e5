//! The explanations are correct on several GPUs, with sums by NCCL and over peer memory.

use candle_core::{DType, Result};
use model_families::ALL;
use model_runtime::{
    BlockContext, CausalLm, Config, DummyWeights, Exec, Geometry, ParallelGroups, RankView, StepContext,
};
use moe_comm::{Communicator, DeepEpMode, EpBackend, NcclComm, ParallelConfig};
use moe_engine::LoadOptions;
use moe_tests::explained::expect_explained;

use super::{LIMIT, run_nccl_ranks};
use crate::deepseek::CONFIG as DEEPSEEK;
use crate::engine::CONFIG as QWEN;
use crate::explained::steps;

/// Every backend on two ranks.
fn ways() -> Vec<ParallelConfig> {
    let mut ways = Vec::new();
    for (tp, dp) in [(2, 1), (1, 2)] {
        let base = ParallelConfig { tp, dp, ..ParallelConfig::default() };
        let ep = ParallelConfig { enable_expert_parallel: true, ..base };
        let with = |backend: EpBackend| ParallelConfig { backend: backend.into(), ..ep };
        ways.push(base);
        if dp == 1 {
            ways.push(with(EpBackend::LocalAllreduce));
        }
        ways.push(with(EpBackend::AllgatherReducescatter));
        ways.extend(
            DeepEpMode::ALL.map(|deepep_mode| ParallelConfig { deepep_mode, ..with(EpBackend::DeepEp) }),
        );
    }
    ways
}

/// The part of one rank of a model of random weights.
fn rank_model(
    config: &str,
    parallel: &ParallelConfig,
    comm: &NcclComm,
    ex: &mut Exec,
) -> Result<Box<dyn CausalLm>> {
    let model = ALL.parse(&Config::parse(config, "config.json").unwrap()).unwrap();
    let geometry = parallel.geometry(comm.rank()).unwrap();
    let groups = ParallelGroups::new(&geometry, comm.split(0, comm.rank(), ex)?, ex)?;
    let whole = model.layout(&Geometry::default(), &|_| true).unwrap();
    let slices = model.layout(&geometry, &|_| true).unwrap().slices_for(ex.device());
    let weights = DummyWeights::new(whole.tensors, 7).with_stored_dtype(DType::BF16);
    let view = RankView::new(weights, slices);
    let context = BlockContext { geometry, groups, sliced_weights: true, ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    Ok(model.load(&options, view.var_builder(DType::BF16, ex.device())).unwrap().model)
}

#[test]
fn layers_over_gpus_launch_what_their_plans_say() {
    for config in [QWEN, DEEPSEEK] {
        for parallel in ways() {
            run_nccl_ranks(2, LIMIT, |comm, ex| {
                let model = rank_model(config, &parallel, comm, ex).unwrap();
                for shown in steps() {
                    let mut context = StepContext {
                        rank_tokens: Some(vec![shown.rows(); 2].into()),
                        only_decode: shown.prompts.is_empty(),
                        ..StepContext::default()
                    };
                    let what = format!("{parallel:?}, rank {}", comm.rank());
                    expect_explained(&what, model.as_ref(), &shown, &mut context, ex).unwrap();
                }
            });
        }
    }
}
