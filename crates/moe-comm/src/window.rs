//! Memory that the other ranks of a group write to by themselves: a window of one-sided communication, as MPI calls it.

use std::fmt::Debug;

use moe_kernels::candle::Result;
use moe_kernels::{Exec, View};

/// Memory on the device of each rank of a group, which the other ranks fill while this one computes.
///
/// Nothing here waits for another rank. Who writes where and when somebody may read it is agreed elsewhere: a rank has its copies
/// end ([`context`](Self::context), `synchronize`), says so, and who has heard it reads.
pub trait Window: Debug + Send + Sync {
    /// Bytes of each rank's memory.
    fn bytes(&self) -> usize;

    /// Where copies run, and what reads that has arrived: a stream beside that of the steps.
    fn context(&self) -> &Exec;

    /// Copies `from` \[n\] u8, which lies on this rank's device, to the bytes `at..at + n` of a rank; returns at once.
    ///
    /// # Errors
    /// A rank or bytes that there are not; a view of host memory.
    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()>;

    /// The bytes `at..at + len` of this rank, \[len\] u8.
    ///
    /// # Errors
    /// Bytes that there are not.
    fn own(&self, at: usize, len: usize) -> Result<View<'_>>;

    /// States that what is now on the stream of `ex` reads this rank's memory, or writes what this rank puts next.
    ///
    /// # Errors
    /// The device refuses.
    fn used_by(&self, ex: &Exec) -> Result<()>;

    /// Waits until nothing of this rank uses the window any more.
    ///
    /// # Errors
    /// A device that has failed.
    fn wait_unused(&self) -> Result<()>;
}
