//! Ranks on GPUs. The collectives are NCCL's, on the stream of an execution context.
//!
//! | file | what |
//! |---|---|
//! | `library` | version, errors and configuration of the library, which cudarc binds |
//! | `handle` | one communicator of the library: the only file that calls the library |
//! | `world` | state shared by all groups of this process: the first failure, and the thread that notices one |
//! | `comm` | a rank: calls, waiting, host views, splits |
//! | `collectives` | each collective as calls of the library |
//! | `fused` | collectives in one launch with the ops around them |
//! | `over_peers` | which collectives use peer memory instead |
//! | `window` | memory that other ranks write between steps |
//!
//! A collective returns when its work is on the stream. Only barriers and collectives on host memory wait for the
//! device, because they return a result to the host.

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
