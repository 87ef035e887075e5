//! Memory that the GPUs of one host share, and the small all-reduces over it.
//!
//! | file | what |
//! |---|---|
//! | `offer` | what ranks tell each other about their buffers, and whether they can share them |
//! | `memory` | buffers, mappings of other ranks' buffers, the word that ends waiting: the driver's calls |
//! | `all_reduce` | a rank of a group that adds up over such memory |

#[cfg(feature = "nccl")]
mod all_reduce;
#[cfg(feature = "nccl")]
#[allow(unsafe_code)]
mod memory;
mod offer;

#[cfg(feature = "nccl")]
pub use all_reduce::PeerAllReduce;
#[cfg(feature = "nccl")]
pub(crate) use memory::Status;
