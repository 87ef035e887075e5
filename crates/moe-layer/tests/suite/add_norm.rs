//! Sums that return from other ranks straight to the residual stream, with the norm: the bits of the layer's output, added.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_comm::{
    Collective, Communicator, EpBackend, FusedCollective, FusedCollectives, ParallelConfig, ThreadComm,
    run_ranks,
};
use moe_kernels::{PreNorm, add_rms_norm_into};
use moe_layer::candle::{Result, bail};
use moe_layer::{
    BlockContext, Buffer, ChunkedMoe, DType, Exec, Fusion, Machine, MoeForm, PlanStep, SparseMoeBlock,
    StepContext, SublayerIo, TensorView, View, WhoAdds, load_block_on,
};

use crate::chunks::{five_experts, spread};
use crate::{bits, message, run};

/// Ranks of threads that add up slots on their way back, as ranks of GPUs do, but by the parts.
#[derive(Debug)]
struct Combining(Arc<dyn Communicator>);

impl Communicator for Combining {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn world_size(&self) -> usize {
        self.0.world_size()
    }
    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        self.0.run(collective, ex)
    }
    fn fused(&self) -> Option<&dyn FusedCollectives> {
        Some(self)
    }
    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self(self.0.split(color, key, ex)?)))
    }
    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
    fn check(&self) -> Result<()> {
        self.0.check()
    }
}

impl FusedCollectives for Combining {
    fn shares_residual(&self, _: usize, _: usize, _: DType) -> std::result::Result<(), &'static str> {
        Err("one rank has the tokens")
    }
    fn rounds_sums(&self, _: usize, _: usize, _: DType) -> bool {
        false
    }
    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, _: DType) -> bool {
        assert_eq!((counts.len(), top_k, hidden), (self.world_size(), 2, 16));
        true
    }
    fn takes(&self, _: &FusedCollective<'_>) -> bool {
        false
    }
    fn run_fused(&self, call: FusedCollective<'_>, _: &mut Exec) -> Result<()> {
        bail!("expected nothing, since nothing is taken, got {call:?}")
    }
}

/// What computes a prompt where addition and next norm may be fused with the experts.
fn form(block: &SparseMoeBlock) -> MoeForm {
    block.choose(&PlanStep::prompts(3), &[Fusion::AddNorm, Fusion::Nothing], &Machine::default())
}

#[test]
fn the_norm_behind_is_that_of_the_sum() -> Result<()> {
    let (p, options, vb) = five_experts(9)?;
    let x = p.rows()?;
    let backends = [EpBackend::AllgatherReducescatter, EpBackend::DeepEp];
    let chunks = [ChunkedMoe::default(), ChunkedMoe::of_size(NonZeroUsize::MIN.saturating_add(1))];
    let cases = backends.into_iter().flat_map(|backend| chunks.map(|chunked| (backend, chunked)));
    for ((backend, chunked), combining) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let results = run_ranks(2, |rank, comm: ThreadComm| {
            let parallel = ParallelConfig { backend: backend.into(), ..ParallelConfig::default() };
            let comm: Arc<dyn Communicator> = match combining {
                true => Arc::new(Combining(Arc::new(comm))),
                false => Arc::new(comm),
            };
            let who_adds = Some(WhoAdds::ByRank);
            let context = BlockContext { who_adds, ..spread(rank, comm, parallel, chunked)? };
            let (block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?;
            assert_eq!(form(&block), MoeForm::modular(Fusion::AddNorm));
            // Rank 1 brings more, and has experts of its own.
            let rows = x.narrow(0, [0, 3][rank], [3, 6][rank])?;
            let ex = &mut Exec::cpu();
            let dims = rows.dims();
            let gain = vec![1.5f32; 16];
            let norm = PreNorm { weight: View::new(&gain, &[16])?, eps: 1e-6 };
            let start = || Buffer::from_vec((0..dims[0] * 16).map(|i| (i % 7) as f32).collect(), dims);
            let (mut residual, mut out) = (start()?, Buffer::zeros(DType::F32, dims)?);
            let (hidden, step) = (TensorView::new(&rows)?, &mut StepContext::default());
            let x = hidden.view()?;
            let io =
                SublayerIo::AddNorm { x, residual: residual.view_mut(), norm, out: out.view_mut().into() };
            block.forward_as(form(&block), io, &mut |_| Ok(()), step, ex)?;
            let sums = run(&block, &rows, DType::F32, ex)?;
            let (mut want, mut want_out) = (start()?, Buffer::zeros(DType::F32, dims)?);
            let sums = TensorView::new(&sums)?;
            let to = (want.view_mut(), want_out.view_mut());
            add_rms_norm_into(sums.view()?, norm.weight, norm.eps, to.0, to.1, ex)?;
            let bits = |buffer: Buffer| buffer.into_tensor().map(|t| bits(&t));
            Ok([(bits(residual)?, bits(want)?), (bits(out)?, bits(want_out)?)])
        });
        for (rank, result) in results.into_iter().enumerate() {
            let [residual, out] = result?;
            assert_eq!(residual.0, residual.1, "{backend} on rank {rank}, combining {combining}");
            assert_eq!(out.0, out.1, "{backend} on rank {rank}, combining {combining}");
        }
    }
    Ok(())
}

#[test]
fn a_layer_whose_sums_stay_leaves_the_norm_to_others() -> Result<()> {
    let (p, ..) = five_experts(2)?;
    let (block, x) = (p.standard()?, p.rows()?);
    assert_eq!(form(&block), MoeForm::modular(Fusion::Nothing));
    let (mut residual, mut out) =
        (Buffer::zeros(DType::F32, x.dims())?, Buffer::zeros(DType::F32, x.dims())?);
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
