//! Memory that the GPUs of one host share, the small all-reduces over it, and a window that ranks put bytes into.
//!
//! | file | what |
//! |---|---|
//! | `offer` | what ranks tell each other about their buffers, and whether they can share them |
//! | `memory` | buffers, mappings of other ranks' buffers, the word that ends waiting: the driver's calls |
//! | `join` | ranks make their memory accessible to each other |
//! | `window` | memory that the other ranks copy to beside the steps |
//! | `all_reduce` | a rank of a group that adds up over such memory |

#[cfg(feature = "nccl")]
mod all_reduce;
#[cfg(feature = "nccl")]
mod join;
#[cfg(feature = "nccl")]
#[allow(unsafe_code)]
mod memory;
mod offer;
#[cfg(feature = "nccl")]
#[allow(unsafe_code)]
mod window;

#[cfg(feature = "nccl")]
pub use all_reduce::PeerAllReduce;
#[cfg(feature = "nccl")]
pub(crate) use memory::Status;
#[cfg(feature = "nccl")]
pub use window::PeerWindow;
