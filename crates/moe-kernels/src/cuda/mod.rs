//! CUDA: memory, streams, graphs and the launches of the kernels in `cuda/`.
//!
//! Each op of this crate checks its arguments once and then either runs on the CPU or calls a
//! launcher (`ffi`). Launchers allocate nothing and never synchronise, so that any sequence of
//! ops on one [`Exec`](crate::Exec) can be captured into a [`Graph`].
//!
//! An op uses the kernel for its dtype and sizes if there is one, and otherwise the kernel for any dtype and size
//! (`any`).
//!
//! Some conditions could only be checked by reading device memory on the host: that indices (block tables, positions,
//! rows) are in range. On the CPU they are checked; on CUDA the caller must make sure of them. Kernels check the range
//! themselves where that costs nothing, above all for indices by which they write: slots of the cache and of samplers.

pub(crate) mod any;
mod args;
pub(crate) mod attention;
mod blas;
mod blas_lt;
mod checks;
mod checksum;
pub(crate) mod counts;
pub(crate) mod delta;
mod device;
mod expert_slots;
mod experts;
pub(crate) mod ffi;
mod fp8;
mod graph;
pub(crate) mod heads_norm;
pub(crate) mod linear;
mod locked;
mod memory;
mod peer;
pub(crate) mod quant;
pub(crate) mod quant_format;
mod ranks;
mod router;
mod routing;
pub(crate) mod rows;
mod sampling;
mod scratch;
mod side;
mod staging;
mod step;
mod stream;
mod timeline;

pub use any::{Choice, Route, RouteOut, route_into};
use checks::{aligned, expect_aligned, small};
pub(crate) use checksum::word_sum;
pub use counts::{DeviceCalls, device_calls};
pub use device::{DeviceInfo, device, device_count};
pub use expert_slots::ExpertSlots;
pub use experts::{
    ExpertEpilogue, ExpertLists, FusedExperts, MonolithicExperts, expert_slot_rows, fused_experts_into,
    monolithic_experts_into, slotted_experts_into,
};
pub(crate) use fp8::quantise_rows_into;
pub use graph::Graph;
pub use memory::{PinnedWords, mapped_bytes, mapped_bytes_mut};
pub use peer::{MAX_PEERS, OwnedRows, PeerBuffers};
pub use ranks::{embed_part_into, fill_random_box_into, join_columns_into};
pub use router::gate_route_into;
pub use routing::balance_ids_into;
pub use sampling::{
    LOGPROB_WORDS, MAX_EDITS, MAX_LOGPROBS, SAMPLE_WORDS, SampleLogprobs, SampleParams, SampleSlots,
    SlotReset, logprobs_into, reset_slots_into, sample_into,
};
pub use staging::Staging;
pub use step::{LastStep, RopeFrequencies, StepTokens, fill_random_into, rope_rows_into, upload_step_into};
pub(crate) use stream::CudaExec;
pub use timeline::{Mark, Section, Timeline};
