//! Memory that the GPUs of one host share, the small all-reduces over it, and a window into which ranks put bytes.
//!
//! | file | what |
//! |---|---|
//! | `offer` | the message in which a rank describes its buffer, and the rule whether ranks can share memory |
//! | `memory` | buffers, mappings of other ranks' buffers, the word that ends waiting: the calls of the driver |
//! | `join` | ranks make their memory accessible to each other |
//! | `window` | memory into which the other ranks copy in parallel with the steps |
//! | `all_reduce` | a rank in a group that adds up arrays over such memory |

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
