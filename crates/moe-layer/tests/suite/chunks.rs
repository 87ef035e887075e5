//! Chunks must change the memory of a layer and nothing else.

use std::num::NonZeroUsize;
use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_comm::{Communicator, DeepEpMode, EpBackend, ParallelConfig, ParallelGroups, run_ranks};
use moe_layer::candle::{Error, Result, Tensor};
use moe_layer::{
    Activation, BlockContext, BlockOptions, Buffer, ChunkedMoe, CpuIsa, DType, Device, Exec, ExpertHeat,
    RoutedExperts, RouterConfig, SparseMoeBlock, StepContext, TensorView, WhoAdds, Workspace, load_block_on,
};
use proptest::prelude::*;

use crate::reference::{example, problem, problems};
use crate::{bits, message, run, run_in};

fn size(n: usize) -> Option<NonZeroUsize> {
    NonZeroUsize::new(n)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn chunks_give_the_same_bits(p in problems(), n in 1usize..12) {
        let x = p.rows().unwrap();
        let want = bits(&p.standard().unwrap().forward(&x).unwrap());
        // A single rank's sums are the whole sums, so the backend that adds the ranks' sums gives these bits, too.
        for block in [p.standard(), p.batched(), p.listed(n), p.listed(12)] {
            let block = block.unwrap();
            let got = block.with_chunk_size(size(n)).forward(&x).unwrap();
            prop_assert_eq!(bits(&got), want.clone());
        }
    }
}

#[test]
fn what_the_step_records_is_that_of_the_whole_step() -> Result<()> {
    let p = example(DType::BF16);
    let x = p.rows()?;
    let record = |block: SparseMoeBlock| -> Result<_> {
        let mut context = StepContext {
            capture: Some(RoutedExperts::empty(5, 1, 2)?),
            heat: Some(ExpertHeat::new(1, 6)),
            ..StepContext::default()
        };
        let out = bits(&run_in(&mut context, &block, &x, DType::BF16, &mut Exec::cpu())?);
        Ok((out, context.capture, context.heat))
    };
    let whole = record(p.standard()?)?;
    assert!(whole.1.as_ref().is_some_and(|c| c.ids().iter().all(|&id| id < 6)));
    assert_eq!(record(p.standard()?.with_chunk_size(size(2)))?, whole);
    Ok(())
}

/// A thousand tokens of a larger block, with shared experts.
fn large() -> Result<(crate::reference::Problem, Tensor)> {
    let config = RouterConfig { renormalize: true, ..RouterConfig::new(8, 4) };
    let p = problem((8, 64, 48, 1024), config, Some((32, true)), DType::BF16, 3);
    let x = p.rows()?;
    Ok((p, x))
}

/// Returns the bytes that a forward pass takes from an empty workspace.
fn workspace(block: &SparseMoeBlock, x: &Tensor) -> Result<usize> {
    // The scalar path packs the fewest rows at a time, so its own scratch reaches its limit early.
    let mut ex = Exec::cpu().with_threads(2)?.with_isa(CpuIsa::Scalar)?;
    let mut out = Buffer::zeros(x.dtype(), x.dims())?;
    for pass in 0..2 {
        let context = &mut StepContext::default();
        block.forward_into(TensorView::new(x)?.view()?, out.view_mut(), context, &mut ex)?;
        // The second pass, and every chunk after the first, use the buffers that exist.
        ex.workspace().freeze(true);
        assert!(pass == 0 || ex.workspace().bytes() > 0);
    }
    Ok(ex.workspace().bytes())
}

#[test]
fn chunks_cut_the_workspace_and_reuse_it() -> Result<()> {
    let (p, x) = large()?;
    let whole = workspace(&p.standard()?, &x)?;
    let chunked = workspace(&p.standard()?.with_chunk_size(size(64)), &x)?;
    // The routing of all tokens and the kernels' own scratch remain.
    assert!(chunked * 4 < whole, "{chunked} of {whole}");
    Ok(())
}

#[test]
fn layers_that_are_called_on_tensors_share_the_workspace_of_their_thread() -> Result<()> {
    // Tests share threads, which would share the workspace of this test, so it runs on a separate thread.
    let sizes = std::thread::spawn(|| -> Result<Vec<usize>> {
        let (p, x) = large()?;
        let mut sizes = Vec::new();
        for _layer in 0..4 {
            p.standard()?.forward(&x)?;
            sizes.push(Workspace::of_thread(x.device()).bytes());
        }
        Workspace::of_thread(x.device()).trim();
        sizes.push(Workspace::of_thread(x.device()).bytes());
        Ok(sizes)
    });
    let sizes = sizes.join().map_err(|_| Error::msg("the thread panicked"))??;
    assert!(sizes[0] > 0, "{sizes:?}");
    assert_eq!(sizes, [sizes[0], sizes[0], sizes[0], sizes[0], 0]);
    Ok(())
}

#[test]
fn the_estimate_covers_what_grows() -> Result<()> {
    let (p, x) = large()?;
    let block = p.standard()?;
    // For larger sizes the kernels' own scratch has reached its limit and does not grow.
    let small = workspace(&block, &x.narrow(0, 0, 512)?)?;
    let whole = workspace(&block, &x)?;
    let estimated = block.chunk_bytes(1024)? - block.chunk_bytes(512)?;
    // The routing of all tokens is not part of a chunk. A buffer that became too small was freed.
    let routing = 512 * (8 * 4 + 4 * 8 + 4);
    let grown = whole - small;
    assert!(
        grown + grown / 10 >= estimated && grown <= estimated + estimated / 2 + routing,
        "{grown}, {estimated}"
    );
    Ok(())
}

#[test]
fn a_budget_decides_the_size() -> Result<()> {
    let vb = VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Device::Cpu);
    let options = BlockOptions {
        router: RouterConfig::new(4, 2),
        hidden_size: 8,
        intermediate_size: 16,
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    };
    let load = |chunked_moe| {
        let context = BlockContext { chunked_moe, ..BlockContext::default() };
        load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts")).map(|(block, _)| block)
    };
    let block = load(ChunkedMoe::within(100_000))?;
    let n = block.chunk_size().map_or(0, NonZeroUsize::get);
    assert!(block.chunk_bytes(n)? <= 100_000 && block.chunk_bytes(n + 1)? > 100_000, "{n}");
    assert_eq!(load(ChunkedMoe::default())?.chunk_size(), None);
    assert_eq!(load(ChunkedMoe { enable_chunked_moe: true, ..Default::default() })?.chunk_size(), size(256));
    let e = message(load(ChunkedMoe::within(10)));
    assert!(e.contains("the MoE memory budget of 10 bytes is too small: one token needs"), "{e}");
    Ok(())
}

/// Five experts, an odd number for two ranks, over some tokens, and the tensors from which a rank loads its part.
pub fn five_experts(tokens: usize) -> Result<(crate::reference::Problem, BlockOptions, VarBuilder<'static>)> {
    let config = RouterConfig { renormalize: true, ..RouterConfig::new(5, 2) };
    let p = problem((5, 16, 8, tokens), config.clone(), None, DType::F32, 11);
    let w = p.weights()?;
    let tensors = [
        ("gate.weight", p.gate_weight()?),
        ("experts.gate_up_proj", w.w13().to_tensor()?),
        ("experts.down_proj", w.w2().to_tensor()?),
    ];
    let tensors = tensors.map(|(name, t)| (name.to_string(), t)).into_iter().collect();
    let options = BlockOptions {
        router: config,
        hidden_size: 16,
        intermediate_size: 8,
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    };
    Ok((p, options, VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))
}

/// Returns the context of one of two data-parallel ranks that spread the experts.
pub fn spread(
    rank: usize,
    comm: Arc<dyn Communicator>,
    parallel: ParallelConfig,
    chunked_moe: ChunkedMoe,
) -> Result<BlockContext> {
    let parallel = ParallelConfig { dp: 2, enable_expert_parallel: true, ..parallel };
    let geometry = parallel.geometry(rank)?;
    let groups = ParallelGroups::new(&geometry, comm, &mut Exec::cpu())?;
    Ok(BlockContext { geometry, groups, chunked_moe, ..BlockContext::default() })
}

/// A rank with two of five experts has room for more tokens than the rank with three, but both must cut in the same
/// way.
#[test]
fn ranks_agree_on_the_size_of_a_budget() -> Result<()> {
    const TOKENS: usize = 120;
    let (p, options, vb) = five_experts(2 * TOKENS)?;
    let x = p.rows()?;
    let want = bits(&p.standard()?.forward(&x)?);
    for deepep_mode in [DeepEpMode::LowLatency, DeepEpMode::HighThroughput, DeepEpMode::Auto] {
        let parallel =
            ParallelConfig { backend: EpBackend::DeepEp.into(), deepep_mode, ..ParallelConfig::default() };
        let results = run_ranks(2, |rank, comm| {
            let chunked = ChunkedMoe::within(60_000);
            let context = spread(rank, Arc::new(comm), parallel, chunked)?;
            let (block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?;
            let alone = chunked.size(TOKENS, |n| block.chunk_bytes(n).unwrap_or(usize::MAX));
            let rows = x.narrow(0, rank * TOKENS, TOKENS)?;
            let out = run(&block, &rows, DType::F32, &mut Exec::cpu())?;
            Ok((alone.unwrap(), block.chunk_size(), bits(&out)))
        });
        let [first, second] =
            <[_; 2]>::try_from(results).map_err(|_| "two ranks").unwrap().map(Result::unwrap);
        // Only batched rows need memory for each expert.
        let uneven = deepep_mode == DeepEpMode::LowLatency;
        let chunks = first.0 < size(TOKENS) && first.0 <= second.0 && (first.0 < second.0 || !uneven);
        assert!(chunks, "{deepep_mode:?}: {:?} {:?}", first.0, second.0);
        assert_eq!((first.1, second.1), (first.0, first.0), "{deepep_mode:?}");
        assert_eq!([first.2, second.2].concat(), want, "{deepep_mode:?}");
    }
    Ok(())
}

/// Two ranks with different numbers of tokens run the same rounds; the one without tokens, too.
#[test]
fn ranks_run_the_same_rounds() -> Result<()> {
    let (p, options, vb) = five_experts(9)?;
    let x = p.rows()?;
    let want = bits(&p.standard()?.forward(&x)?);
    for (backend, rows) in [
        (EpBackend::AllgatherReducescatter, [9, 0]),
        (EpBackend::DeepEp, [2, 9]),
        (EpBackend::AllgatherReducescatter, [1, 8]),
    ] {
        for who in [WhoAdds::BySlot, WhoAdds::ByRank] {
            let results = run_ranks(2, |rank, comm| {
                let parallel = ParallelConfig { backend: backend.into(), ..ParallelConfig::default() };
                let chunked = ChunkedMoe::of_size(NonZeroUsize::MIN.saturating_add(1));
                let context =
                    BlockContext { who_adds: Some(who), ..spread(rank, Arc::new(comm), parallel, chunked)? };
                let (block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?;
                // Rank 1 takes the last rows, so the ranks have different tokens.
                let start = if rank == 0 { 0 } else { 9 - rows[1] };
                let out = run(&block, &x.narrow(0, start, rows[rank])?, DType::F32, &mut Exec::cpu())?;
                Ok((start, bits(&out)))
            });
            for result in results {
                let (start, got) = result?;
                let want = &want[start * 16..start * 16 + got.len()];
                let near = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-4;
                let agrees =
                    if who == WhoAdds::BySlot { got == want } else { got.iter().zip(want).all(near) };
                assert!(agrees, "{backend} {who:?}: {got:?}, expected {want:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_decode_path_must_fit_and_is_taken_when_all_only_decode() -> Result<()> {
    let p = example(DType::F32);
    let x = p.rows()?;
    let whole = p.standard()?;
    let want = bits(&whole.forward(&x)?);
    let (prepare, experts) = p.batched_parts()?;
    let block = whole.with_decode_path(prepare, experts)?;
    for only_decode in [false, true] {
        let mut context = StepContext { only_decode, ..StepContext::default() };
        assert_eq!(bits(&run_in(&mut context, &block, &x, DType::F32, &mut Exec::cpu())?), want);
    }
    let other = problem((6, 24, 8, 5), p.config.clone(), None, DType::F32, 1);
    let (prepare, experts) = other.batched_parts()?;
    let e = message(p.standard()?.with_decode_path(prepare, experts));
    assert!(e.contains("decode path: expected experts like the experts of NoEp"), "{e}");
    Ok(())
}
