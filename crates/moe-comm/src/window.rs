//! Memory that the other ranks of a group write to by themselves: a window of one-sided communication, as MPI calls it.

use std::fmt::Debug;
use std::ops::Range;

use moe_kernels::candle::Result;
use moe_kernels::{Exec, View};

/// Bytes that go from a rank to the window of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The rank that has the bytes.
    pub from: usize,
    /// The rank to whose window the bytes go.
    pub to: usize,
    /// The place of the first byte in that window.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Where the bytes of transfers come from: called with a transfer's number and a range of its bytes it shows these, pieces \[n\] u8 on
/// this rank's device, each with its place among the transfer's bytes.
pub type TransferSource<'a> =
    dyn Fn(usize, Range<usize>, &mut dyn FnMut(usize, View<'_>) -> Result<()>) -> Result<()> + 'a;

/// Memory on the device of each rank of a group, which the other ranks fill while this one computes.
///
/// Nothing here waits for another rank's device. Who writes where and when somebody may read it is agreed elsewhere: a rank has its
/// copies end ([`context`](Self::context), `synchronize`), says so, and who has heard it reads.
pub trait Window: Debug + Send + Sync {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Bytes of each rank's memory.
    fn bytes(&self) -> usize;

    /// Where copies run, and what reads the bytes that arrived: a stream beside the steps' stream.
    fn context(&self) -> &Exec;

    /// Copies `from` \[n\] u8, which lies on this rank's device, to the bytes `at..at + n` of a rank; returns at once.
    ///
    /// # Errors
    /// A rank or bytes that there are not, or that only [`carry`](Self::carry) reaches; a view of host memory.
    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()>;

    /// Carries transfers, which every rank of the group names alike and in the same order; `source` is asked for this rank's transfers.
    /// Returns at once.
    ///
    /// # Errors
    /// Any error of [`put`](Self::put) or of `source`, or of the collective, where it takes one.
    fn carry(&self, transfers: &[Transfer], source: &TransferSource<'_>) -> Result<()> {
        let own = transfers.iter().enumerate().filter(|(_, transfer)| transfer.from == self.rank());
        for (number, &Transfer { to, at, len, .. }) in own {
            source(number, 0..len, &mut |place, bytes| self.put(bytes, to, at + place))?;
        }
        Ok(())
    }

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

/// Transfers cut into batches of at most `most` bytes: by their numbers, ranges of their bytes.
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
