//! What data-parallel ranks agree on before a step, as plain data.

use candle_core::{Result, bail};
use moe_layer::MAX_STEP_TOKENS;

/// The contribution of a data-parallel rank to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Proposal {
    pub rows: usize,
    pub only_decode: bool,
    /// The number of rows to which it would pad its rows to run them as a graph; a rank without rows accepts any
    /// number.
    pub bucket: Option<usize>,
    /// Whether it forces recorded routing on some row.
    pub replays: bool,
}

impl Proposal {
    pub fn words(&self) -> [u32; 4] {
        let bucket = self.bucket.map_or(0, |rows| rows as u32 + 1);
        [self.rows as u32, u32::from(self.only_decode), bucket, u32::from(self.replays)]
    }

    /// # Errors
    /// Words that no rank sends.
    pub fn from_words(words @ &[rows, only_decode, bucket, replays]: &[u32; 4]) -> Result<Self> {
        let (rows, bucket) = (rows as usize, bucket.checked_sub(1).map(|rows| rows as usize));
        let fits =
            rows <= MAX_STEP_TOKENS && bucket.is_none_or(|bucket| (rows..=MAX_STEP_TOKENS).contains(&bucket));
        if !fits || only_decode > 1 || replays > 1 {
            bail!(
                "a step of {words:?} (rows, whether all decode, rows of a graph and one, whether routing is replayed)"
            )
        }
        Ok(Self { rows, only_decode: only_decode == 1, bucket, replays: replays == 1 })
    }
}

/// The largest bucket, if every rank has one.
pub(super) fn common_bucket(proposals: &[Proposal]) -> Option<usize> {
    proposals.iter().map(|proposal| proposal.bucket).try_fold(0, |most, bucket| Some(most.max(bucket?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(rows: usize, bucket: Option<usize>) -> Proposal {
        Proposal { rows, only_decode: bucket.is_some(), bucket, replays: rows == 7 }
    }

    #[test]
    fn ranks_pad_to_the_largest_bucket_or_not_at_all() {
        assert_eq!(common_bucket(&[proposal(3, Some(4)), proposal(9, Some(16))]), Some(16));
        assert_eq!(common_bucket(&[proposal(0, Some(0)), proposal(1, Some(1))]), Some(1));
        assert_eq!(common_bucket(&[proposal(0, Some(0)), proposal(0, Some(0))]), Some(0));
        assert_eq!(common_bucket(&[proposal(3, Some(4)), proposal(100, None)]), None);
    }

    #[test]
    fn proposals_travel() {
        for sent in [proposal(0, Some(0)), proposal(7, Some(8)), proposal(4096, None)] {
            assert_eq!(Proposal::from_words(&sent.words()).unwrap(), sent);
        }
        for wrong in [[u32::MAX, 0, 0, 0], [1, 2, 0, 0], [1, 0, 0, 7], [9, 1, 5, 0], [1, 1, u32::MAX, 0]] {
            assert!(Proposal::from_words(&wrong).is_err(), "{wrong:?}");
        }
    }
}
