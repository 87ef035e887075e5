//! Token dispatch and combine for Mixture-of-Experts layers: tokens to the owners of their
//! experts and back.
#![doc = include_str!("../README.md")]

mod batched;
mod compose;
mod local_experts;
mod no_ep;
mod prepare_finalize;
mod receiver;
mod reduce;
mod tensor;
mod tokens;

pub use batched::BatchedReference;
pub use compose::{CompositionError, ExpertsSide, check_composition};
pub use local_experts::LocalExperts;
pub use no_ep::NoEp;
pub use prepare_finalize::PrepareFinalize;
pub use receiver::Receiver;
pub use reduce::{CombineArgs, weight_and_reduce_into};
pub use tensor::{
    AlignedTensors, DispatchedTensors, Dispatcher, group_slots, moe_align_block_size, weight_and_reduce,
};

pub use candle_core as candle;
pub use moe_kernels::{
    ActivationFormat, AlignedSizes, AlignedTokens, Buffer, Dims, Dispatched, Exec, Lent, NO_EXPERT,
    RowBatches, Scratch, TensorView, View, ViewMut, WeightAndReduce, Workspace, align_batched_tokens_into,
    align_tokens_into, batch_rows_into, group_slots_into, mask_nonlocal_into, max_aligned_sizes,
    max_batched_aligned_sizes, scale_rows_into, unbatch_rows_into, weighted_sum_into,
};
