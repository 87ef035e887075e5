//! The sparse Mixture-of-Experts block. Only this module composes router, dispatch and experts.
//!
//! `route -> prepare -> experts -> finalize -> + zero experts -> + shared experts`. The parts are boxed traits, chosen
//! when the block is built and checked against each other there. In addition, a block may have monolithic experts over
//! the same weights, whose launches contain the router. The plan (`plan.rs`) says which steps they compute.

use std::num::NonZeroUsize;
use std::sync::Arc;

use moe_dispatch::PrepareFinalize;
use moe_experts::{Experts, MonolithicExperts};
use moe_kernels::candle::{Result, Tensor};
use moe_kernels::{CpuIsa, ExpertTraffic, TensorView, Weight};
use moe_router::{Router, Selection};

use crate::check::{check_gate, check_modular};
use crate::chunked::Path;
use crate::error::refuse;
use crate::placed::PlacedExperts;
use crate::shared::SharedExperts;

/// A sparse Mixture-of-Experts block. Cloning shares its weights and, over ranks, its communicators.
///
/// [`from_hf`](Self::from_hf) and [`load_block`](crate::load_block) make it from a checkpoint. From parts:
///
/// ```
/// use moe_layer::{Activation, Device, ExpertWeights, NoEp, Router, RouterConfig, RouterParams};
/// use moe_layer::{SparseMoeBlock, Tensor, build_experts, select_backend};
///
/// let cpu = &Device::Cpu;
/// // Four experts, two per token; hidden size 8, intermediate size 6.
/// let weights = ExpertWeights::new(
///     Tensor::randn(0f32, 0.1, (4, 2 * 6, 8), cpu)?, // w13: gate rows, then up rows
///     Tensor::randn(0f32, 0.1, (4, 8, 6), cpu)?,     // w2
///     None,
///     None,
/// )?;
/// let selection = select_backend(&weights.spec(Activation::SwiGlu, 2), None)?;
/// let experts = build_experts(&selection, weights)?;
/// let router = Router::new(RouterConfig::new(4, 2), RouterParams::default())?;
/// let gate = Tensor::randn(0f32, 0.1, (4, 8), cpu)?;
/// let block = SparseMoeBlock::new(gate, router, Box::new(NoEp::new()), experts, 0)?;
/// assert_eq!(block.forward(&Tensor::randn(0f32, 1., (2, 3, 8), cpu)?)?.dims(), [2, 3, 8]);
/// # Ok::<(), moe_layer::candle::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "it computes nothing until it is called"]
pub struct SparseMoeBlock {
    /// In the model dtype or in f32.
    pub(crate) gate: Weight,
    /// [E + zero experts], with [`RouterConfig::gate_bias`](moe_router::RouterConfig::gate_bias).
    pub(crate) gate_bias: Option<Tensor>,
    pub(crate) router: Arc<Router>,
    pub(crate) path: Path,
    /// The path for steps in which, as the ranks have agreed, all of them only decode.
    pub(crate) decode: Option<Path>,
    /// Experts whose launches contain the router, in the order of trial.
    pub(crate) monolithic: Vec<Arc<dyn MonolithicExperts>>,
    /// The placed experts, if a map places experts.
    pub(crate) placed: Option<Arc<PlacedExperts>>,
    pub(crate) shared: Option<SharedExperts>,
    pub(crate) layer: usize,
    /// The largest number of tokens of a chunk.
    pub(crate) chunk: Option<NonZeroUsize>,
}

impl SparseMoeBlock {
    /// A block of modular experts. `gate` is the router's weight [E + zero experts, H] in the model dtype, or in f32 to
    /// keep digits that the model dtype would round; `layer` counts the model's MoE layers from 0.
    ///
    /// # Errors
    /// Parts that do not fit each other; the error names both: another activation format; row limits that are missing
    /// or too small; a router and a prepare side of which only one applies the router weight to the input; another
    /// number of experts in the router, the expert map or the weights; a gate of other dims or dtype than the router
    /// and the experts need.
    pub fn new(
        gate: Tensor,
        router: Router,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
        layer: usize,
    ) -> Result<Self> {
        Self::of_placed(gate, router, (prepare, experts), layer, None)
    }

    /// Does the same as [`new`](Self::new) for experts that a map places: the router chooses logical experts, and the
    /// other parts use physical ones.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); a map for another number of experts.
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
            gate_bias: None,
            router: Arc::new(router),
            path: Path { prepare: prepare.into(), experts: experts.into() },
            decode: None,
            monolithic: Vec::new(),
            placed,
            shared: None,
            layer,
            chunk: None,
        })
    }

    /// Adds experts whose launches contain the router, over the same weights as the modular ones. The plan says which
    /// steps they compute.
    ///
    /// # Errors
    /// Experts of another shape than the modular ones.
    pub fn with_monolithic(mut self, experts: Box<dyn MonolithicExperts>) -> Result<Self> {
        if experts.shape() != self.path.experts.shape() {
            refuse!(
                Parts,
                "monolithic experts `{}`: expected the shape of the modular `{}`, {:?}, got {:?}",
                experts.name(),
                self.path.experts.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.monolithic.push(experts.into());
        Ok(self)
    }

    /// Computes the tokens of a call in even chunks of at most `size`; the output is the same. On several ranks all
    /// must have the same size, which [`load_block_on`](crate::load_block_on) ensures.
    pub fn with_chunk_size(mut self, size: Option<NonZeroUsize>) -> Self {
        self.chunk = size;
        self
    }

    /// Adds a bias to the gate's logits, [E + zero experts] in the gate's dtype and on its device. A router with
    /// [`gate_bias`](moe_router::RouterConfig::gate_bias) needs it.
    ///
    /// # Errors
    /// A router without a gate bias; other dims or another dtype.
    pub fn with_gate_bias(mut self, bias: Tensor) -> Result<Self> {
        let config = self.router.config();
        if !config.gate_bias {
            refuse!(Parts, "router gate: a bias was given, but the router is configured without one")
        }
        let wanted = [config.num_logits()];
        if bias.dims() != wanted || bias.dtype() != self.gate.dtype() {
            refuse!(
                Parts,
                "router gate: expected a bias {wanted:?} of dtype {}, got {:?} of {}",
                self.gate.dtype().as_str(),
                bias.dims(),
                bias.dtype().as_str()
            )
        }
        self.gate_bias = Some(bias.contiguous()?);
        Ok(self)
    }

    /// Returns the bias of the gate's logits.
    ///
    /// # Errors
    /// A router that needs a bias, in a block without one.
    pub(crate) fn gate_bias(&self) -> Result<Option<TensorView<'_>>> {
        if self.router.config().gate_bias && self.gate_bias.is_none() {
            refuse!(
                Parts,
                "router gate: the router is configured with a bias; give it by SparseMoeBlock::with_gate_bias"
            )
        }
        self.gate_bias.as_ref().map(TensorView::new).transpose()
    }

    /// Packs the gate for the kernels of an instruction set of the CPU ([`Weight::packed`]); `None` leaves it in rows.
    ///
    /// # Errors
    /// No memory is left.
    pub fn with_packed_gate(mut self, isa: Option<CpuIsa>) -> Result<Self> {
        self.gate = self.gate.packed(isa, self.router.config().num_logits())?;
        Ok(self)
    }

    /// Adds another prepare/finalize backend with its experts, over the same weights, for steps in which, as the ranks
    /// have agreed, all of them only decode (`StepContext::only_decode`).
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); experts of another shape.
    pub fn with_decode_path(
        mut self,
        prepare: Box<dyn PrepareFinalize>,
        experts: Box<dyn Experts>,
    ) -> Result<Self> {
        check_modular(self.router.config(), prepare.as_ref(), experts.as_ref(), self.placed.as_deref())?;
        if experts.shape() != self.path.experts.shape() {
            refuse!(
                Parts,
                "decode path: expected experts like the experts of {}, {:?}, got {:?}",
                self.path.prepare.name(),
                self.path.experts.shape(),
                experts.shape()
            )
        }
        self.decode = Some(Path { prepare: prepare.into(), experts: experts.into() });
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

    /// Leaves the sum over the ranks that share the tokens to the caller. Returns whether there is such a sum and
    /// nothing else follows the experts. False for a block that has clones, because they would leave the sum, too.
    #[must_use = "true means that the caller must add the sum"]
    pub fn defer_sum(&mut self) -> bool {
        let alone = self.router.config().num_zero_experts == 0 && self.shared.is_none();
        let prepare = Arc::get_mut(&mut self.path.prepare).filter(|_| alone && self.decode.is_none());
        prepare.is_some_and(|prepare| prepare.defer_sum())
    }

    /// The experts that a map places; `None` if physical experts are the logical ones.
    pub fn placed_experts(&self) -> Option<&PlacedExperts> {
        self.placed.as_deref()
    }

    /// The cost of experts in host memory so far; `None` if all are on the device. It waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.path.experts.traffic()
    }

    /// The path of a step. `only_decode` says that, as the ranks have agreed, each of them only decodes.
    pub(crate) fn path_of(&self, only_decode: bool) -> &Path {
        self.decode.as_ref().filter(|_| only_decode).unwrap_or(&self.path)
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Whether the experts of a row may depend on the row's number in the step, and not only on its values.
    pub fn routes_by_number(&self) -> bool {
        match self.router.config().selection {
            Selection::TopK | Selection::Grouped { .. } | Selection::RawLogits => false,
            // Hash tables, functions and strategies; of a method that is not known here it is assumed.
            _ => true,
        }
    }

    /// The modular experts' name, for logs.
    pub fn experts_name(&self) -> &str {
        self.path.experts.name()
    }

    /// The largest number of tokens of a chunk; `None` without chunks.
    pub fn chunk_size(&self) -> Option<NonZeroUsize> {
        self.chunk
    }

    /// The bytes of workspace for a chunk of `tokens` tokens: received rows, intermediate results of the experts and
    /// slot rows, for the largest number of rows that can arrive. It never falls when `tokens` rises.
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
