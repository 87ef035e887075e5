//! Chunks by a memory budget over GPUs that hold different numbers of experts.

use std::num::NonZeroUsize;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use moe_comm::{Collectives, Communicator, DeepEpMode, EpBackend, ParallelConfig, ParallelGroups, ReduceOp};
use moe_kernels::{Buffer, Exec, StepContext, TensorView, ViewMut};
use moe_layer::{
    Activation, BlockContext, BlockOptions, ChunkedMoe, RouterConfig, SparseMoeBlock, load_block_on,
};

use super::{LIMIT, run_nccl_ranks};
use crate::common::{Rng, assert_close};

/// Five experts, an odd number for two ranks.
const EXPERTS: usize = 5;
const WIDTHS: [usize; 2] = [64, 32];
/// Tokens of each rank.
const TOKENS: usize = 200;

fn options() -> BlockOptions {
    BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(EXPERTS, 2) },
        hidden_size: WIDTHS[0],
        intermediate_size: WIDTHS[1],
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    }
}

fn run(block: &SparseMoeBlock, x: &Tensor, ex: &mut Exec) -> Result<Buffer> {
    let x = TensorView::new(x)?;
    let mut out = ex.zeros(DType::F32, x.view()?.dims())?;
    block.forward_into(x.view()?, out.view_mut(), &mut StepContext::default(), ex)?;
    ex.to_host(out.view())
}

#[test]
fn ranks_agree_on_the_size_of_a_budget() {
    let [h, i] = WIDTHS;
    let mut rng = Rng::new();
    let mut tensor = |dims: &[usize]| rng.floats(DType::F32, dims).into_tensor().unwrap();
    let x = tensor(&[2 * TOKENS, h]);
    let tensors = [
        ("gate.weight", tensor(&[EXPERTS, h])),
        ("experts.gate_up_proj", tensor(&[EXPERTS, 2 * i, h])),
        ("experts.down_proj", tensor(&[EXPERTS, h, i])),
    ];
    let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor));
    let weights =
        |device: &Device| VarBuilder::from_tensors(tensors.clone().into_iter().collect(), DType::F32, device);
    let load = |context: &BlockContext, device: &Device| {
        let vb = weights(device);
        load_block_on(&options(), context, vb.pp("gate"), vb.pp("experts")).map(|(block, _)| block)
    };
    let whole = load(&BlockContext::default(), &Device::Cpu).unwrap();
    let want = run(&whole, &x, &mut Exec::cpu()).unwrap();
    for deepep_mode in [DeepEpMode::LowLatency, DeepEpMode::HighThroughput, DeepEpMode::Auto] {
        let on_rank = |comm: &moe_comm::NcclComm, ex: &mut Exec| -> Result<_> {
            let parallel = ParallelConfig {
                dp: 2,
                enable_expert_parallel: true,
                backend: EpBackend::DeepEp.into(),
                deepep_mode,
                ..ParallelConfig::default()
            };
            let geometry = parallel.geometry(comm.rank())?;
            let groups = ParallelGroups::new(&geometry, comm.split(0, comm.rank(), ex)?, ex)?;
            let context = BlockContext { geometry, groups, ..BlockContext::default() };
            // A budget for 48 tokens on the rank with the most experts is enough for more tokens on the other rank.
            let block = load(&context, ex.device())?;
            let mut budget = [block.chunk_bytes(48)? as u32];
            comm.all_reduce(ViewMut::new(&mut budget, &[1])?, ReduceOp::Max, ex)?;
            let chunked_moe = ChunkedMoe::within(budget[0] as usize);
            let bytes = |tokens| block.chunk_bytes(tokens).unwrap_or(usize::MAX);
            let alone = chunked_moe.size(TOKENS, bytes).ok().flatten();
            let block = load(&BlockContext { chunked_moe, ..context }, ex.device())?;
            let rows = x.narrow(0, comm.rank() * TOKENS, TOKENS)?.to_device(ex.device())?;
            Ok((alone, block.chunk_size(), run(&block, &rows, ex)?))
        };
        let results = run_nccl_ranks(2, LIMIT, on_rank);
        let [first, second] =
            <[_; 2]>::try_from(results).map_err(|_| "two ranks").unwrap().map(Result::unwrap);
        assert_eq!(
            (first.0, first.1, second.1),
            (NonZeroUsize::new(48), first.0, first.0),
            "{deepep_mode:?}"
        );
        // The rank with fewer experts has room for at least as many tokens.
        assert!(second.0 >= first.0, "{deepep_mode:?}: {:?}", second.0);
        for (rank, got) in [first.2, second.2].iter().enumerate() {
            let want = want.view().narrow(rank * TOKENS, TOKENS).unwrap();
            let want = Exec::cpu().to_host(want).unwrap();
            assert_close(&format!("{deepep_mode:?}, rank {rank}"), &want, got, 1e-4);
        }
    }
}
