//! What the backends over expert-parallel ranks share: everything but how rows reach their experts.
//!
//! A call has four parts, under DeepEP's and SGLang's names: rows leave for the experts
//! (`dispatch_a`) and arrive there (`dispatch_b`); computed slot rows leave for their owners
//! (`combine_a`), who weight and add them (`combine_b`). After an a, rows are on their way and the
//! caller may compute something else. A backend says how its rows are dispatched; combine, the
//! halves and what a layer asks a backend are the same for all and stand here.

use std::sync::Arc;

use candle_core::Result;
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::combine::{combine_a, combine_b};
use crate::prepare_finalize::PrepareFinalize;
use crate::ranks::EpRanks;
use crate::receiver::Receiver;
use crate::transport::Transport;

/// How a backend dispatches; every implementor is a [`PrepareFinalize`].
pub trait Exchange: Send + Sync {
    /// The name in error messages and logs.
    const NAME: &'static str;

    /// The layout of the rows that arrive.
    const FORMAT: ActivationFormat;

    /// Whether ranks bring tokens of their own, so that their counts must be agreed.
    const COUNTS_DIFFER: bool = true;

    /// A dispatch whose rows are on their way.
    type Dispatching<'a>: Send
    where
        Self: 'a;

    /// The ranks.
    fn ranks(&self) -> &EpRanks;

    /// What moves slot rows back to their owners.
    fn transport(&self) -> &dyn Transport;

    /// See [`PrepareFinalize::max_num_tokens_per_rank`].
    fn max_num_tokens(&self) -> Option<usize> {
        None
    }

    /// See [`PrepareFinalize::max_rows`].
    fn max_rows(&self, tokens: usize) -> usize;

    /// Rows leave for the experts; `agreed` as in [`PrepareFinalize::prepare`].
    ///
    /// # Errors
    /// Wrong dims or dtypes; more tokens than there is room for; an unknown expert; a rank that died.
    fn dispatch_a<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Self::Dispatching<'a>>;

    /// What has arrived.
    ///
    /// # Errors
    /// Ranks that disagree, or died.
    fn dispatch_b<'a>(&'a self, begun: Self::Dispatching<'a>, ex: &mut Exec) -> Result<Dispatched<'a>>;
}

impl<B: Exchange> PrepareFinalize for B {
    fn name(&self) -> &'static str {
        B::NAME
    }

    fn activation_format(&self) -> ActivationFormat {
        B::FORMAT
    }

    fn output_is_reduced(&self) -> bool {
        true
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        self.max_num_tokens()
    }

    fn ep_ranks(&self) -> Option<&EpRanks> {
        Some(self.ranks())
    }

    fn max_rows(&self, tokens: usize) -> usize {
        Exchange::max_rows(self, tokens)
    }

    fn supports_async(&self) -> bool {
        self.transport().is_async()
    }

    fn rank_tokens(
        &self,
        tokens: usize,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Option<Arc<[usize]>>> {
        match B::COUNTS_DIFFER {
            true => self.ranks().rank_tokens(B::NAME, tokens, agreed, ex).map(Some),
            false => Ok(None),
        }
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let begun = self.dispatch_a(hidden, topk_ids, topk_weights, agreed, ex)?;
        self.dispatch_b(begun, ex)
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let sent = combine_a(B::NAME, self.transport(), expert_out, dispatched, strategy, ex)?;
        combine_b(B::NAME, self.ranks(), self.transport(), sent, dispatched, out, ex)
    }

    fn begin_prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Receiver<'a, Dispatched<'a>>> {
        let begun = self.dispatch_a(hidden, topk_ids, topk_weights, agreed, ex)?;
        Ok(pending(self.transport(), "dispatch", move |ex| self.dispatch_b(begun, ex)))
    }

    fn begin_finalize<'a>(
        &'a self,
        expert_out: View<'a>,
        dispatched: &'a Dispatched<'a>,
        strategy: WeightAndReduce,
        out: ViewMut<'a>,
        ex: &mut Exec,
    ) -> Result<Receiver<'a, ()>> {
        let (ranks, transport) = (self.ranks(), self.transport());
        let sent = combine_a(B::NAME, transport, expert_out, dispatched, strategy, ex)?;
        let end = move |ex: &mut Exec| combine_b(B::NAME, ranks, transport, sent, dispatched, out, ex);
        Ok(pending(transport, "combine", end))
    }
}

/// Fails the group if a call that has begun is dropped before its second half: peers wait for it.
struct Begun<'a> {
    transport: &'a dyn Transport,
    what: &'static str,
    ended: bool,
}

impl Begun<'_> {
    fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.transport.abort(&format!("a {} that had begun was dropped before its end", self.what));
        }
    }
}

/// The second half of a call, as a receiver.
fn pending<'a, T>(
    transport: &'a dyn Transport,
    what: &'static str,
    end: impl FnOnce(&mut Exec) -> Result<T> + Send + 'a,
) -> Receiver<'a, T> {
    let begun = Begun { transport, what, ended: false };
    Receiver::pending(move |ex| {
        begun.end();
        end(ex)
    })
}
