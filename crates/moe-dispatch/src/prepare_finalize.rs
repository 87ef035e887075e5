//! The contract between a Mixture-of-Experts layer and whatever moves its tokens.
//!
//! It is vLLM's prepare/finalize contract (`fused_moe/modular_kernel.py`), with one change: the
//! experts return *unweighted* f32 rows, or sums that they have weighted themselves, and
//! [`Combine`] says who adds what.

use std::sync::Arc;

use candle_core::{DType, Device, Result, bail};
use moe_comm::AddNorm;
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::{LocalExperts, Tokens};

/// Who weights and adds the rows that ranks compute for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhoAdds {
    /// Slot rows travel unweighted to the token's owner, who weights them and adds k = 0..K-1: the bits of one rank.
    BySlot,
    /// Each rank weights and adds the slots that it computes, and the ranks' sums are added: a K-th of the bytes, and
    /// f32 rounding that depends on the ranks.
    ByRank,
}

impl WhoAdds {
    /// Who adds by default: by slot on the CPU, by rank on devices.
    pub fn usual(device: &Device) -> Self {
        if device.is_cpu() { Self::BySlot } else { Self::ByRank }
    }
}

/// What finalize does with the experts' rows, and what is left to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// No rank but this one has a part: its experts' rows are weighted and added here.
    Here,
    /// [`WhoAdds::BySlot`]: slot rows return to the owners of their tokens.
    BySlot,
    /// [`WhoAdds::ByRank`] where tokens have travelled: sums return to the owners of their tokens, who add them.
    ByRank,
    /// [`WhoAdds::ByRank`] where every rank has the same tokens: an all-reduce adds the ranks' sums in `out`.
    AllReduce,
    /// As `AllReduce`, but `out` is this rank's part: the caller adds the ranks', with what else it must add.
    DeferredToCaller,
}

impl Combine {
    /// Whether experts that weight and reduce by themselves fit: not where the tokens' owners must weight the rows.
    pub fn takes_reduced_rows(self) -> bool {
        self != Self::BySlot
    }

    /// Whether such experts may write `out` themselves, before
    /// [`complete_reduced`](PrepareFinalize::complete_reduced): finalize would only copy their rows.
    pub fn is_in_place(self) -> bool {
        matches!(self, Self::Here | Self::AllReduce | Self::DeferredToCaller)
    }

    /// Whether finalize leaves `out` without a collective.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Here | Self::DeferredToCaller)
    }
}

/// Brings tokens to the experts of this rank (prepare) and their rows back (finalize).
///
/// # Shapes
/// | argument | shape, dtype |
/// |---|---|
/// | `tokens` | see [`Tokens`] |
/// | `expert_out` | [T', K, H], or [E_local, max_tokens, H] where rows are batched, f32, unweighted (see [`Dispatched`]); [T', H] of [`reduced_dtype`](PrepareFinalize::reduced_dtype) with `NoOp` |
/// | `out` | [T, H] model dtype; all of it is written |
///
/// Experts that split w2 over ranks may return their partial sums with one more leading dimension,
/// [S_local, T', K, H] in ascending segment order; the backend that divides the experts adds
/// the segments in order.
///
/// # Collectives
/// On several ranks both calls are collectives: every rank of the group makes the same calls in
/// the same order, also with T = 0, also when no row arrived. Nothing about a call lives in the
/// backend: buffers, counts and permutations that finalize needs again travel in the handle of
/// [`Dispatched`]. How many tokens other ranks bring is either fixed (`max_num_tokens_per_rank`),
/// or agreed before the step, or exchanged by prepare itself.
pub trait PrepareFinalize: Send + Sync {
    /// The name in error messages and logs.
    fn name(&self) -> &'static str;

    /// The layout of the rows that prepare hands over.
    fn activation_format(&self) -> ActivationFormat;

    /// Who weights and adds the experts' rows.
    fn combine(&self) -> Combine;

    /// The most tokens that one rank may bring to a call; `None` = no limit.
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        None
    }

    /// Ranks whose tokens can arrive here: batched rows have room for that many times
    /// `max_num_tokens_per_rank`.
    fn num_dispatchers(&self) -> usize {
        1
    }

    /// Rows of an expert's block in the BatchedExperts format: all that the dispatchers may bring. `None` in the other
    /// formats, and without a limit.
    fn block_rows(&self) -> Option<usize> {
        let most = self.max_num_tokens_per_rank()?.saturating_mul(self.num_dispatchers());
        (self.activation_format() == ActivationFormat::BatchedExperts).then_some(most)
    }

    /// The most rows that a call hands to the experts, where each rank brings at most `tokens`
    /// tokens: per local expert in the BatchedExperts format.
    fn max_rows(&self, tokens: usize) -> usize {
        tokens
    }

    /// The tokens that each rank brings to a call to which this one brings `tokens`, for callers
    /// that cut the tokens into several calls; `None` where ranks need not agree. It is a
    /// collective unless the ranks have `agreed` on the answer before.
    ///
    /// # Errors
    /// Ranks that agreed on something else; a rank that died.
    fn rank_tokens(
        &self,
        tokens: usize,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Option<Arc<[usize]>>> {
        let _ = (tokens, agreed, ex);
        Ok(None)
    }

    /// Where the physical experts live; `None` = all on this rank, physical id = local slot. A
    /// layer checks it against its router and its experts.
    fn local_experts(&self) -> Option<&LocalExperts> {
        None
    }

    /// Whether prepare multiplies a copy of the rows by the router weight, so that combine uses
    /// weight 1 (`apply_router_weight_on_input`, Llama-4).
    fn applies_router_weight_on_input(&self) -> bool {
        false
    }

    /// What remains of finalize once the experts have written weighted and reduced rows to `out` [T, H]
    /// themselves, where the [combine](Self::combine) [is in place](Combine::is_in_place).
    ///
    /// # Errors
    /// A rank that died.
    fn complete_reduced(&self, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let _ = (out, ex);
        Ok(())
    }

    /// The dtype in which finalize takes the rows of experts that weight and reduce by themselves: f32, or the rows' dtype
    /// where sums travel in it.
    fn reduced_dtype(&self, dispatched: &Dispatched) -> DType {
        let _ = dispatched;
        DType::F32
    }

    /// Turns [`Combine::AllReduce`] into [`Combine::DeferredToCaller`] from now on; false for a backend that cannot.
    fn defer_sum(&mut self) -> bool {
        false
    }

    /// Brings rows to the experts of this rank. `agreed`: the tokens that each rank brings to this call, where the
    /// ranks know it; `None`: a backend that needs it asks the others.
    ///
    /// # Errors
    /// Wrong dims or dtypes; more tokens or rows than the backend has room for; a rank that died.
    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>>;

    /// Brings the experts' rows back to their owner, weights and adds them.
    ///
    /// `strategy` is the experts' own: `Delegate` lets the backend choose, which is right for
    /// experts that return unweighted rows.
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

    /// Whether [`finalize_add_norm`](Self::finalize_add_norm) ends a call in one launch, and adds up slots in it: the same answer on all
    /// ranks.
    fn combines(&self, dispatched: &Dispatched) -> bool {
        let _ = dispatched;
        false
    }

    /// [`combines`](Self::combines) for a call to which ranks bring these numbers of tokens with K slots of H elements each, before
    /// there is one: for plans.
    fn combines_counts(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let _ = (counts, top_k, hidden, dtype);
        false
    }

    /// [`finalize`](Self::finalize) with what follows it in a decoder layer: `residual` += the sums of this rank's tokens, then `out` =
    /// norm of `residual`. `expert_out` are slot rows (`Contiguous`), or sums (`NoOp`).
    ///
    /// # Errors
    /// As `finalize`; a call of which [`combines`](Self::combines) says no.
    fn finalize_add_norm(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        end: AddNorm<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _ = (expert_out, dispatched, strategy, end, ex);
        bail!("{}: sums return without a norm behind them", self.name())
    }
}
