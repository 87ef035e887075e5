//! Token dispatch and combine for Mixture-of-Experts layers: tokens to the owners of their
//! experts and back.
#![doc = include_str!("../README.md")]

mod arrive;
mod back;
mod backends;
mod block_ranks;
mod by_rank;
mod by_slot;
mod call;
mod compose;
mod error;
mod local_experts;
mod no_ep;
mod over_ranks;
mod prepare_finalize;
mod ranks;
mod reduce;
mod rows;
mod slot_bias;
mod tensor;
mod tokens;
mod transport;

pub use backends::build_backends;
pub use block_ranks::{BlockBackends, BlockRanks};
pub use compose::{ExpertsSide, check_composition};
pub use error::DispatchError;
pub use local_experts::LocalExperts;
pub use no_ep::NoEp;
pub use over_ranks::OverRanks;
pub use prepare_finalize::{Combine, PrepareFinalize, WhoAdds};
pub use ranks::EpRanks;
pub use reduce::{CombineArgs, weight_and_reduce_into};
pub use tensor::{
    AlignedTensors, DispatchedTensors, Dispatcher, group_slots, moe_align_block_size, weight_and_reduce,
};
pub use tokens::Tokens;

pub use candle_core as candle;
pub use moe_comm::{
    AddNorm, Collectives, Communicator, ExpertLayout, Geometry, ParallelConfig, ParallelGroups, ThreadComm,
    run_ranks,
};
pub use moe_kernels::{
    ActivationFormat, AlignedSizes, AlignedTokens, ArgumentError, Buffer, Dims, Dispatched, Exec, Lent,
    NO_EXPERT, RowBatches, Scratch, TensorView, View, ViewMut, WeightAndReduce, Workspace, align_tokens_into,
    batch_rows_into, cause, group_slots_into, list_slots_into, mask_nonlocal_into, max_aligned_sizes,
    scale_rows_into, unbatch_rows_into, weighted_sum_into,
};
