//! Ranks that run each step together, led by one of them.
//!
//! The rank that an engine drives sends each step to the ranks that follow it, before it runs the step itself. Then all
//! of them, and the data-parallel groups too, run the same collectives in the same order. This is the same on the CPU
//! and on devices, where the launches of a step may be a recorded graph, which cannot tell other ranks anything.

use candle_core::{Result, bail};
use moe_kernels::{Exec, StepContext};
use moe_layer::{MoveRound, MoveStatus};
use serde::{Deserialize, Serialize};

use crate::kv_cache::KvCache;
use crate::step::Step;

/// Sizes of the runner that runs steps on a device and samples their tokens there.
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

/// How the tokens of a step are sampled on a device. A row for which the arrays have no entry has its own token, and
/// samples nothing.
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
    /// Fails unless this is sampling for a step of `rows` rows, of which `logits` have logits, after a step of at most
    /// `sequences` sampled tokens.
    ///
    /// # Errors
    /// An array of another size; a token of a row that does not exist.
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

/// The ranks of a model, as seen by the rank that is about to run a step. Every call fails once a rank has died.
pub trait StepRanks: Send + Sync {
    /// Sends the step to the ranks that follow, and exchanges with the data-parallel ranks what their experts need to
    /// know of it; the answer is stored in `context`. `sampling` says how tokens are sampled on the device; with `None`
    /// the host samples. `bucket` is the number of rows to which this rank would pad the step in order to run it as a
    /// graph; a step of 0 rows fits every bucket. Returns the bucket to which all ranks pad their steps, or `None` if
    /// some rank runs its rows without padding.
    fn begin(
        &self,
        step: &Step,
        sampling: Option<(&DeviceSampling, RunnerSizes)>,
        kv: &KvCache,
        bucket: Option<usize>,
        context: &mut StepContext,
    ) -> Result<Option<usize>>;

    /// Whether other ranks take part in the steps: the ranks that follow this one, and ranks that share its experts.
    /// They sample the same tokens, or agree with this rank on graphs.
    fn shares_steps(&self) -> bool;

    /// Whether masks can reach every rank that records graphs together with this one. They cannot reach the ranks of
    /// other data-parallel groups.
    fn takes_masks(&self) -> bool;

    /// Sends the masks of the step that is running, [R, ceil(V / 32)] u32, to the ranks that follow. All ranks sample
    /// after that.
    fn tell_masks(&self, masks: &[u32]) -> Result<()>;

    /// Runs one round of moving experts between the ranks that share them, between two steps. It calls the ranks that
    /// follow, and takes part itself. The first ranks of all data-parallel groups call it together.
    ///
    /// # Errors
    /// Experts that were not loaded to be moved; a placement that their slots cannot have.
    fn move_experts(&self, round: &MoveRound) -> Result<MoveStatus>;

    /// Whether each rank computes the logits of a part of the vocabulary, which all ranks then gather.
    fn cuts_vocabulary(&self) -> bool;

    /// Whether all ranks that share this one's collectives pass `yes`. They use it to record a graph together or not at
    /// all.
    fn all(&self, yes: bool) -> Result<bool>;

    /// Watches the work that is now on the stream for failures of ranks. It is called after a graph has been replayed.
    /// replayed.
    fn watch(&self, ex: &mut Exec) -> Result<()>;

    /// Fails once any rank has failed. The contents of a device are worthless then.
    fn check(&self) -> Result<()>;
}
