//! Experts are cut over ranks, and each rank has some of its parts in host memory. The outputs are equal to the outputs
//! of experts that are all on the devices.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_comm::{Collectives, Communicator, NcclComm, ParallelConfig, ParallelGroups};
use moe_kernels::{Exec, StepContext, TensorView};
use moe_layer::{
    Activation, BlockContext, BlockOptions, ExpertOffload, RouterConfig, SparseMoeBlock, load_block_on,
};

use super::{LIMIT, run_nccl_ranks};
use crate::common::Rng;

const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const WIDTHS: [usize; 2] = [256, 256];
/// Bytes of a rank's part of an expert.
const PART: usize = 3 * WIDTHS[0] * WIDTHS[1] / 2 * 2;

/// A layer with this number of experts in host memory, over both ranks.
fn block(
    tensors: &[(String, Tensor)],
    at_home: usize,
    comm: &NcclComm,
    ex: &mut Exec,
) -> Result<SparseMoeBlock> {
    let geometry = ParallelConfig { tp: 2, ..ParallelConfig::default() }.geometry(comm.rank())?;
    let groups = ParallelGroups::new(&geometry, comm.split(0, comm.rank(), ex)?, ex)?;
    let offload = ExpertOffload { experts: at_home, of: (EXPERTS, TOP_K), expert_bytes: PART, layers: 1 };
    let offload = Some(offload).filter(|offload| offload.experts > 0);
    let context =
        BlockContext { geometry, groups, offload, batch_invariant: true, ..BlockContext::default() };
    let options = BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(EXPERTS, TOP_K) },
        hidden_size: WIDTHS[0],
        intermediate_size: WIDTHS[1],
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    };
    let vb = VarBuilder::from_tensors(tensors.iter().cloned().collect(), DType::BF16, ex.device());
    Ok(load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?.0)
}

/// The bits of a layer's outputs for these rows.
fn bits(block: &SparseMoeBlock, rows: &Tensor, ex: &mut Exec) -> Result<Vec<u32>> {
    let x = rows.to_device(ex.device())?;
    let mut out = ex.zeros(DType::F32, rows.dims())?;
    block.forward_into(TensorView::new(&x)?.view()?, out.view_mut(), &mut StepContext::default(), ex)?;
    Ok(ex.to_host(out.view())?.view().to_f32_vec()?.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn parts_of_experts_in_host_memory_give_the_bits_of_those_on_the_device() {
    let [h, i] = WIDTHS;
    let mut rng = Rng::new();
    let mut tensor = |name: &str, dims: &[usize]| {
        let values = rng.floats(DType::F32, dims).into_tensor().unwrap().affine(0.1, 0.0).unwrap();
        (name.to_string(), values.to_dtype(DType::BF16).unwrap())
    };
    let tensors = [
        tensor("gate.weight", &[EXPERTS, h]),
        tensor("experts.gate_up_proj", &[EXPERTS, 2 * i, h]),
        tensor("experts.down_proj", &[EXPERTS, h, i]),
    ];
    // Steps of one pass and of several passes: the smallest number of slots holds the experts of one token.
    let steps = [1, 2, 1, 5, 33, 1, 0, 300, 4];
    let rows = steps.map(|tokens| tensor("rows", &[tokens, h]).1);
    for at_home in [1, 6, 9] {
        let on_rank = |comm: &NcclComm, ex: &mut Exec| -> Result<()> {
            let mut ex = ex.clone().with_batch_invariant(true);
            let whole = block(&tensors, 0, comm, &mut ex)?;
            let some = block(&tensors, at_home, comm, &mut ex)?;
            for rows in &rows {
                let want = bits(&whole, rows, &mut ex)?;
                assert!(bits(&some, rows, &mut ex)? == want, "{at_home} at home, {rows:?}");
                assert!(rows.dims()[0] == 0 || want.iter().any(|bits| *bits != 0));
            }
            let traffic = some.expert_traffic()?.unwrap();
            assert_eq!((traffic.num_slots, traffic.expert_bytes), (EXPERTS - at_home, PART));
            assert!(traffic.fetched > 0 && traffic.needed > traffic.fetched, "{traffic:?}");
            comm.barrier(&mut ex)
        };
        for rank in run_nccl_ranks(2, LIMIT, on_rank) {
            rank.unwrap();
        }
    }
}
