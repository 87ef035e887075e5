//! Ranks on GPUs: the collectives of NCCL on the stream of an execution context.
//!
//! | file | what |
//! |---|---|
//! | `library` | version, errors and configuration of the library, which cudarc binds |
//! | `handle` | one communicator of the library: the only file that calls it |
//! | `world` | what all groups of this process share: the first failure, and the thread that notices one |
//! | `comm` | a rank: calls, waiting, host views, splits |
//! | `collectives` | each collective as calls of the library |
//! | `fused` | collectives in one launch with what surrounds them |
//! | `over_peers` | which of them go over peer memory instead |
//! | `window` | memory in which bytes of other ranks arrive between steps |
//!
//! A collective returns when it is on the stream. Nothing waits for the device, except what
//! promises a result to the host: barriers and views of host memory.

#[allow(unsafe_code)]
mod handle;
#[allow(unsafe_code)]
mod library;

mod collectives;
mod comm;
mod fused;
mod over_peers;
#[allow(unsafe_code)]
mod window;
mod world;

pub use comm::NcclComm;
pub use window::NcclWindow;
