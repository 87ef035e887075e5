//! Ranks that run each step together, led by one of them.
//!
//! The rank that an engine drives tells the ranks that follow it of a step before it runs the step itself; all of
//! them, and the data-parallel groups among each other, then run the same collectives in the same order. It is so on
//! the CPU and on devices, where the launches of a step may be a recorded graph that can tell nobody anything.

use candle_core::{Result, bail};
use moe_kernels::{Exec, StepContext};
use moe_layer::{MoveRound, MoveStatus};
use serde::{Deserialize, Serialize};

use crate::kv_cache::KvCache;
use crate::step::Step;

/// Sizes of what runs steps on a device and samples their tokens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerSizes {
    /// Most rows of a step.
    pub rows: usize,
    /// Most sequences.
    pub sequences: usize,
    /// Most tokens of a sequence.
    pub tokens: usize,
    /// Most KV blocks of a sequence.
    pub blocks: usize,
    /// Whether graphs are never recorded.
    pub eager: bool,
}

/// Words of a row of [`DeviceSampling::params`].
pub(crate) const PARAM_WORDS: usize = 16;

/// How the tokens of a step are sampled on a device. Rows that are missing at the end have tokens of their own, and
/// sample nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSampling {
    /// Per row of the step: the row of the step before whose sampled token it takes; u32::MAX = it has its own.
    pub token_source: Vec<u32>,
    /// Per wanted row of logits: its parameters, as the words that the sampling kernel reads.
    pub params: Vec<u32>,
    /// Whether tokens are sampled only once their masks are there ([`StepRanks::tell_masks`]).
    pub masked: bool,
}

impl DeviceSampling {
    /// Fails unless this is sampling of a step of so many rows, of which so many logits are wanted, behind one of at most
    /// `sequences` sampled tokens.
    ///
    /// # Errors
    /// An array of another size; a token of a row that there is not.
    pub fn check(&self, rows: usize, logits: usize, sequences: usize) -> Result<()> {
        if self.token_source.len() > rows || self.params.len() != logits.saturating_mul(PARAM_WORDS) {
            let sources = self.token_source.len();
            let params = self.params.len();
            bail!(
                "sampling of {rows} rows and {logits} logits: {sources} sources of tokens and {params} words of parameters"
            )
        }
        match self.token_source.iter().find(|&&row| row != u32::MAX && row as usize >= sequences) {
            Some(row) => bail!("sampling: the token of row {row}, of at most {sequences} in the step before"),
            None => Ok(()),
        }
    }
}

/// The ranks of a model, as the one that is about to run a step sees them. Every call fails once a rank has died.
pub trait StepRanks: Send + Sync {
    /// Tells the ranks that follow of a step, and agrees with the data-parallel ranks on what their
    /// experts see of it, which is left in `context`. `sampling` says how tokens are sampled on the device, `None`
    /// that the host samples. `bucket`: rows to which this rank would pad the step, to run it as a graph; 0 rows
    /// fit any. Returns the bucket to which all pad their steps; `None` if any runs its rows as they are.
    fn begin(
        &self,
        step: &Step,
        sampling: Option<(&DeviceSampling, RunnerSizes)>,
        kv: &KvCache,
        bucket: Option<usize>,
        context: &mut StepContext,
    ) -> Result<Option<usize>>;

    /// Whether masks can reach every rank that records graphs with this one: not those of other data-parallel groups.
    fn takes_masks(&self) -> bool;

    /// Tells the ranks that follow the masks of the step that they have launched, [R, ceil(V / 32)] u32: all sample then.
    fn tell_masks(&self, masks: &[u32]) -> Result<()>;

    /// One round of moving experts between the ranks that share them, between two steps: tells the ranks that follow, and takes
    /// part. The first ranks of all data-parallel groups call it together.
    ///
    /// # Errors
    /// Experts that were not loaded to be moved; a placement that their slots cannot have.
    fn move_experts(&self, round: &MoveRound) -> Result<MoveStatus>;

    /// Whether each rank computes the logits of a part of the vocabulary, which all ranks then gather.
    fn cuts_vocabulary(&self) -> bool;

    /// Whether all ranks that share this one's collectives say yes: they record a graph together or not.
    fn all(&self, yes: bool) -> Result<bool>;

    /// Has the work that is on the stream now watched: after the replay of a graph.
    fn watch(&self, ex: &mut Exec) -> Result<()>;

    /// An error once any rank has failed: what a device holds then is worth nothing.
    fn check(&self) -> Result<()>;
}
