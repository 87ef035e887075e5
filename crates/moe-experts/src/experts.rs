//! The two families of experts, and the memory that they take from the workspace.
//!
//! *Modular* experts take rows and the slots that routing chose; *monolithic* experts take rows and the gate, and route
//! inside the launch. The families have different traits, so that neither can take the other's place.

use candle_core::{DType, Result, Tensor, bail};
use moe_kernels::plan::{EpilogueCall, Machine, MonolithicCall, QuantWeights, Reason};
use moe_kernels::{
    ActivationFormat, Dims, Dispatched, Exec, ExpertTraffic, Gate, Scratch, SublayerIo, View, ViewMut,
    WeightAndReduce, Workspace,
};

use crate::weights::ExpertsShape;

/// Modular experts. They take rows of prepared tokens and return either unweighted rows, one per slot, or the weighted
/// sums of each token. [`weight_and_reduce`](Self::weight_and_reduce) tells which.
///
/// | format | `dispatched.rows` | `out` of `Delegate`, f32 | `out` of `NoOp` |
/// |---|---|---|---|
/// | Standard | [T', H] | [T', K, H] | [T', H] |
/// | BatchedExperts | [E_local, max_tokens, H] | [E_local, max_tokens, H] | none |
/// | Listed | [T', H] | [T', K, H] | [T', H] |
///
/// - Unweighted rows (`Delegate`): rows of slots without a local expert become zero. In a block, rows after the
///   expert's first `expert_num_tokens` are neither read nor written. Router weights are not applied, so a row's bits
///   do not depend on which rank asks for it. If several ranks hold a part of each expert, the
///   [`segments`](Self::segments) sums are kept apart in one more leading dimension of `out`.
/// - Weighted sums (`NoOp`): each row is the sum over the token's slots with a local expert, times their router
///   weights. It is zero if there is no such slot. `out` is f32, or the dtype in which prepare/finalize takes sums.
pub trait Experts: Send + Sync {
    /// The name in error messages and logs.
    fn name(&self) -> &str;

    /// The layout of the rows that [`apply`](Self::apply) takes.
    fn activation_format(&self) -> ActivationFormat;

    /// Sizes and dtype of the experts on this rank.
    fn shape(&self) -> ExpertsShape;

    /// How finalize must treat `out`. `Delegate`, the default, says that the rows are unweighted
    /// and that the prepare/finalize backend chooses. Experts that weight and reduce by themselves return `NoOp`: they
    /// run on any number of ranks, except with a backend that adds by slot (`Combine::BySlot`), because there the
    /// owners of rows need them unweighted.
    fn weight_and_reduce(&self) -> WeightAndReduce {
        WeightAndReduce::Delegate
    }

    /// The number of rows of an expert's block for which these experts were built, so that a layer can check that
    /// prepare does not fill more. It is `None` in formats other than BatchedExperts.
    fn max_rows(&self) -> Option<usize> {
        None
    }

    /// How w13 and w2 are quantised, for the choice of kernels; `None` means floats.
    fn quantisation(&self) -> Option<[QuantWeights; 2]> {
        None
    }

    /// Biases and activation, for the choice of kernels.
    fn epilogue(&self) -> EpilogueCall {
        EpilogueCall::PLAIN
    }

    /// The names of the kernels of the products, for plans.
    fn products(&self) -> &'static str {
        "grouped products"
    }

    /// The number of slots on the device if it has fewer slots than experts, and the other experts are in host memory.
    /// `None` means that all experts have a slot.
    fn num_slots(&self) -> Option<usize> {
        None
    }

    /// The cost of experts in host memory so far; `None` if all are on the device. It waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    fn traffic(&self) -> Result<Option<ExpertTraffic>> {
        Ok(None)
    }

    /// If tensor parallelism cuts the experts: the number of partial sums of a row that stay separate. These are this
    /// rank's segments of the intermediate size in ascending order.
    fn segments(&self) -> Option<usize> {
        None
    }

    /// The bias [E_local, H] of the rows of cut experts. It is in none of their segments, so it is added after them.
    fn deferred_bias(&self) -> Option<&Tensor> {
        None
    }

    /// The dims of `out` for these rows.
    fn out_dims(&self, dispatched: &Dispatched) -> Result<Dims> {
        let dims = dispatched.expert_out_dims()?;
        match self.segments() {
            None => Ok(dims),
            Some(segments) => Dims::new(&[&[segments], &*dims].concat()),
        }
    }

    /// The buffers that one call of [`apply`](Self::apply) takes from the workspace, in addition to `out`, for at most
    /// `max_tokens` rows. In the Standard format these are token rows of `top_k` slots each. In the BatchedExperts
    /// format they are rows per local expert, and `top_k` has no effect. Kernels may take scratch memory of their own,
    /// whose size stops growing at some number of tokens. Before a workspace is frozen, one call of the largest size
    /// must be made, so that it has that memory, too.
    ///
    /// # Errors
    /// Sizes that overflow.
    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation>;

    /// Computes the slots' unweighted rows [T' K, H] f32, for experts whose [`apply`](Self::apply) weights and reduces.
    /// A launch that sends sums to other ranks may add these rows up itself. Rows of slots without a local expert are
    /// unspecified. Returns `None` if these experts cannot return such rows.
    ///
    /// # Errors
    /// The errors of `apply`.
    fn slot_rows(&self, dispatched: &Dispatched, ex: &mut Exec) -> Result<Option<Scratch>> {
        let _ = (dispatched, ex);
        Ok(None)
    }

    /// Computes the row of every slot with a local expert. With `NoOp` it also adds up the rows of a token.
    ///
    /// # Errors
    /// Rows in another format; wrong dims or dtypes; an expert id or a row count out of range.
    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()>;
}

/// Monolithic experts: the router is part of the launch. So they take rows and the gate, and their output is weighted
/// and reduced. Their routing cannot be observed, forced or dispatched. A layer holds them in addition to its modular
/// experts, over the same weights, and its plan says which steps they compute.
pub trait MonolithicExperts: Send + Sync {
    /// The name in explanations and error messages.
    fn name(&self) -> &str;

    /// Sizes and dtype of the experts on this rank.
    fn shape(&self) -> ExpertsShape;

    /// Returns whether this implementation can compute this step on this machine, or else the first reason why not. It
    /// depends only on its arguments and the properties of the experts, never on a device.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn fits(&self, call: &MonolithicCall, machine: &Machine) -> std::result::Result<(), Reason>;

    /// Computes the weighted sums of the experts that the gate chooses and that are on this rank. `expert_map` \[E\]
    /// i32 has the local number of each expert, or -1 if the expert is on another rank. `None` means that all experts
    /// are on this rank.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a step that [`fits`](Self::fits) refuses.
    fn apply(
        &self,
        gate: &Gate<'_>,
        expert_map: Option<View<'_>>,
        io: SublayerIo<'_>,
        ex: &mut Exec,
    ) -> Result<()>;
}

/// The scratch buffers that a call uses at the same time: dtype and number of elements of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    buffers: Vec<(DType, usize)>,
}

impl Reservation {
    /// No buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer of these dims.
    ///
    /// # Errors
    /// Dims that overflow.
    pub fn with(mut self, dtype: DType, dims: &[usize]) -> Result<Self> {
        let bytes = Dims::new(dims)?.elem_count()?.checked_mul(dtype.size_in_bytes());
        if bytes.and_then(|b| b.checked_add(self.bytes())).is_none() {
            bail!("a reservation of {} {dims:?} overflows", dtype.as_str())
        }
        self.buffers.push((dtype, Dims::new(dims)?.elem_count()?));
        Ok(self)
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(|(dtype, len)| dtype.size_in_bytes() * len).sum()
    }

    /// Makes the workspace hold all of the buffers at the same time. A call within the reserved size then does not
    /// allocate.
    ///
    /// # Errors
    /// A frozen workspace that does not have one of them.
    pub fn reserve(&self, workspace: &Workspace) -> Result<()> {
        let held = self.buffers.iter().map(|(dtype, len)| workspace.scratch(*dtype, &[*len]));
        held.collect::<Result<Vec<_>>>().map(drop)
    }
}
