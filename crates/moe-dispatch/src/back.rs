//! The ways in which the experts' results return to the tokens' owners; several backends share them.

use candle_core::{DType, Result};
use moe_comm::FusedCollective;
use moe_kernels::{Dispatched, Exec, Lent, View, ViewMut, WeightAndReduce};

use crate::by_rank::{partial_sums, whole_rows};
use crate::by_slot::{Returns, add_segments, add_slots};
use crate::call::Call;
use crate::error::refuse;
use crate::ranks::EpRanks;
use crate::reduce::reduce_into;
use crate::slot_bias::add_slot_bias;

/// The way in which the experts' results of one call return.
#[derive(Debug)]
pub(crate) enum Back {
    /// By slot: the segments of cut experts are sent to the owners.
    Segments,
    /// By slot: slot rows are sent to the owners.
    Slots(Returns),
    /// By rank: every rank has the same tokens, and the sums are still to be added over the ranks.
    InPlace,
    /// By rank: a reduce-scatter to the owners, which have `counts` tokens. With `needed` a rank has only the rows that
    /// its experts need.
    Scatter { counts: Vec<usize>, needed: bool },
}

impl Back {
    /// The return of slot rows to the owners of a call's tokens. `arrived` are the ids that arrived, in one block of
    /// rows for each rank.
    pub fn to_owners(call: &Call, arrived: View, counts: &[usize], ex: &mut Exec) -> Result<Self> {
        Returns::of_rows(call.op, call.ranks, (arrived, counts), call.ids, ex).map(Self::Slots)
    }

    /// Fails if the experts weight rows that the tokens' owners must weight.
    pub fn expect(&self, op: &str, strategy: WeightAndReduce) -> Result<()> {
        if matches!(self, Self::Segments | Self::Slots(_)) && strategy != WeightAndReduce::Delegate {
            refuse!(
                Composition,
                "{op}: expected experts that return unweighted rows (Delegate), got {strategy:?}: only a token's \
                 owner can weight them; add by rank, or choose such experts"
            )
        }
        Ok(())
    }

    /// Writes the experts' results to `out`, as [`PrepareFinalize::finalize`](crate::PrepareFinalize::finalize) does.
    pub fn finalize(
        &self,
        (op, ranks): (&str, &EpRanks),
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        match self {
            Self::Segments => {
                let slots = add_segments(op, ranks, expert_out, dispatched, ex)?;
                add_slots(ranks, slots.view(), dispatched, out, ex)
            }
            Self::Slots(returns) => {
                let slots = returns.travel(op, ranks, expert_out, dispatched, ex)?;
                add_slots(ranks, slots.view(), dispatched, out, ex)
            }
            Self::InPlace => {
                let mut rows = whole_rows(expert_out, ex)?;
                if let (Some(bias), Lent::Owned(rows)) = (dispatched.slot_bias, &mut rows) {
                    add_slot_bias(op, bias, dispatched.owner_topk_ids, rows.view_mut())?;
                }
                let routing = (dispatched.owner_topk_ids, dispatched.owner_topk_weights);
                reduce_into(op, rows.view(), dispatched, routing, strategy, out, ex)
            }
            Self::Scatter { counts, needed } => {
                let sums = partial_sums(op, expert_out, dispatched, strategy, ex)?;
                ranks.for_owned(DType::F32, out, ex, |rows, ex| {
                    let needs = needed.then(|| ranks.needs(op, dispatched.topk_ids()?)).transpose()?;
                    let call = FusedCollective::ScatterSums { sums: sums.view(), counts, needs, out: rows };
                    call.run(&*ranks.ep, ex)
                })
            }
        }
    }
}
