//! Tests that the loop over ranks and in chunks has the bits of the loop on one rank in one pass.

use std::num::NonZeroUsize;
use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_comm::{DeepEpMode, EpBackend, ParallelConfig, ParallelGroups, run_ranks};
use moe_experts::Experts;
use moe_layer::candle::{Result, Tensor};
use moe_layer::legacy::{ExpertLoop, ExpertMlp};
use moe_layer::{
    Activation, ActivationFormat, BlockContext, Buffer, ChunkedMoe, DType, Device, Exec, ExpertsShape,
    MoePath, RouterConfig, TensorView, load_layer_on,
};

use crate::loading::{checkpoint, options};
use crate::reference::{Problem, example, problem};
use crate::{bits, floats, message};

/// Returns both layouts of a problem's tensors.
fn layouts(p: &Problem) -> Result<[VarBuilder<'static>; 2]> {
    let w = p.weights()?;
    let packed = [
        ("mlp.gate.weight", p.gate_weight()?),
        ("mlp.experts.gate_up_proj", w.w13().to_tensor()?),
        ("mlp.experts.down_proj", w.w2().to_tensor()?),
    ];
    let packed = packed.map(|(name, tensor)| (name.to_string(), tensor)).into_iter().collect();
    Ok([checkpoint(p)?, packed]
        .map(|tensors| VarBuilder::from_tensors(tensors, p.dtype, &Device::Cpu).pp("mlp")))
}

/// Returns the layer's output for some rows.
fn layer(p: &Problem, context: &BlockContext, vb: &VarBuilder, x: &Tensor) -> Result<Vec<u32>> {
    let gate = vb.pp("gate");
    let experts = vb.pp("experts");
    let (block, selection) = load_layer_on(MoePath::Legacy, &options(p), context, gate, experts)?;
    assert!(selection.is_none() && block.experts_name() == "legacy experts");
    block.forward(x).map(|out| bits(&out))
}

#[test]
fn ranks_have_the_bits_of_one() -> Result<()> {
    let ep = ParallelConfig { enable_expert_parallel: true, ..ParallelConfig::default() };
    let deepep = |deepep_mode| ParallelConfig { backend: EpBackend::DeepEp.into(), deepep_mode, ..ep };
    let cases = [
        ParallelConfig { tp: 2, ..ParallelConfig::default() },
        ParallelConfig { tp: 8, ..ParallelConfig::default() },
        ParallelConfig { tp: 2, ..ep },
        // There are more ranks than experts, so some ranks have none.
        ParallelConfig { dp: 7, ..ep },
        ParallelConfig { tp: 2, dp: 2, ..deepep(DeepEpMode::HighThroughput) },
        ParallelConfig { tp: 2, dp: 2, ..deepep(DeepEpMode::LowLatency) },
    ];
    for dtype in [DType::F32, DType::BF16] {
        let config = RouterConfig { renormalize: true, ..RouterConfig::new(6, 3) };
        let p = problem((6, 24, 16, 9), config, None, dtype, 5);
        let x = p.rows()?;
        for vb in layouts(&p)? {
            let want = layer(&p, &BlockContext::default(), &vb, &x)?;
            for (parallel, chunk) in cases.iter().flat_map(|p| [(p, None), (p, NonZeroUsize::new(2))]) {
                let results = run_ranks(parallel.world_size()?, |rank, comm| {
                    let geometry = parallel.geometry(rank)?;
                    let groups = ParallelGroups::new(&geometry, Arc::new(comm), &mut Exec::cpu())?;
                    let chunked_moe = chunk.map_or_else(ChunkedMoe::default, ChunkedMoe::of_size);
                    // The data-parallel groups have different rows, and the last group sometimes has none.
                    let start = geometry.dp_rank;
                    let len = 9usize.saturating_sub(3 * geometry.dp_rank);
                    let context = BlockContext { geometry, groups, chunked_moe, ..BlockContext::default() };
                    let rows = x.narrow(0, start.min(9 - len), len)?.force_contiguous()?;
                    Ok((start.min(9 - len), layer(&p, &context, &vb, &rows)?))
                });
                for result in results {
                    let (start, got) = result?;
                    assert_eq!(got, want[start * 24..][..got.len()], "{dtype:?} {parallel:?} {chunk:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn chunks_on_one_rank_have_the_bits_of_one_pass() -> Result<()> {
    let p = example(DType::BF16);
    let x = p.rows()?;
    let [vb, _] = layouts(&p)?;
    let want = layer(&p, &BlockContext::default(), &vb, &x)?;
    let chunked_moe = ChunkedMoe::of_size(NonZeroUsize::MIN);
    let context = BlockContext { chunked_moe, ..BlockContext::default() };
    assert_eq!(layer(&p, &context, &vb, &x)?, want);
    // A budget that is too small for one token is refused here, too.
    let context = BlockContext { chunked_moe: ChunkedMoe::within(10), ..BlockContext::default() };
    let e = message(layer(&p, &context, &vb, &x));
    assert!(e.contains("the MoE memory budget of 10 bytes is too small: one token needs"), "{e}");
    Ok(())
}

#[test]
fn rows_without_an_expert_here_become_zero() -> Result<()> {
    let p = example(DType::F32);
    let w = p.weights()?;
    let w13 = w.w13().to_tensor()?.get(4)?;
    let w2 = w.w2().to_tensor()?.get(4)?;
    let one = ExpertMlp {
        gate: w13.narrow(0, 0, 16)?.force_contiguous()?,
        up: w13.narrow(0, 16, 16)?.force_contiguous()?,
        down: w2.force_contiguous()?,
    };
    let shape = ExpertsShape { num_local_experts: 1, ..w.shape() };
    let experts = ExpertLoop::new(vec![one.clone()], shape, Activation::SwiGlu)?;
    let x = p.rows()?.narrow(0, 0, 2)?.contiguous()?;
    let ids = [4u32, 1, 3, 4];
    let weights = [1f32; 4];
    let map = [-1i32, -1, -1, -1, 0, -1];
    let ids = moe_layer::View::new(&ids, &[2, 2])?;
    let weights = moe_layer::View::new(&weights, &[2, 2])?;
    let guard = TensorView::new(&x)?;
    let mut dispatched = moe_kernels::Dispatched::standard(guard.view()?, ids, weights);
    dispatched.expert_map = Some(moe_layer::View::new(&map, &[6])?);
    let mut out = Buffer::from_vec(vec![7f32; 2 * 2 * 24], &[2, 2, 24])?;
    experts.apply(&dispatched, out.view_mut(), &mut Exec::cpu())?;
    let out = floats(&out.into_tensor()?);
    let is_zero: Vec<bool> = out.chunks(24).map(|row| row.iter().all(|x| *x == 0.)).collect();
    assert_eq!(is_zero, [false, true, true, false]);

    let wrong = moe_kernels::Dispatched::standard(guard.view()?.narrow(0, 1)?, ids, weights);
    let mut out = Buffer::zeros(DType::F32, &[2, 2, 24])?;
    let e = message(experts.apply(&wrong, out.view_mut(), &mut Exec::cpu()));
    assert!(e.contains("legacy experts: expected out"), "{e}");
    let e = message(ExpertLoop::new(vec![one.clone(), one], shape, Activation::SwiGlu));
    assert!(e.contains("expected 1 experts, got 2"), "{e}");
    assert_eq!(experts.activation_format(), ActivationFormat::Standard);
    Ok(())
}
