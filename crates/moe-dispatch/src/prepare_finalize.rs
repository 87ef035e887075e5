//! The contract between a Mixture-of-Experts layer and the backend that moves its tokens.
//!
//! It is vLLM's prepare/finalize contract (`fused_moe/modular_kernel.py`), with one change: the
//! experts return *unweighted* f32 rows, or sums that they have weighted themselves, and
//! [`Combine`] says who adds what.

use std::sync::Arc;

use candle_core::{DType, Device, Result, bail};
use moe_comm::AddNorm;
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::{LocalExperts, Tokens};

/// Who weights and adds the rows that the ranks compute for a token.
// This enum is exhaustive: every backend must say how it adds in each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhoAdds {
    /// Slot rows are sent unweighted to the token's owner, which weights them and adds them in the order k = 0..K-1.
    /// This gives the bits of one rank.
    BySlot,
    /// Each rank weights and adds the slots that it computes, and the ranks' sums are added. This sends 1/K of the
    /// bytes, and the f32 rounding depends on the ranks.
    ByRank,
}

impl WhoAdds {
    /// The default: by slot on the CPU, by rank on other devices.
    pub fn usual(device: &Device) -> Self {
        if device.is_cpu() { Self::BySlot } else { Self::ByRank }
    }
}

/// What finalize does with the experts' rows, and what it leaves to the caller.
// This enum is exhaustive: a layer must say what follows the experts in each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Only this rank has a part: finalize weights and adds the rows of its experts.
    Here,
    /// [`WhoAdds::BySlot`]: slot rows return to the owners of their tokens, which weight and add them.
    BySlot,
    /// [`WhoAdds::ByRank`] where tokens were sent to other ranks: sums return to the owners of their tokens, which add
    /// them.
    ByRank,
    /// [`WhoAdds::ByRank`] where every rank has the same tokens: an all-reduce adds the ranks' sums in `out`.
    AllReduce,
    /// Like `AllReduce`, but `out` is this rank's part. The caller adds the ranks' parts, together with other sums.
    DeferredToCaller,
}

impl Combine {
    /// Whether experts that weight and reduce by themselves can be used. They cannot if the tokens' owners must weight
    /// the rows.
    pub fn takes_reduced_rows(self) -> bool {
        self != Self::BySlot
    }

    /// Whether such experts may write `out` themselves, before [`complete_reduced`](PrepareFinalize::complete_reduced).
    /// Finalize would only copy their rows.
    pub fn is_in_place(self) -> bool {
        matches!(self, Self::Here | Self::AllReduce | Self::DeferredToCaller)
    }

    /// Whether finalize computes `out` without a collective.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Here | Self::DeferredToCaller)
    }
}

/// Brings tokens to the experts of this rank (prepare) and their rows back (finalize).
///
/// [`Dispatcher`](crate::Dispatcher) makes both calls with tensors. With views, and experts that double their rows:
///
/// ```
/// use moe_dispatch::{Exec, NoEp, PrepareFinalize, Tokens, View, ViewMut, WeightAndReduce};
///
/// let mut ex = Exec::cpu();
/// let hidden = [1f32, 2., 3., 4.]; // [T, H] = [2, 2]
/// let topk_ids = [0u32, 3]; // [T, K] = [2, 1]
/// let topk_weights = [0.5f32, 1.];
/// let tokens = Tokens::new(
///     View::new(&hidden, &[2, 2])?,
///     View::new(&topk_ids, &[2, 1])?,
///     View::new(&topk_weights, &[2, 1])?,
/// );
/// let backend = NoEp::new();
/// let dispatched = backend.prepare(tokens, None, &mut ex)?;
/// let rows: Vec<f32> = dispatched.rows.view().cpu::<f32>()?.iter().map(|x| 2. * x).collect();
/// let rows = View::new(&rows, &[2, 1, 2])?; // [T', K, H], unweighted
/// let mut out = [0f32; 4];
/// let sums = ViewMut::new(&mut out, &[2, 2])?;
/// backend.finalize(rows, &dispatched, WeightAndReduce::Delegate, sums, &mut ex)?;
/// assert_eq!(out, [1., 2., 6., 8.]);
/// # Ok::<(), moe_dispatch::candle::Error>(())
/// ```
///
/// # Shapes
/// | argument | shape, dtype |
/// |---|---|
/// | `tokens` | see [`Tokens`] |
/// | `expert_out` | [T', K, H], or [E_local, max_tokens, H] if rows are batched; f32, unweighted (see [`Dispatched`]) |
/// | with `NoOp` | [T', H] of [`reduced_dtype`](PrepareFinalize::reduced_dtype) |
/// | `out` | [T, H] model dtype; all of it is written |
///
/// Experts that split w2 over ranks may return their partial sums with one more leading dimension, [S_local, T', K, H]
/// in ascending segment order. The backend that divides the experts adds the segments in order.
///
/// # Collectives
/// On several ranks prepare and finalize are collectives: every rank of the group makes the same calls in the same
/// order, even if T = 0 and if no row arrived. The backend keeps no state of a call. Buffers, counts and permutations
/// that finalize needs again are in the handle of [`Dispatched`]. The number of tokens of other ranks is either fixed
/// (`max_num_tokens_per_rank`), or agreed before the step, or exchanged by prepare.
pub trait PrepareFinalize: Send + Sync {
    /// The name in error messages and logs.
    fn name(&self) -> &'static str;

    /// The launches of prepare, for plans: the name, and how rows travel where that depends on the step. `counts` are
    /// the numbers of tokens that the ranks bring, each with K experts and H elements of `dtype`.
    fn dispatch_kernel(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> &'static str {
        let _ = (counts, top_k, hidden, dtype);
        self.name()
    }

    /// The layout of the rows that prepare returns.
    fn activation_format(&self) -> ActivationFormat;

    /// Who weights and adds the experts' rows.
    fn combine(&self) -> Combine;

    /// The largest number of tokens that one rank may bring to a call; `None` means no limit.
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        None
    }

    /// Number of ranks whose tokens can arrive here. The blocks of batched rows have room for this number times
    /// `max_num_tokens_per_rank` rows.
    fn num_dispatchers(&self) -> usize {
        1
    }

    /// Rows of an expert's block in the BatchedExperts format: room for everything that the dispatching ranks may send.
    /// `None` in the other formats, and without a limit.
    fn block_rows(&self) -> Option<usize> {
        let most = self.max_num_tokens_per_rank()?.saturating_mul(self.num_dispatchers());
        (self.activation_format() == ActivationFormat::BatchedExperts).then_some(most)
    }

    /// The largest number of rows that a call passes to the experts if each rank brings at most `tokens` tokens. In the
    /// BatchedExperts format it is the number for each local expert.
    fn max_rows(&self, tokens: usize) -> usize {
        tokens
    }

    /// The number of tokens that each rank brings to a call to which this rank brings `tokens`, for callers that cut
    /// the tokens into several calls. `None` if ranks need not agree. It is a collective unless the ranks have `agreed`
    /// on the answer before.
    ///
    /// # Errors
    /// The ranks agreed on other numbers; a rank died.
    fn rank_tokens(
        &self,
        tokens: usize,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Option<Arc<[usize]>>> {
        let _ = (tokens, agreed, ex);
        Ok(None)
    }

    /// The local slots of the physical experts; `None` means that all are on this rank and the physical id is the local
    /// slot. A layer checks this against its router and its experts.
    fn local_experts(&self) -> Option<&LocalExperts> {
        None
    }

    /// Whether prepare multiplies a copy of the rows by the router weight, so that combine uses
    /// weight 1 (`apply_router_weight_on_input`, Llama-4).
    fn applies_router_weight_on_input(&self) -> bool {
        false
    }

    /// The rest of finalize if the experts have written weighted and reduced rows to `out` [T, H] themselves. This is
    /// only for a [combine](Self::combine) that [is in place](Combine::is_in_place).
    ///
    /// # Errors
    /// A rank died.
    fn complete_reduced(&self, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let _ = (out, ex);
        Ok(())
    }

    /// The dtype in which finalize takes the rows of experts that weight and reduce by themselves: f32, or the dtype of
    /// the rows if sums are sent in it.
    fn reduced_dtype(&self, dispatched: &Dispatched) -> DType {
        let _ = dispatched;
        DType::F32
    }

    /// Turns [`Combine::AllReduce`] into [`Combine::DeferredToCaller`] for all later calls. Returns false if the
    /// backend cannot do that.
    #[must_use = "true means that the caller must add the sum"]
    fn defer_sum(&mut self) -> bool {
        false
    }

    /// Brings rows to the experts of this rank. `agreed` is the number of tokens that each rank brings to this call, if
    /// the ranks know it. With `None`, a backend that needs the numbers asks the other ranks.
    ///
    /// # Errors
    /// Wrong dims or dtypes; more tokens or rows than the backend has room for; a rank that died.
    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>>;

    /// Returns the experts' rows to their owners, weights them and adds them.
    ///
    /// `strategy` comes from the experts. `Delegate` lets the backend choose, which is right for experts that return
    /// unweighted rows.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a strategy that does not fit the format; a rank that died.
    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()>;

    /// Whether [`finalize_add_norm`](Self::finalize_add_norm) ends a call in one launch that also adds up the slots.
    /// All ranks get the same answer.
    fn combines(&self, dispatched: &Dispatched) -> bool {
        let _ = dispatched;
        false
    }

    /// [`combines`](Self::combines) before there is a call, for plans. `counts` are the numbers of tokens that the
    /// ranks bring, each with K slots of H elements.
    fn combines_counts(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let _ = (counts, top_k, hidden, dtype);
        false
    }

    /// [`finalize`](Self::finalize) together with the ops that follow it in a decoder layer: `residual` += the sums of
    /// this rank's tokens, then `out` = norm of `residual`. `expert_out` contains slot rows (`Contiguous`) or sums
    /// (`NoOp`).
    ///
    /// # Errors
    /// The errors of `finalize`; a call for which [`combines`](Self::combines) returns false.
    fn finalize_add_norm(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        end: AddNorm<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = (expert_out, dispatched, strategy, end, ex);
        bail!("{}: sums return without a norm after them", self.name())
    }
}
