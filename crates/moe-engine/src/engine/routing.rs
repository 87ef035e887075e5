//! The routing of steps on a CUDA device: choices that are forced on a step, and choices that are read back with its
//! tokens, one step later.

use candle_core::Result;
use model_runtime::cuda::PinnedWords;
use model_runtime::device_routing::RoutingArrays;
use model_runtime::{DeviceRouting, Exec, ForcedWeights, MoeInfo, RoutedExperts, StepContext, View};
use moe_layer::ExpertHeat;

/// The choices that a step forces on its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forced {
    /// Recorded choices, which have been copied to the device.
    Replay,
    /// An even spread by this seed.
    Balance(u64),
}

impl Forced {
    /// Which scores become weights. This is the only property of forced choices by which graphs differ.
    pub fn weights(self) -> ForcedWeights {
        match self {
            Self::Replay => ForcedWeights::OfForced,
            Self::Balance(_) => ForcedWeights::OfChosen,
        }
    }
}

/// The arrays of a runner's steps, and how they are read.
pub(super) struct StepRouting {
    moe: MoeInfo,
    arrays: RoutingArrays,
    counts: Option<Counts>,
    /// Choices of a step's rows, in two buffers that are used in turn. They exist from the first request on that needs
    /// them.
    records: Option<[PinnedWords; 2]>,
    rows: usize,
}

/// The counts of the device never stop growing, so the counts of a step are the difference to the step before.
struct Counts {
    read_back: [PinnedWords; 2],
    before: Vec<u32>,
}

impl StepRouting {
    /// Makes the arrays for steps of at most `rows` rows. With `counts`, every step's choices are counted. With
    /// `records`, they may be requested, so every step writes them, and a graph that was captured earlier also works
    /// for later requests.
    pub fn new(moe: &MoeInfo, rows: usize, counts: bool, records: bool, ex: &Exec) -> Result<Self> {
        let words = moe.layers.len() * moe.num_experts;
        let counted = || -> Result<_> {
            Ok(Counts { read_back: [ex.pinned(words)?, ex.pinned(words)?], before: vec![0; words] })
        };
        Ok(Self {
            arrays: RoutingArrays::new(moe, rows, counts, records, ex)?,
            counts: counts.then(counted).transpose()?,
            records: None,
            moe: moe.clone(),
            rows,
        })
    }

    /// Takes the choices that a step of `rows` rows (padding included) forces from its context, and copies them to the
    /// device.
    pub fn force(&mut self, context: &mut StepContext, rows: usize, ex: &Exec) -> Result<Option<Forced>> {
        let replay = context.replay.take();
        let balance = context.force_balance.take();
        if let Some(seed) = balance {
            return Ok(Some(Forced::Balance(seed)));
        }
        if !context.some_replay && replay.is_none() {
            return Ok(None);
        }
        self.arrays.replay(replay.as_deref(), rows, ex)?;
        Ok(Some(Forced::Replay))
    }

    /// The arrays for a step's launches. If choices are spread evenly, this function makes the launch that does it,
    /// before the others. `number` \[1\] u32 is the number of the step.
    pub fn begin(
        &mut self,
        forced: Option<Forced>,
        number: View<'_>,
        rows: usize,
        ex: &Exec,
    ) -> Result<DeviceRouting> {
        if let Some(Forced::Balance(seed)) = forced {
            self.arrays.balance(seed, number, rows, ex)?;
        }
        Ok(self.arrays.of_step(forced.map(Forced::weights)))
    }

    /// Puts the copies to the host after a step: its counts and, if requested, the choices of its first `rows` rows.
    /// `turn` is the index of the buffer. It returns at once.
    pub fn read_back(&mut self, turn: usize, rows: Option<usize>, ex: &Exec) -> Result<()> {
        if let (Some(counts), Some(heat)) = (&mut self.counts, self.arrays.heat()) {
            ex.download(heat, &mut counts.read_back[turn])?;
        }
        let Some(rows) = rows else { return Ok(()) };
        let Some(routed) = self.arrays.routed(rows)? else { return Ok(()) };
        let words = self.rows * self.moe.layers.len() * self.moe.top_k;
        let records = match &mut self.records {
            Some(records) => records,
            none => none.insert([ex.pinned(words)?, ex.pinned(words)?]),
        };
        ex.download(routed, &mut records[turn])
    }

    /// The data that [`read_back`](Self::read_back) copied, in the order of the steps. It waits for the copies.
    pub fn collect(
        &mut self,
        turn: usize,
        rows: Option<usize>,
    ) -> Result<(Option<ExpertHeat>, Option<RoutedExperts>)> {
        let heat = self.counts.as_mut().map(|counts| -> Result<_> {
            let words = counts.read_back[turn].wait()?;
            let step = added(&mut counts.before, words);
            ExpertHeat::from_counts(self.moe.num_experts, step)
        });
        let layers = self.moe.layers.len();
        let top_k = self.moe.top_k;
        let routed = rows.zip(self.records.as_mut()).map(|(rows, records)| {
            let ids = records[turn].wait()?[..rows * layers * top_k].to_vec();
            RoutedExperts::from_ids(rows, layers, top_k, ids)
        });
        Ok((heat.transpose()?, routed.transpose()?))
    }
}

/// The increase of counters that wrap around.
fn added(before: &mut [u32], now: &[u32]) -> Vec<u64> {
    let grown = before.iter_mut().zip(now).map(|(before, &now)| {
        let grown = now.wrapping_sub(*before);
        *before = now;
        u64::from(grown)
    });
    grown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_difference_of_counters_that_wrap_around() {
        let mut before = vec![0, 7, u32::MAX - 1];
        assert_eq!(added(&mut before, &[3, 7, 1]), [3, 0, 3]);
        assert_eq!(added(&mut before, &[3, 9, 1]), [0, 2, 0]);
        assert_eq!(before, [3, 9, 1]);
    }
}
