//! The sparse Mixture-of-Experts block: the one place that composes router, dispatch and experts.
//!
//! `route -> prepare -> experts -> finalize -> + zero experts -> + shared experts`. The parts are
//! boxed traits, chosen when the block is built and checked against each other there. Beside them stand monolithic
//! experts over the same weights, whose launches contain the router: the plan (`plan.rs`) says which steps they compute.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_dispatch::PrepareFinalize;
use moe_experts::{Experts, MonolithicExperts};
use moe_kernels::candle::{Result, Tensor, bail};
use moe_kernels::{CpuIsa, ExpertTraffic, Weight};
use moe_router::{Router, Selection};

use crate::check::{check_gate, check_modular};
use crate::chunked::Path;
use crate::placed::PlacedExperts;
use crate::shared::SharedExperts;

/// A sparse Mixture-of-Experts block.
pub struct SparseMoeBlock {
    pub(crate) gate: Weight,
    pub(crate) router: Box<Router>,
    pub(crate) path: Path,
    /// Another path, for steps of which the ranks agreed that all only decode.
    pub(crate) decode: Option<Path>,
    /// Experts whose launches contain the router, in the order of trial.
    pub(crate) monolithic: Vec<Box<dyn MonolithicExperts>>,
    /// Where experts are placed by a map.
    pub(crate) placed: Option<Arc<PlacedExperts>>,
    pub(crate) shared: Option<SharedExperts>,
    pub(crate) layer: usize,
    /// Tokens of a chunk, at most.
    pub(crate) chunk: Option<NonZeroUsize>,
}

impl SparseMoeBlock {
    /// A block of modular experts. `gate` is the router's weight [E + zero experts, H] in the
    /// model dtype; `layer` counts the model's MoE layers from 0.
    ///
    /// # Errors
    /// Parts that do not fit, both of them named: another activation format;
    /// row limits that are missing or too small; a router and a prepare side of which one applies
    /// the router weight to the input; another number of experts in the router, the expert map or
    /// the weights; a gate of other dims or dtype than the router and the experts need.
    pub fn new(
        gate: Tensor,
        router: Router,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
        layer: usize,
    ) -> Result<Self> {
        Self::of_placed(gate, router, (prepare, experts), layer, None)
    }

    /// As [`new`](Self::new), for experts that a map places: the router chooses logical experts, the other parts see physical ones.
    ///
    /// # Errors
    /// As [`new`](Self::new); a map of other experts.
    pub(crate) fn of_placed(
        gate: Tensor,
        router: Router,
        (prepare, experts): (Box<dyn PrepareFinalize>, Box<dyn Experts>),
        layer: usize,
        placed: Option<Arc<PlacedExperts>>,
    ) -> Result<Self> {
        let config = router.config();
        check_modular(config, prepare.as_ref(), experts.as_ref(), placed.as_deref())?;
        check_gate(&gate, config.num_logits(), experts.shape().hidden_size, experts.shape().dtype)?;
        Ok(Self {
            gate: Weight::new(gate)?,
            router: Box::new(router),
            path: Path { prepare, experts },
            decode: None,
            monolithic: Vec::new(),
            placed,
            shared: None,
            layer,
            chunk: None,
        })
    }

    /// Adds experts whose launches contain the router, over the weights of the modular ones: the plan says which steps
    /// they compute.
    ///
    /// # Errors
    /// Experts of another shape than the modular ones.
    pub fn with_monolithic(mut self, experts: Box<dyn MonolithicExperts>) -> Result<Self> {
        if experts.shape() != self.path.experts.shape() {
            bail!(
                "monolithic experts `{}`: expected the shape of the modular `{}`, {:?}, got {:?}",
                experts.name(),
                self.path.experts.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.monolithic.push(experts);
        Ok(self)
    }

    /// Computes the tokens of a call in even chunks of at most `size`; the output is the same. On
    /// several ranks all must have the same size, as [`load_block_on`](crate::load_block_on) sees to.
    pub fn with_chunk_size(mut self, size: Option<NonZeroUsize>) -> Self {
        self.chunk = size;
        self
    }

    /// Packs the gate for the CPU kernels of a path ([`Weight::packed`]); `None` leaves it in rows.
    ///
    /// # Errors
    /// No memory left.
    pub fn with_packed_gate(mut self, isa: Option<CpuIsa>) -> Result<Self> {
        self.gate = self.gate.packed(isa, self.router.config().num_logits())?;
        Ok(self)
    }

    /// Adds another prepare/finalize backend with its experts, over the same weights, for steps of
    /// which the ranks agreed that all of them only decode (`StepContext::only_decode`).
    ///
    /// # Errors
    /// As [`new`](Self::new); experts of another shape.
    pub fn with_decode_path(
        mut self,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
    ) -> Result<Self> {
        check_modular(self.router.config(), prepare.as_ref(), experts.as_ref(), self.placed.as_deref())?;
        if experts.shape() != self.path.experts.shape() {
            bail!(
                "decode path: expected experts like those of {}, {:?}, got {:?}",
                self.path.prepare.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.decode = Some(Path { prepare, experts });
        Ok(self)
    }

    /// Adds shared experts.
    ///
    /// # Errors
    /// Another hidden size or dtype.
    pub fn with_shared_experts(mut self, shared: SharedExperts) -> Result<Self> {
        let experts = self.path.experts.shape();
        shared.check_fits(experts.hidden_size, experts.dtype)?;
        self.shared = Some(shared);
        Ok(self)
    }

    /// Leaves the sum over the ranks that share the tokens to the caller; whether there is one and it is
    /// all that follows the experts.
    pub fn defer_sum(&mut self) -> bool {
        let alone = self.router.config().num_zero_experts == 0 && self.shared.is_none();
        alone && self.decode.is_none() && self.path.prepare.defer_sum()
    }

    /// The experts that a map places; `None` where physical experts are the logical ones.
    pub fn placed_experts(&self) -> Option<&PlacedExperts> {
        self.placed.as_deref()
    }

    /// What experts in host memory have cost so far; `None` where all are on the device. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.path.experts.traffic()
    }

    /// The path of a step; `only_decode`: the ranks agreed that each of them only decodes.
    pub(crate) fn path_of(&self, only_decode: bool) -> &Path {
        self.decode.as_ref().filter(|_| only_decode).unwrap_or(&self.path)
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Whether the experts of a row may depend on its number in the step, and not on what is in it alone.
    pub fn routes_by_number(&self) -> bool {
        match self.router.config().selection {
            Selection::Hash { .. } | Selection::Custom | Selection::Simulated { .. } => true,
            Selection::TopK | Selection::Grouped { .. } | Selection::RawLogits => false,
        }
    }

    /// The modular experts' name, for logs.
    pub fn experts_name(&self) -> &str {
        self.path.experts.name()
    }

    /// Tokens of a chunk, at most; `None` without chunks.
    pub fn chunk_size(&self) -> Option<NonZeroUsize> {
        self.chunk
    }

    /// Bytes of workspace that a chunk of `tokens` tokens takes: rows that arrive, expert
    /// intermediates and slot rows, for the most rows that can arrive. It does not fall as `tokens`
    /// rise.
    ///
    /// # Errors
    /// Sizes that overflow.
    pub fn chunk_bytes(&self, tokens: usize) -> Result<usize> {
        self.path.chunk_bytes(tokens, self.router.config().num_slots(), self.shared.as_ref())
    }
}

impl std::fmt::Debug for SparseMoeBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SparseMoeBlock")
            .field("layer", &self.layer)
            .field("gate", &self.gate.dims())
            .field("experts", &self.experts_name())
            .field("shared", &self.shared.is_some())
            .finish()
    }
}
