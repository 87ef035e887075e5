//! `disabled`: every rank has the same tokens and a part of each expert, so no row is sent.

use std::sync::Arc;

use candle_core::Result;
use moe_comm::Communicator;
use moe_kernels::{Dispatched, Exec};

use crate::back::Back;
use crate::block_ranks::{BlockBackends, BlockRanks};
use crate::call::Call;
use crate::no_ep::NoEp;
use crate::over_ranks::OverRanks;
use crate::prepare_finalize::WhoAdds;
use crate::ranks::EpRanks;
use crate::transport::Transport;

pub(super) fn build(block: &BlockRanks<'_>) -> Result<BlockBackends> {
    if block.geometry.moe_tp_size == 1 {
        let backend = NoEp::new().with_router_weight_on_input(block.router_weight_on_input);
        return Ok(BlockBackends { main: Box::new(backend), decode: None });
    }
    Ok(block.always(OverRanks::disabled(block.groups.tp.clone(), block.who_adds)))
}

impl OverRanks {
    /// `disabled`: the ranks of `comm` hold all experts, each cut along its intermediate size.
    pub fn disabled(comm: Arc<dyn Communicator>, who_adds: WhoAdds) -> Self {
        Self::new(Disabled, EpRanks::of_cut_experts(comm), who_adds)
    }
}

#[derive(Debug)]
struct Disabled;

impl Transport for Disabled {
    fn name(&self) -> &'static str {
        "disabled"
    }

    fn is_replicated(&self) -> bool {
        true
    }

    fn reads_on_the_host(&self, _: WhoAdds) -> bool {
        false
    }

    fn prepare<'a>(&self, call: Call<'_, 'a>, _: &mut Exec) -> Result<(Dispatched<'a>, Back)> {
        let back = match call.who_adds {
            WhoAdds::BySlot => Back::Segments,
            WhoAdds::ByRank => Back::InPlace,
        };
        Ok((Dispatched::standard(call.input, call.ids, call.weights), back))
    }
}
