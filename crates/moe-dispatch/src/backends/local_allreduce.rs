//! `local_allreduce`: every rank has the same tokens and its own experts, so no row is sent.

use candle_core::Result;
use moe_comm::shares;
use moe_kernels::{Dispatched, Exec};

use crate::back::Back;
use crate::block_ranks::{BlockBackends, BlockRanks};
use crate::call::Call;
use crate::error::refuse;
use crate::over_ranks::OverRanks;
use crate::prepare_finalize::WhoAdds;
use crate::ranks::EpRanks;
use crate::transport::Transport;

pub(super) fn build(block: &BlockRanks<'_>) -> Result<BlockBackends> {
    Ok(block.always(OverRanks::local_allreduce(block.ranks()?, block.who_adds)?))
}

impl OverRanks {
    /// `local_allreduce`: every rank has the same tokens and computes the slots of its own experts.
    ///
    /// # Errors
    /// The ranks do not all see the same tokens.
    pub fn local_allreduce(ranks: EpRanks, who_adds: WhoAdds) -> Result<Self> {
        let all = ranks.world_size();
        let same = ranks.tp.world_size();
        if all != same {
            refuse!(
                Ranks,
                "local_allreduce: expected one tensor-parallel group of all {all} ranks, got groups of {same}; use \
                 allgather_reducescatter or deepep"
            )
        }
        Ok(Self::new(LocalAllreduce, ranks, who_adds))
    }
}

#[derive(Debug)]
struct LocalAllreduce;

impl Transport for LocalAllreduce {
    fn name(&self) -> &'static str {
        "local_allreduce"
    }

    fn is_replicated(&self) -> bool {
        true
    }

    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)> {
        let back = match call.who_adds {
            WhoAdds::BySlot => {
                let blocks = shares(call.ids.rows(), call.ranks.world_size());
                Back::to_owners(&call, call.ids, &blocks, ex)?
            }
            WhoAdds::ByRank => Back::InPlace,
        };
        Ok((Dispatched::standard(call.input, call.ids, call.weights), back))
    }
}
