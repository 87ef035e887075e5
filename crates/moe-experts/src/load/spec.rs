//! Which part of a checkpoint's experts a rank loads, as plain data.

use candle_core::{Result, bail};
use moe_kernels::names::MlpNames;

/// What to load: sizes in the checkpoint, and the part of them that lives on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadSpec {
    /// Experts E in the checkpoint.
    pub num_experts: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Intermediate size I in the checkpoint, before any split.
    pub intermediate_size: usize,
    /// Whether the checkpoint has expert biases.
    pub has_bias: bool,
    /// Checkpoint ids of the experts on this rank, in the order of their local slots; `None` =
    /// all. A replica repeats an id.
    pub local_experts: Option<Vec<usize>>,
    /// This rank's part of the intermediate size, counted from 0.
    pub tp_rank: usize,
    /// Parts into which the intermediate size is cut; 1 = no split.
    pub tp_size: usize,
    /// What the checkpoint calls the experts' matrices.
    pub names: MlpNames,
    /// Whether experts are read one by one although the source shows this rank's packs, because the packs hold other experts.
    pub one_by_one: bool,
}

impl LoadSpec {
    /// All experts, whole, without biases, under the usual names.
    pub fn new(num_experts: usize, hidden_size: usize, intermediate_size: usize) -> Self {
        Self {
            num_experts,
            hidden_size,
            intermediate_size,
            has_bias: false,
            local_experts: None,
            tp_rank: 0,
            tp_size: 1,
            names: MlpNames::USUAL,
            one_by_one: false,
        }
    }

    /// Loads biases too.
    pub fn with_bias(mut self, has_bias: bool) -> Self {
        self.has_bias = has_bias;
        self
    }

    /// Loads these experts only (expert parallelism); the position in the list is the local slot.
    pub fn with_local_experts(mut self, ids: Vec<usize>) -> Self {
        self.local_experts = Some(ids);
        self
    }

    /// Loads part `rank` of `size` of the intermediate size only (tensor parallelism).
    pub fn with_tp(mut self, rank: usize, size: usize) -> Self {
        (self.tp_rank, self.tp_size) = (rank, size);
        self
    }

    /// Loads matrices of these names, such as [`MlpNames::MIXTRAL`].
    pub fn with_names(mut self, names: MlpNames) -> Self {
        self.names = names;
        self
    }

    /// Leaves aside packs that the source shows.
    pub fn one_by_one(mut self) -> Self {
        self.one_by_one = true;
        self
    }

    /// Experts on this rank.
    pub(super) fn num_local(&self) -> usize {
        self.local_experts.as_ref().map_or(self.num_experts, Vec::len)
    }

    /// Checkpoint id of a local slot.
    pub(super) fn expert(&self, slot: usize) -> usize {
        self.local_experts.as_ref().and_then(|ids| ids.get(slot).copied()).unwrap_or(slot)
    }

    /// Width of this rank's part of the intermediate size.
    pub(super) fn width(&self) -> usize {
        self.intermediate_size / self.tp_size
    }

    /// First column or row of this rank's part.
    pub(super) fn start(&self) -> usize {
        self.tp_rank * self.width()
    }

    /// Whether this rank holds the checkpoint's experts unchanged, in their order.
    pub(super) fn is_whole(&self) -> bool {
        let identity =
            |ids: &Vec<usize>| ids.len() == self.num_experts && ids.iter().copied().eq(0..ids.len());
        self.tp_size == 1 && self.local_experts.as_ref().is_none_or(identity)
    }

    /// Fails if the fields contradict each other, or describe more than memory can address.
    pub(super) fn check(&self) -> Result<()> {
        let h = self.hidden_size;
        let i = self.intermediate_size;
        if self.num_experts == 0 || h == 0 || i == 0 {
            bail!(
                "load experts: expected num_experts, hidden_size and intermediate_size of at least 1, got {}, {h}, {i}",
                self.num_experts
            )
        }
        if self.tp_rank >= self.tp_size {
            bail!(
                "load experts: expected tp_rank below tp_size, got rank {} of {}",
                self.tp_rank,
                self.tp_size
            )
        }
        if !i.is_multiple_of(self.tp_size) {
            bail!("load experts: tp_size {} does not divide the intermediate size {i}", self.tp_size)
        }
        let ids = self.local_experts.as_deref().unwrap_or_default();
        if let Some(id) = ids.iter().find(|id| **id >= self.num_experts) {
            bail!(
                "load experts: local expert {id} is not in the checkpoint; it has {} experts",
                self.num_experts
            )
        }
        let elements =
            [self.num_experts.max(ids.len()), 2, h, i].into_iter().try_fold(8usize, usize::checked_mul);
        if elements.is_none() {
            bail!("load experts: {} experts of {h} x {i} overflow", self.num_experts)
        }
        Ok(())
    }
}
