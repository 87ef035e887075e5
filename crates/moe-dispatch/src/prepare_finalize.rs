//! The contract between a Mixture-of-Experts layer and whatever moves its tokens.
//!
//! It is vLLM's prepare/finalize contract (`fused_moe/modular_kernel.py`), with one change: the
//! experts return *unweighted* f32 rows, and the token's owner alone weights them and adds them
//! in slot order. So the result does not depend on which rank computed a row.

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::{EpRanks, LocalExperts, Receiver};

/// Brings tokens to the experts of this rank (prepare) and their rows back (finalize).
///
/// # Shapes
/// | argument | shape, dtype |
/// |---|---|
/// | `hidden` | [T, H] model dtype; never written |
/// | `topk_ids` | [T, K] u32 physical ids, `u32::MAX` = no expert |
/// | `topk_weights` | [T, K] f32 |
/// | `expert_out` | [T', K, H], or [E_local, max_tokens, H] where rows are batched, f32, unweighted (see [`Dispatched`]); [T, H] with `NoOp` |
/// | `out` | [T, H] model dtype; all of it is written |
///
/// Experts that split w2 over ranks return their partial sums with one more leading dimension,
/// [S_local, T', K, H] in ascending segment order; the backend that divides the experts gathers
/// them and adds the segments in order.
///
/// # Collectives
/// On several ranks both calls are collectives: every rank of the group makes the same calls in
/// the same order, also with T = 0, also when no row arrived. Nothing about a call lives in the
/// backend: buffers, counts and permutations that finalize needs again travel in the handle of
/// [`Dispatched`], what is still in flight in the [`Receiver`]. How many tokens other ranks bring
/// is either fixed (`max_num_tokens_per_rank`), or agreed before the step, or exchanged by
/// prepare itself.
pub trait PrepareFinalize: Send + Sync {
    /// The name in error messages and logs.
    fn name(&self) -> &'static str;

    /// The layout of the rows that prepare hands over.
    fn activation_format(&self) -> ActivationFormat;

    /// Whether `out` is complete. If not, it is this rank's part and the caller adds the parts of
    /// all ranks that share the tokens, together with what else it must reduce.
    fn output_is_reduced(&self) -> bool;

    /// The most tokens that one rank may bring to a call; `None` = no limit.
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        None
    }

    /// The ranks with whole experts that this backend joins, from which follow their number, the experts of this one and what
    /// happens to router weights; `None` for backends that know these otherwise.
    fn ep_ranks(&self) -> Option<&EpRanks> {
        None
    }

    /// Ranks whose tokens can arrive here: batched rows have room for that many times
    /// `max_num_tokens_per_rank`.
    fn num_dispatchers(&self) -> usize {
        self.ep_ranks().map_or(1, EpRanks::world_size)
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
        self.ep_ranks().map(|ranks| ranks.rank_tokens(self.name(), tokens, agreed, ex)).transpose()
    }

    /// Where the physical experts live; `None` = all on this rank, physical id = local slot. A
    /// layer checks it against its router and its experts.
    fn local_experts(&self) -> Option<&LocalExperts> {
        self.ep_ranks().map(EpRanks::local_experts)
    }

    /// Whether prepare multiplies a copy of the rows by the router weight, so that combine uses
    /// weight 1 (`apply_router_weight_on_input`, Llama-4).
    fn applies_router_weight_on_input(&self) -> bool {
        self.ep_ranks().is_some_and(|ranks| ranks.router_weight_on_input)
    }

    /// Whether finalize only copies rows that the experts have weighted and reduced: then they may write
    /// the block's output themselves.
    fn finalize_copies_reduced(&self) -> bool {
        false
    }

    /// What remains of finalize once the experts have written weighted and reduced rows to `out` [T, H]
    /// themselves, where [`finalize_copies_reduced`](Self::finalize_copies_reduced) lets them.
    ///
    /// # Errors
    /// A rank that died.
    fn complete_reduced(&self, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let _ = (out, ex);
        Ok(())
    }

    /// Whether finalize adds up rows that each rank's experts have weighted and reduced, so that experts
    /// that do so by themselves are welcome also above one rank, and where the rows of the BatchedExperts format are listed.
    fn adds_partial_sums(&self) -> bool {
        false
    }

    /// Leaves the sum over the ranks that share the tokens to the caller from now on, so that
    /// [`output_is_reduced`](Self::output_is_reduced) no longer holds; false for a backend that cannot.
    fn defer_sum(&mut self) -> bool {
        false
    }

    /// The dtype in which prepare takes `topk_ids`.
    fn topk_ids_dtype(&self) -> DType {
        DType::U32
    }

    /// Whether the begin halves return before the data has arrived, so that work placed between
    /// begin and end is hidden behind the transfer.
    fn supports_async(&self) -> bool {
        false
    }

    /// Brings rows to the experts of this rank. `agreed`: the tokens that each rank brings to this call, where the
    /// ranks know it; `None`: a backend that needs it asks the others.
    ///
    /// # Errors
    /// Wrong dims or dtypes; more tokens or rows than the backend has room for; a rank that died.
    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
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

    /// First half of [`prepare`](Self::prepare). Begin then end equals the whole call.
    fn begin_prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Receiver<'a, Dispatched<'a>>> {
        self.prepare(hidden, topk_ids, topk_weights, agreed, ex).map(Receiver::ready)
    }

    /// First half of [`finalize`](Self::finalize). Begin then end equals the whole call; `out` is
    /// complete after end only.
    fn begin_finalize<'a>(
        &'a self,
        expert_out: View<'a>,
        dispatched: &'a Dispatched<'a>,
        strategy: WeightAndReduce,
        out: ViewMut<'a>,
        ex: &mut Exec,
    ) -> Result<Receiver<'a, ()>> {
        self.finalize(expert_out, dispatched, strategy, out, ex).map(Receiver::ready)
    }
}
