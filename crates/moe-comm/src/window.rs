//! Memory into which the other ranks of a group write: a window for one-sided communication, in the terms of MPI.

use std::fmt::Debug;
use std::ops::Range;

use moe_kernels::candle::Result;
use moe_kernels::{Exec, View};

/// Bytes that are sent from a rank to the window of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank that has the bytes.
    pub from: usize,
    /// The rank whose window receives the bytes.
    pub to: usize,
    /// The index of the first byte in that window.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Provides the bytes of transfers. It is called with the number of a transfer and a range of its bytes, and passes the
/// bytes on in pieces: \[n\] u8 on this rank's device, each with its index among the transfer's bytes.
pub type TransferSource<'a> =
    dyn Fn(usize, Range<usize>, &mut dyn FnMut(usize, View<'_>) -> Result<()>) -> Result<()> + 'a;

/// Memory on the device of each rank of a group, which the other ranks fill while this one computes.
///
/// No method waits for another rank's device. The users of a window agree when to write and when to read: a rank waits
/// until its copies have ended ([`context`](Self::context), `synchronize`) and sends a message, and the rank that
/// receives the message may read.
pub trait Window: Debug + Send + Sync {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Number of bytes of each rank's memory.
    fn bytes(&self) -> usize;

    /// The context in which copies run and received bytes are read. Its stream runs in parallel with the stream of the
    /// steps.
    fn context(&self) -> &Exec;

    /// Copies `from` \[n\] u8, in memory of this rank's device, to the bytes `at..at + n` of a rank's window. Returns
    /// at once.
    ///
    /// # Errors
    /// A rank or bytes that do not exist, or that only [`carry`](Self::carry) can reach; a view of host memory.
    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()>;

    /// Carries out transfers. Every rank of the group must pass the same transfers in the same order. `source` is
    /// called for this rank's transfers. Returns at once.
    ///
    /// # Errors
    /// Any error of [`put`](Self::put), of `source`, or of the collective, if the window uses one.
    fn carry(&self, transfers: &[Transfer], source: &TransferSource<'_>) -> Result<()> {
        let own = transfers.iter().enumerate().filter(|(_, transfer)| transfer.from == self.rank());
        for (number, &Transfer { to, at, len, .. }) in own {
            source(number, 0..len, &mut |place, bytes| self.put(bytes, to, at + place))?;
        }
        Ok(())
    }

    /// The bytes `at..at + len` of this rank's window, \[len\] u8.
    ///
    /// # Errors
    /// Bytes that do not exist.
    fn own(&self, at: usize, len: usize) -> Result<View<'_>>;

    /// Declares that the work that is now on the stream of `ex` reads this rank's memory, or writes the memory that
    /// this rank puts next.
    ///
    /// # Errors
    /// The device reports an error.
    fn used_by(&self, ex: &Exec) -> Result<()>;

    /// Waits until no work of this rank uses the window any more.
    ///
    /// # Errors
    /// The device has failed.
    fn wait_unused(&self) -> Result<()>;
}

/// Cuts transfers into batches of at most `most` bytes. An item of a batch is the number of a transfer and a range of
/// its bytes.
#[cfg(any(test, feature = "nccl"))]
pub(crate) fn batches(transfers: &[Transfer], most: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let mut batches = vec![Vec::new()];
    let mut room = most;
    for (number, transfer) in transfers.iter().enumerate() {
        let mut start = 0;
        while start < transfer.len {
            if room == 0 {
                batches.push(Vec::new());
                room = most;
            }
            let end = transfer.len.min(start + room);
            if let Some(batch) = batches.last_mut() {
                batch.push((number, start..end));
            }
            room -= end - start;
            start = end;
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_every_byte_once_and_no_more_than_they_may() {
        let transfer = |len| Transfer { from: 0, to: 1, at: 0, len };
        let transfers = [transfer(5), transfer(0), transfer(23), transfer(8)];
        for most in [1, 4, 7, 16, 36, 1000] {
            let batches = batches(&transfers, most);
            let mut next = [0; 4];
            for (number, range) in batches.iter().flatten() {
                assert_eq!(range.start, next[*number]);
                next[*number] = range.end;
            }
            assert_eq!(next, [5, 0, 23, 8]);
            let sizes = batches.iter().map(|batch| batch.iter().map(|(_, range)| range.len()).sum::<usize>());
            let sizes: Vec<usize> = sizes.collect();
            assert!(sizes.iter().rev().skip(1).all(|&size| size == most), "{sizes:?}");
            assert_eq!(sizes.len(), 36usize.div_ceil(most));
        }
    }
}
