//! A path by which routed tokens are computed: prepare, experts, finalize, chunk by chunk.
//!
//! Chunks are rows of the caller's input and output, so nothing is copied to cut or join them. Each chunk reads its
//! rows and writes its rows, and all chunks use the same buffers of the workspace.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_chunking::ChunkPlan;
use moe_dispatch::{AddNorm, Combine, PrepareFinalize, Tokens};
use moe_experts::Experts;
use moe_kernels::candle::{DType, Error, Result};
use moe_kernels::plan::Stage;
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, LaunchedAsOne, Scratch, TensorView, View, ViewMut, WeightAndReduce,
    add_rms_norm_into, add_scaled_into,
};
use tracing::trace_span;

use crate::placed::PlacedExperts;
use crate::shared::SharedExperts;

/// The name in plans of the launch in which sums return from other ranks and are added, with the norm after the sum.
pub(crate) const COMBINE_ADD_NORM: &str = "combine_add_rms_norm";

/// A prepare/finalize backend and the experts that fit it. Cloning shares both.
#[derive(Clone)]
pub(crate) struct Path {
    pub prepare: Arc<dyn PrepareFinalize>,
    pub experts: Arc<dyn Experts>,
}

/// The computation for a layer's tokens.
#[derive(Clone, Copy)]
pub(crate) struct Routed<'a> {
    pub tokens: Tokens<'a>,
    /// The weights \[T\] f32 of the tokens' own rows, if there are zero experts.
    pub identity: Option<View<'a>>,
    pub shared: Option<&'a SharedExperts>,
    /// The experts that turn the tokens' logical ids into physical ones, if that depends on a token's rank. With `None`
    /// the ids are already physical.
    pub near: Option<&'a PlacedExperts>,
}

impl<'a> Routed<'a> {
    fn narrow(&self, start: usize, len: usize) -> Result<Routed<'a>> {
        Ok(Routed {
            tokens: self.tokens.narrow(start, len)?,
            identity: self.identity.map(|weights| weights.narrow(start, len)).transpose()?,
            shared: self.shared,
            near: self.near,
        })
    }
}

/// The place of a layer's results.
pub(crate) enum End<'a> {
    /// [T, H], which is written completely.
    Sum(ViewMut<'a>),
    /// The sums are added to the residual stream and normed. Only for layers without zero experts and shared experts.
    AddNorm(AddNorm<'a>),
}

impl End<'_> {
    fn narrow(&mut self, start: usize, len: usize) -> Result<End<'_>> {
        Ok(match self {
            Self::Sum(out) => End::Sum(out.reborrow().narrow(start, len)?),
            Self::AddNorm(end) => End::AddNorm(end.narrow(start, len)?),
        })
    }
}

impl Path {
    /// Computes all tokens, in chunks of at most `size`, and of no more than the backend takes. `agreed` has the
    /// meaning that it has in [`PrepareFinalize::prepare`].
    pub fn run(
        &self,
        routed: &Routed,
        size: Option<NonZeroUsize>,
        mut end: End,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some(size) = self.chunk_size(size) else {
            return self.chunk(routed, end, agreed, ex);
        };
        let tokens = routed.tokens.hidden.rows();
        let Some(all) = self.prepare.rank_tokens(tokens, agreed, ex)? else {
            for rows in ChunkPlan::new(tokens, size).ranges() {
                let to = end.narrow(rows.start, rows.len())?;
                self.chunk(&routed.narrow(rows.start, rows.len())?, to, agreed, ex)?;
            }
            return Ok(());
        };
        // Every rank runs as many rounds as the rank with the most chunks.
        let rounds = all.iter().map(|&tokens| moe_chunking::num_chunks(tokens, size)).max().unwrap_or(0);
        let plan = ChunkPlan::new(tokens, size).with_rounds(rounds).map_err(Error::wrap)?;
        for (round, rows) in plan.ranges().enumerate() {
            let counts = ChunkPlan::rank_tokens(round, &all, size);
            let to = end.narrow(rows.start, rows.len())?;
            self.chunk(&routed.narrow(rows.start, rows.len())?, to, Some(&counts), ex)?;
        }
        Ok(())
    }

    /// The largest number of tokens of a chunk, if chunks of at most `size` are requested; `None` means all tokens at
    /// once.
    fn chunk_size(&self, size: Option<NonZeroUsize>) -> Option<NonZeroUsize> {
        let limit = self.prepare.max_num_tokens_per_rank().and_then(NonZeroUsize::new);
        size.into_iter().chain(limit).min()
    }

    /// The tokens of each chunk of [`run`](Self::run), if no other rank has more tokens.
    pub fn chunks(&self, tokens: usize, size: Option<NonZeroUsize>) -> Vec<usize> {
        match self.chunk_size(size) {
            Some(size) => ChunkPlan::new(tokens, size).ranges().map(|rows| rows.len()).collect(),
            None => vec![tokens],
        }
    }

    /// The stage after the experts of a call, if there is one.
    pub fn end(&self) -> Option<Stage> {
        let is_reduced = self.experts.weight_and_reduce() == WeightAndReduce::NoOp;
        let (computes, kernel): (&'static [&'static str], _) = match (self.prepare.combine(), is_reduced) {
            (Combine::Here | Combine::DeferredToCaller, true) => return None,
            (Combine::Here | Combine::DeferredToCaller, false) => (&["combine"], "weighted sum"),
            (Combine::BySlot, _) => (&["rows to their owners", "combine"], "rows over ranks, weighted sum"),
            (Combine::AllReduce, true) => (&["sum over ranks"], "all-reduce"),
            (Combine::AllReduce, false) => (&["combine", "sum over ranks"], "weighted sum, all-reduce"),
            (Combine::ByRank, true) => (&["sums to their owners"], "reduce-scatter"),
            (Combine::ByRank, false) => {
                (&["combine", "sums to their owners"], "weighted sum, reduce-scatter")
            }
        };
        Some(Stage::new(computes, kernel))
    }

    /// Notes the launches of [`end`](Self::end).
    fn launch_end(&self, ex: &Exec) -> Option<LaunchedAsOne> {
        self.end().and_then(|stage| ex.launched_as_one(|| stage.kernel))
    }

    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let Tokens { hidden, topk_ids, .. } = &tokens;
        let _dispatch = ex.launched_as_one(|| {
            let same = vec![hidden.rows(); self.prepare.num_dispatchers()];
            let [top_k, width] = [topk_ids, hidden].map(|rows| rows.dims().last().copied().unwrap_or(0));
            self.prepare.dispatch_kernel(agreed.unwrap_or(&same), top_k, width, hidden.dtype())
        });
        self.prepare.prepare(tokens, agreed, ex)
    }

    /// Computes one chunk. On several ranks it is a collective, even for a rank without tokens.
    fn chunk(&self, routed: &Routed, end: End, agreed: Option<&[usize]>, ex: &mut Exec) -> Result<()> {
        let physical = routed.near.map(|placed| placed.physical(routed.tokens.topk_ids, ex)).transpose()?;
        let routed = match &physical {
            Some(ids) => Routed { tokens: Tokens { topk_ids: ids.view(), ..routed.tokens }, ..*routed },
            None => *routed,
        };
        match (end, routed.shared) {
            (End::AddNorm(end), _) => self.add_norm(&routed, end, agreed, ex),
            (End::Sum(out), Some(shared)) => {
                let hidden = routed.tokens.hidden;
                shared.add_to(hidden, out, ex, |out, ex| self.sum(&routed, out, agreed, ex))
            }
            (End::Sum(out), None) => self.sum(&routed, out, agreed, ex),
        }
    }

    /// Adds the sums to the residual stream and norms the result. The launch in which the sums return from other ranks
    /// does this, if it can.
    fn add_norm(&self, routed: &Routed, end: AddNorm, agreed: Option<&[usize]>, ex: &mut Exec) -> Result<()> {
        let dispatched = self.prepare(routed.tokens, agreed, ex)?;
        if self.prepare.combines(&dispatched) {
            let (rows, strategy) = self.slots_or_sums(&dispatched, ex)?;
            let _end = ex.launched_as_one(|| COMBINE_ADD_NORM);
            return self.prepare.finalize_add_norm(rows.view(), &dispatched, strategy, end, ex);
        }
        let mut sums = ex.scratch(DType::F32, end.residual.dims())?;
        self.finish(dispatched, sums.view_mut(), ex)?;
        add_rms_norm_into(sums.view(), end.norm.weight, end.norm.eps, end.residual, end.out, ex)
    }

    /// Computes the experts' slot rows, or their sums if the experts add them.
    fn slots_or_sums(&self, dispatched: &Dispatched, ex: &mut Exec) -> Result<(Scratch, WeightAndReduce)> {
        let strategy = self.experts.weight_and_reduce();
        if strategy == WeightAndReduce::NoOp
            && !dispatched.is_empty()
            && let Some(rows) = self.experts.slot_rows(dispatched, ex)?
        {
            return Ok((rows, WeightAndReduce::Contiguous));
        }
        let mut rows = ex.scratch(DType::F32, &self.experts.out_dims(dispatched)?)?;
        self.apply(dispatched, rows.view_mut(), ex)?;
        Ok((rows, strategy))
    }

    /// Computes the sums without shared experts.
    fn sum(&self, routed: &Routed, mut out: ViewMut, agreed: Option<&[usize]>, ex: &mut Exec) -> Result<()> {
        let dispatched = self.prepare(routed.tokens, agreed, ex)?;
        self.finish(dispatched, out.reborrow(), ex)?;
        match routed.identity {
            Some(weights) => add_scaled_into(routed.tokens.hidden, weights, out, ex),
            None => Ok(()),
        }
    }

    /// Runs the experts and finalize.
    fn finish(&self, dispatched: Dispatched, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let strategy = self.experts.weight_and_reduce();
        let slot_bias = self.experts.deferred_bias().map(TensorView::new).transpose()?;
        let slot_bias = slot_bias.as_ref().map(TensorView::view).transpose()?;
        let mut dispatched = dispatched;
        dispatched.slot_bias = slot_bias;
        let is_final = strategy == WeightAndReduce::NoOp && self.prepare.combine().is_in_place();
        if is_final && out.dtype() == DType::F32 {
            // The experts' rows are already the rows of the block. Finalize would only copy them and add the ranks'
            // sums.
            self.apply(&dispatched, out.reborrow(), ex)?;
            let _end = self.launch_end(ex);
            return self.prepare.complete_reduced(out, ex);
        }
        let dtype = match strategy {
            WeightAndReduce::NoOp => self.prepare.reduced_dtype(&dispatched),
            _ => DType::F32,
        };
        let mut rows = ex.scratch(dtype, &self.experts.out_dims(&dispatched)?)?;
        self.apply(&dispatched, rows.view_mut(), ex)?;
        let _end = self.launch_end(ex);
        self.prepare.finalize(rows.view(), &dispatched, strategy, out, ex)
    }

    /// Runs the experts, unless no row has arrived.
    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        // Experts that weight and reduce choose a kernel for each call, and note it themselves.
        let _products = match self.experts.weight_and_reduce() {
            WeightAndReduce::NoOp => None,
            _ => ex.launched_as_one(|| self.experts.products()),
        };
        if dispatched.is_empty() {
            return Ok(());
        }
        trace_span!("experts").in_scope(|| self.experts.apply(dispatched, out, ex))
    }

    /// The bytes of the buffers that grow with a chunk: received rows, the experts' results between their products, and
    /// the slot rows on their way to the output. The input and the output of the layer are not included.
    pub fn chunk_bytes(&self, tokens: usize, top_k: usize, shared: Option<&SharedExperts>) -> Result<usize> {
        let shape = self.experts.shape();
        let rows = self.prepare.max_rows(tokens);
        let h = shape.hidden_size;
        let product = |factors: &[usize]| factors.iter().fold(1usize, |n, &f| n.saturating_mul(f));
        let format = self.prepare.activation_format();
        let local = shape.num_local_experts;
        let batched = format == ActivationFormat::BatchedExperts;
        let slots = if batched { product(&[local, rows]) } else { product(&[rows, top_k]) };
        // A list has room for the numbers of all slots.
        let lists = match format {
            ActivationFormat::Listed => product(&[local, slots, DType::U32.size_in_bytes()]),
            _ => 0,
        };
        let float = DType::F32.size_in_bytes();
        let model = shape.dtype.size_in_bytes();
        let several_ranks = self.prepare.num_dispatchers() > 1;
        // These rows exist three times: packed for sending, received, and in the order of slots.
        let travelling = if several_ranks { product(&[3, tokens, top_k, h, float]) } else { 0 };
        let arrived = if several_ranks || batched { product(&[slots.max(rows), h, model]) } else { 0 };
        let shared = shared.map_or(0, |s| product(&[tokens, s.intermediate_size() * model + h * float]));
        let out = product(&[slots, h, float, self.experts.segments().unwrap_or(1)]);
        let experts = self.experts.workspace(rows, top_k)?.bytes();
        Ok([experts, out, travelling, arrived, lists, shared].into_iter().fold(0, usize::saturating_add))
    }
}
