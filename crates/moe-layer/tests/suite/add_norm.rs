//! Sums that return from other ranks are added to the residual stream and normed in one launch, with the same bits as
//! the layer's output.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_comm::{Communicator, DeepEpMode, EpBackend, ParallelConfig, ThreadComm, run_ranks};
use moe_kernels::{PreNorm, add_rms_norm_into};
use moe_layer::candle::Result;
use moe_layer::{
    BlockContext, Buffer, ChunkedMoe, DType, Exec, Fusion, Machine, MoeForm, PlanStep, SparseMoeBlock,
    StepContext, SublayerIo, TensorView, View, WhoAdds, load_block_on,
};

use crate::chunks::{five_experts, spread};
use crate::offering::{Offering, Taken};
use crate::{bits, message, run};

/// The form that computes a prompt if addition and next norm may be fused with the experts.
fn form(block: &SparseMoeBlock) -> MoeForm {
    block.choose(&PlanStep::prompts(3), &[Fusion::AddNorm, Fusion::Nothing], &Machine::default())
}

/// The results of a rank: the layer's sums; and the residual stream and its norm from the same layer with the addition
/// and the norm that follow.
#[derive(Debug, PartialEq)]
struct Bits {
    sums: Vec<u32>,
    residual: Vec<u32>,
    normed: Vec<u32>,
}

/// The results of two ranks for 3 and 6 rows. The second rank has other experts than the first.
fn on_two_ranks(parallel: ParallelConfig, chunked: ChunkedMoe, offers: Option<&Taken>) -> Result<Vec<Bits>> {
    let (p, options, vb) = five_experts(9)?;
    let x = p.rows()?;
    let results = run_ranks(2, |rank, comm: ThreadComm| {
        let comm: Arc<dyn Communicator> = Arc::new(comm);
        let comm = offers.map_or(comm.clone(), |taken| Offering::over(comm, taken));
        let who_adds = Some(WhoAdds::ByRank);
        let context = BlockContext { who_adds, ..spread(rank, comm, parallel, chunked)? };
        let (block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?;
        assert_eq!(form(&block), MoeForm::modular(Fusion::AddNorm));
        let rows = x.narrow(0, [0, 3][rank], [3, 6][rank])?;
        let ex = &mut Exec::cpu();
        let dims = rows.dims();
        let gain = vec![1.5f32; 16];
        let norm = PreNorm { weight: View::new(&gain, &[16])?, eps: 1e-6 };
        let start = || Buffer::from_vec((0..dims[0] * 16).map(|i| (i % 7) as f32).collect(), dims);
        let mut residual = start()?;
        let mut out = Buffer::zeros(DType::F32, dims)?;
        let hidden = TensorView::new(&rows)?;
        let x = hidden.view()?;
        let io = SublayerIo::AddNorm { x, residual: residual.view_mut(), norm, out: out.view_mut().into() };
        block.forward_as(form(&block), io, &mut |_| Ok(()), &mut StepContext::default(), ex)?;
        let sums = run(&block, &rows, DType::F32, ex)?;

        let mut want = start()?;
        let mut want_out = Buffer::zeros(DType::F32, dims)?;
        let view = TensorView::new(&sums)?;
        add_rms_norm_into(view.view()?, norm.weight, norm.eps, want.view_mut(), want_out.view_mut(), ex)?;
        let bits_of = |buffer: Buffer| buffer.into_tensor().map(|t| bits(&t));
        let residual = bits_of(residual)?;
        let normed = bits_of(out)?;
        assert_eq!(residual, bits_of(want)?, "{parallel:?} on rank {rank}");
        assert_eq!(normed, bits_of(want_out)?, "{parallel:?} on rank {rank}");
        Ok(Bits { sums: bits(&sums), residual, normed })
    });
    results.into_iter().collect()
}

/// The norm after a layer must be the norm of its sums. Ranks that fuse collectives with the ops around them must not
/// change a bit.
#[test]
fn the_norm_after_a_layer_is_that_of_its_sums_whatever_ranks_offer() -> Result<()> {
    let gathers = ["gather", "sums", "sums, added and normed"];
    let needed = ["gather", "gather of needed rows", "sums of needed rows"];
    // Of two experts of a token on two ranks, both are on the other rank for one token in four.
    let dispatched = ["dispatch of needed rows", "sums of needed rows", "sums, added and normed"];
    let deepep = |mode| (EpBackend::DeepEp, mode);
    let cases = [
        ((EpBackend::AllgatherReducescatter, DeepEpMode::Auto), gathers),
        (deepep(DeepEpMode::LowLatency), dispatched),
        (deepep(DeepEpMode::HighThroughput), needed),
        (deepep(DeepEpMode::Auto), needed),
    ];
    for ((backend, deepep_mode), expected) in cases {
        let parallel = ParallelConfig { backend: backend.into(), deepep_mode, ..ParallelConfig::default() };
        for chunked in [ChunkedMoe::default(), ChunkedMoe::of_size(NonZeroUsize::MIN.saturating_add(1))] {
            let taken = Taken::default();
            let plain = on_two_ranks(parallel, chunked, None)?;
            let offered = on_two_ranks(parallel, chunked, Some(&taken))?;
            assert_eq!(offered, plain, "{parallel:?}");
            let taken: Vec<_> = taken.lock().unwrap().iter().copied().collect();
            assert_eq!(taken, expected, "{parallel:?}");
        }
    }
    Ok(())
}

#[test]
fn a_layer_whose_sums_stay_leaves_the_norm_to_others() -> Result<()> {
    let (p, ..) = five_experts(2)?;
    let block = p.standard()?;
    let x = p.rows()?;
    assert_eq!(form(&block), MoeForm::modular(Fusion::Nothing));
    let mut residual = Buffer::zeros(DType::F32, x.dims())?;
    let mut out = Buffer::zeros(DType::F32, x.dims())?;
    let gain = [1f32; 16];
    let norm = PreNorm { weight: View::new(&gain, &[16])?, eps: 1e-6 };
    let hidden = TensorView::new(&x)?;
    let x = hidden.view()?;
    let io = SublayerIo::AddNorm { x, residual: residual.view_mut(), norm, out: out.view_mut().into() };
    let context = &mut StepContext::default();
    let form = MoeForm::modular(Fusion::AddNorm);
    let e = message(block.forward_as(form, io, &mut |_| Ok(()), context, &mut Exec::cpu()));
    assert!(e.contains("no sums return"), "{e}");
    Ok(())
}
