//! `deepep`: all-to-all. Each rank receives only the rows that its experts need, each once however
//! many of its experts the token chose.
//!
//! Two forms, after DeepEP's two families of kernels:
//!
//! | form | rows | counts |
//! |---|---|---|
//! | [`HighThroughput`] | Standard [T', H] | exact, exchanged before the rows |
//! | [`LowLatency`] | BatchedExperts [E_local, max, H] | the step's maximum per rank, so no size depends on routing |
//!
//! Dispatch and combine come in two halves each (DeepEP's and SGLang's a and b): after the first,
//! rows are on their way, and the caller may compute something else.

mod high_throughput;
mod low_latency;

pub use high_throughput::HighThroughput;
pub use low_latency::LowLatency;
