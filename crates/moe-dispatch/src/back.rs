//! The ways back of what experts compute, which several backends share.

use candle_core::{DType, Result, bail};
use moe_comm::FusedCollective;
use moe_kernels::{Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::by_rank::{partial_sums, whole_rows};
use crate::by_slot::{Returns, add_segments, add_slots};
use crate::call::Call;
use crate::ranks::EpRanks;
use crate::reduce::reduce_into;

/// The way back of what the experts compute for one call.
#[derive(Debug)]
pub(crate) enum Back {
    /// By slot: segments of cut experts to the owners.
    Segments,
    /// By slot: slot rows to the owners.
    Slots(Returns),
    /// By rank: sums of the same tokens in place, that are still to be added up over the ranks.
    InPlace,
    /// By rank: a reduce-scatter to the owners, who have `counts` tokens; with `needed` a rank has only the rows that its experts need.
    Scatter { counts: Vec<usize>, needed: bool },
}

impl Back {
    /// Slot rows to the owners of the tokens of a call, from the ids that arrived in blocks of rows by rank.
    pub fn to_owners(call: &Call, arrived: View, counts: &[usize], ex: &mut Exec) -> Result<Self> {
        Returns::of_rows(call.op, call.ranks, (arrived, counts), call.ids, ex).map(Self::Slots)
    }

    /// Fails for experts that weight rows which their tokens' owners must weight.
    pub fn expect(&self, op: &str, strategy: WeightAndReduce) -> Result<()> {
        if matches!(self, Self::Segments | Self::Slots(_)) && strategy != WeightAndReduce::Delegate {
            bail!(
                "{op}: expected experts that return unweighted rows (Delegate), got {strategy:?}: only a token's \
                 owner can weight them; add by rank, or choose such experts"
            )
        }
        Ok(())
    }

    /// Brings what the experts computed to `out`, as [`PrepareFinalize::finalize`](crate::PrepareFinalize::finalize) does.
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
                let rows = whole_rows(expert_out, ex)?;
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
