//! CUDA: memory, streams, graphs and the launches of the kernels in `cuda/`.
//!
//! Each op of this crate checks its arguments once and then either runs on the CPU or calls a
//! launcher (`ffi`). Launchers allocate nothing and never synchronise, so that any sequence of
//! ops on one [`Exec`](crate::Exec) can be captured into a [`Graph`].
//!
//! What a kernel could only check by reading device memory on the host is a contract of the
//! caller: indices (token ids, slots, block tables, rows) are in range. On the CPU they are
//! checked.

pub(crate) mod any;
pub(crate) mod ffi;
mod graph;
mod memory;
mod stream;

pub use any::{Choice, Route, RouteOut, route_into};
pub use graph::Graph;
pub use memory::PinnedWords;
pub(crate) use memory::{DeviceMemory, storage_slice};
pub(crate) use stream::CudaExec;
