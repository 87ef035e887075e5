//! Which part of a checkpoint's experts a rank loads, as plain data.

use candle_core::Result;
use moe_kernels::names::MlpNames;

use crate::error::refuse;

/// The experts to load: their sizes in the checkpoint, and the part on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadSpec {
    /// The number of experts E in the checkpoint.
    pub num_experts: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Intermediate size I in the checkpoint, before any split.
    pub intermediate_size: usize,
    /// Whether the checkpoint has expert biases.
    pub has_bias: bool,
    /// The ids in the checkpoint of the experts on this rank, in the order of their local slots; `None` means all. If
    /// an expert has several copies, its id occurs several times.
    pub local_experts: Option<Vec<usize>>,
    /// This rank's part of the intermediate size, counted from 0.
    pub tp_rank: usize,
    /// The number of parts into which the intermediate size is cut; 1 means that it is not cut.
    pub tp_size: usize,
    /// The names of the experts' matrices in the checkpoint.
    pub names: MlpNames,
    /// Whether experts are read one by one although the source offers packs for this rank, because those packs hold
    /// other experts.
    pub one_by_one: bool,
}

impl LoadSpec {
    /// All experts, uncut, without biases, with the usual names.
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
    #[must_use]
    pub fn with_bias(mut self, has_bias: bool) -> Self {
        self.has_bias = has_bias;
        self
    }

    /// Loads these experts only (expert parallelism); the position in the list is the local slot.
    #[must_use]
    pub fn with_local_experts(mut self, ids: Vec<usize>) -> Self {
        self.local_experts = Some(ids);
        self
    }

    /// Loads part `rank` of `size` of the intermediate size only (tensor parallelism).
    #[must_use]
    pub fn with_tp(mut self, rank: usize, size: usize) -> Self {
        (self.tp_rank, self.tp_size) = (rank, size);
        self
    }

    /// Loads matrices of these names, such as [`MlpNames::MIXTRAL`].
    #[must_use]
    pub fn with_names(mut self, names: MlpNames) -> Self {
        self.names = names;
        self
    }

    /// Ignores the packs that the source offers.
    #[must_use]
    pub fn one_by_one(mut self) -> Self {
        self.one_by_one = true;
        self
    }

    /// The number of experts on this rank.
    pub(super) fn num_local(&self) -> usize {
        self.local_experts.as_ref().map_or(self.num_experts, Vec::len)
    }

    /// The id in the checkpoint of a local slot.
    pub(super) fn expert(&self, slot: usize) -> usize {
        self.local_experts.as_ref().and_then(|ids| ids.get(slot).copied()).unwrap_or(slot)
    }

    /// The width of this rank's part of the intermediate size.
    pub(super) fn width(&self) -> usize {
        self.intermediate_size / self.tp_size
    }

    /// The first column or row of this rank's part.
    pub(super) fn start(&self) -> usize {
        self.tp_rank * self.width()
    }

    /// Whether this rank has the checkpoint's experts unchanged and in their order.
    pub(super) fn is_whole(&self) -> bool {
        let identity =
            |ids: &Vec<usize>| ids.len() == self.num_experts && ids.iter().copied().eq(0..ids.len());
        self.tp_size == 1 && self.local_experts.as_ref().is_none_or(identity)
    }

    /// Checks that the fields do not contradict each other, and that the sizes can be addressed.
    ///
    /// # Errors
    /// The first field for which this is not so.
    pub fn check(&self) -> Result<()> {
        let h = self.hidden_size;
        let i = self.intermediate_size;
        if self.num_experts == 0 || h == 0 || i == 0 {
            refuse!(
                Spec,
                "load experts: expected num_experts, hidden_size and intermediate_size of at least 1, got {}, {h}, {i}",
                self.num_experts
            )
        }
        if self.tp_rank >= self.tp_size {
            refuse!(
                Spec,
                "load experts: expected tp_rank below tp_size, got rank {} of {}",
                self.tp_rank,
                self.tp_size
            )
        }
        if !i.is_multiple_of(self.tp_size) {
            refuse!(Spec, "load experts: tp_size {} does not divide the intermediate size {i}", self.tp_size)
        }
        let ids = self.local_experts.as_deref().unwrap_or_default();
        if let Some(id) = ids.iter().find(|id| **id >= self.num_experts) {
            refuse!(
                Spec,
                "load experts: local expert {id} is not in the checkpoint; it has {} experts",
                self.num_experts
            )
        }
        let elements =
            [self.num_experts.max(ids.len()), 2, h, i].into_iter().try_fold(8usize, usize::checked_mul);
        if elements.is_none() {
            refuse!(Spec, "load experts: {} experts of {h} x {i} overflow", self.num_experts)
        }
        Ok(())
    }
}
