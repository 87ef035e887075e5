//! `deepep`: each rank gets only the rows that its experts need, each row once. It has the two forms of DeepEP's
//! kernels.
//!
//! By rank both forms use the places of a gather, and leave the places of rows that a rank does not need empty: the
//! device decides from the ids which rows are sent, so nothing is counted, and the host knows every size. The
//! low-latency form lists the numbers of slots by expert instead of moving rows: nothing is copied, padded or zeroed.
//! It sends ids and rows in one launch where the communicator can and where enough rows stay away; otherwise it gathers
//! all of them. The high-throughput form gathers the ids first.

use candle_core::{Error, Result};
use moe_comm::DeepEpMode;
use moe_kernels::{ActivationFormat, Dispatched, Exec};

use crate::arrive::{all_to_all, dispatch, gather};
use crate::back::Back;
use crate::block_ranks::{BlockBackends, BlockRanks};
use crate::by_slot::Returns;
use crate::call::Call;
use crate::over_ranks::OverRanks;
use crate::prepare_finalize::WhoAdds;
use crate::ranks::EpRanks;
use crate::rows::width;
use crate::transport::Transport;

/// The most tokens that a rank may bring to the low-latency form if ranks add and slots are listed: the number of
/// tokens of the largest graph.
const LISTED_TOKENS: usize = 1024;

pub(super) fn build(block: &BlockRanks<'_>) -> Result<BlockBackends> {
    let high_throughput = || Ok::<_, Error>(OverRanks::high_throughput(block.ranks()?, block.who_adds));
    let low_latency = || {
        // Listed rows are only numbers of slots, so there is always room for the largest graph.
        let tokens = match block.who_adds {
            WhoAdds::BySlot => block.low_latency_tokens,
            WhoAdds::ByRank => LISTED_TOKENS,
        };
        Ok::<_, Error>(OverRanks::low_latency(block.ranks()?, tokens, block.who_adds))
    };
    Ok(match block.geometry.deepep_mode {
        DeepEpMode::HighThroughput => block.always(high_throughput()?),
        DeepEpMode::LowLatency => block.always(low_latency()?),
        DeepEpMode::Auto => {
            let decode = block.boxed(low_latency()?);
            BlockBackends { decode: Some(decode), ..block.always(high_throughput()?) }
        }
    })
}

impl OverRanks {
    /// `deepep` in its mode high_throughput. Each rank receives only the rows that its experts need, each row once,
    /// however many of the rank's experts the token chose. By slot the counts are exact, and ranks exchange them first.
    /// By rank rows have the places of a gather, and the device decides from the ids, which all ranks have, whether a
    /// row is sent.
    pub fn high_throughput(ranks: EpRanks, who_adds: WhoAdds) -> Self {
        Self::new(HighThroughput, ranks, who_adds)
    }

    /// `deepep` in its mode low_latency, for at most `max_num_tokens` tokens per rank and call. No size depends on
    /// routing, as decoding in a captured graph requires. By slot rows arrive in the BatchedExperts format, by rank in
    /// the Listed format.
    pub fn low_latency(ranks: EpRanks, max_num_tokens: usize, who_adds: WhoAdds) -> Self {
        Self::new(LowLatency { max_num_tokens }, ranks, who_adds)
    }
}

#[derive(Debug)]
struct HighThroughput;

impl Transport for HighThroughput {
    fn name(&self) -> &'static str {
        "deepep high_throughput"
    }

    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)> {
        let (arrived, back) = match call.who_adds {
            WhoAdds::BySlot => {
                let (arrived, counts) = all_to_all(&call, None, ex)?;
                let back = Back::to_owners(&call, arrived.ids.view(), &counts, ex)?;
                (arrived, back)
            }
            WhoAdds::ByRank => {
                let counts = call.owned_counts(ex)?;
                (gather(&call, &counts, true, ex)?, Back::Scatter { counts, needed: true })
            }
        };
        Ok((arrived.standard(&call), back))
    }
}

#[derive(Debug)]
struct LowLatency {
    max_num_tokens: usize,
}

impl Transport for LowLatency {
    fn name(&self) -> &'static str {
        "deepep low_latency"
    }

    fn activation_format(&self, who_adds: WhoAdds) -> ActivationFormat {
        match who_adds {
            WhoAdds::BySlot => ActivationFormat::BatchedExperts,
            WhoAdds::ByRank => ActivationFormat::Listed,
        }
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        Some(self.max_num_tokens)
    }

    fn combines(&self) -> bool {
        true
    }

    fn sends_needed_rows(&self) -> Option<&'static str> {
        Some("deepep low_latency, needed rows")
    }

    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)> {
        let counts = call.owned_counts(ex)?;
        if call.who_adds == WhoAdds::ByRank {
            let input = call.input.view();
            let needed = call.ranks.dispatches(&counts, width(call.ids), width(input), input.dtype());
            let arrived = match needed {
                true => dispatch(&call, &counts, ex)?,
                false => gather(&call, &counts, false, ex)?,
            };
            return Ok((arrived.listed(&call, ex)?, Back::Scatter { counts, needed }));
        }
        let block = counts.into_iter().max().unwrap_or(0);
        let (arrived, _) = all_to_all(&call, Some(block), ex)?;
        let rows = (arrived.rows.view(), arrived.ids.view(), block);
        let (batches, returns) = Returns::of_batches(call.op, call.ranks, rows, call.ids, ex)?;
        let dispatched = Dispatched::batched(batches.rows, batches.counts, call.ids, call.weights);
        Ok((dispatched, Back::Slots(returns)))
    }
}
