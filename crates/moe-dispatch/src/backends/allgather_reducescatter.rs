//! `allgather_reducescatter`: every rank gets the rows of all ranks.

use candle_core::Result;
use moe_kernels::{Dispatched, Exec};

use crate::arrive::gather;
use crate::back::Back;
use crate::block_ranks::{BlockBackends, BlockRanks};
use crate::call::Call;
use crate::over_ranks::OverRanks;
use crate::prepare_finalize::WhoAdds;
use crate::ranks::EpRanks;
use crate::transport::Transport;

pub(super) fn build(block: &BlockRanks<'_>) -> Result<BlockBackends> {
    Ok(block.always(OverRanks::allgather_reducescatter(block.ranks()?, block.who_adds)))
}

impl OverRanks {
    /// `allgather_reducescatter`: every rank gets the rows of all ranks. Their counts may differ and be zero.
    pub fn allgather_reducescatter(ranks: EpRanks, who_adds: WhoAdds) -> Self {
        Self::new(AllgatherReducescatter, ranks, who_adds)
    }
}

#[derive(Debug)]
struct AllgatherReducescatter;

impl Transport for AllgatherReducescatter {
    fn name(&self) -> &'static str {
        "allgather_reducescatter"
    }

    fn combines(&self) -> bool {
        true
    }

    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)> {
        let counts = call.owned_counts(ex)?;
        let arrived = gather(&call, &counts, false, ex)?;
        let back = match call.who_adds {
            WhoAdds::BySlot => Back::to_owners(&call, arrived.ids.view(), &counts, ex)?,
            WhoAdds::ByRank => Back::Scatter { counts, needed: false },
        };
        Ok((arrived.standard(&call), back))
    }
}
