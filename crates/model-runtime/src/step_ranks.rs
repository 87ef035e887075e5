//! Ranks that run the steps of one of them, on devices.
//!
//! There a step's arrays are in device memory, and its launches may be a recorded graph, so that nothing in
//! the launches can tell another rank what to run. The rank that an engine drives tells the ranks that follow
//! it before its own launches; all of them, and the data-parallel groups among each other, then run the same
//! collectives in the same order.

use candle_core::Result;
use moe_kernels::{Exec, StepContext};
use serde::{Deserialize, Serialize};

use crate::device_step::Extras;
use crate::step::Step;

/// Sizes of what runs steps and draws their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrawSizes {
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

/// A step that a rank is about to run.
#[derive(Clone, Copy, Debug)]
pub struct Announced<'a> {
    /// Its rows.
    pub step: &'a Step,
    /// How its tokens are drawn on the device; `None` where the host draws them from the logits.
    pub draw: Option<(&'a Extras, DrawSizes)>,
    /// The KV cache: its id, blocks, and tokens per block.
    pub cache: (u64, usize, usize),
    /// Rows to which this rank would pad the step, to run it as a graph; 0 rows fit any.
    pub bucket: Option<usize>,
}

/// The ranks of a model, as the one that is about to run a step sees them.
pub trait StepRanks: Send + Sync {
    /// Tells the ranks that follow of a step, and agrees with the data-parallel ranks on what their
    /// experts see of it, which is left in `context`. Returns the bucket to which all pad
    /// their steps; `None` if any runs its rows as they are.
    ///
    /// # Errors
    /// A rank that died.
    fn begin(
        &self,
        announced: &Announced<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<Option<usize>>;

    /// Whether all ranks that share this one's collectives say yes: they record a graph together or not.
    ///
    /// # Errors
    /// A rank that died.
    fn all(&self, yes: bool) -> Result<bool>;

    /// Has the work that is on the stream now watched: after the replay of a graph.
    ///
    /// # Errors
    /// A rank that died.
    fn watch(&self, ex: &mut Exec) -> Result<()>;

    /// An error once any rank has failed: what the device holds then is worth nothing.
    ///
    /// # Errors
    /// That.
    fn check(&self) -> Result<()>;
}
