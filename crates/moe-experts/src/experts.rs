//! The two families of experts, and what they need of the workspace.
//!
//! *Modular* experts take rows and the slots that routing chose; *monolithic* experts take rows and the gate, and route
//! inside the launch. The families have different traits, so that neither can take the other's place.

use candle_core::{DType, Result, bail};
use moe_kernels::plan::{Machine, MonolithicCall, QuantWeights, Reason};
use moe_kernels::{
    ActivationFormat, Dims, Dispatched, Exec, ExpertTraffic, Gate, Scratch, SublayerIo, View, ViewMut,
    WeightAndReduce, Workspace,
};

use crate::weights::ExpertsShape;

/// Modular experts: rows of prepared tokens in; out come unweighted rows, one per slot, or the weighted sums of each token.
/// [`weight_and_reduce`](Self::weight_and_reduce) says which.
///
/// | format | `dispatched.rows` | `out` of `Delegate`, f32 | `out` of `NoOp` |
/// |---|---|---|---|
/// | Standard | [T', H] | [T', K, H] | [T', H] |
/// | BatchedExperts | [E_local, max_tokens, H] | [E_local, max_tokens, H] | none |
/// | Listed | [T', H] | [T', K, H] | [T', H] |
///
/// - Unweighted rows (`Delegate`): rows of slots without a local expert become zero; rows of a block behind its expert's
///   `expert_num_tokens` are neither read nor written. Router weights are not applied, so a row's bits do not depend on who
///   asks for it. Experts of which several ranks hold a part each leave [`segments`](Self::segments) sums apart: one more
///   leading dimension of `out`.
/// - Weighted sums (`NoOp`): each row is the sum over the token's slots with a local expert, times their router weights; it is
///   zero where there is none. `out` is f32, or the dtype that prepare/finalize wants of sums.
pub trait Experts: Send + Sync {
    /// The name in error messages and logs.
    fn name(&self) -> &str;

    /// The layout of the rows that [`apply`](Self::apply) takes.
    fn activation_format(&self) -> ActivationFormat;

    /// Sizes and dtype of the experts on this rank.
    fn shape(&self) -> ExpertsShape;

    /// How finalize must treat `out`. `Delegate`, the default, says that the rows are unweighted
    /// and that the prepare/finalize backend chooses. Experts that weight and reduce by themselves
    /// say `NoOp`: they run on any number of ranks, except beside a backend that adds by slot
    /// (`Combine::BySlot`), because there the owners of rows need them unweighted.
    fn weight_and_reduce(&self) -> WeightAndReduce {
        WeightAndReduce::Delegate
    }

    /// Rows of an expert's block that these experts were built for. Batched experts say it, so that a
    /// layer can check that prepare does not fill more; `None` in the other formats.
    fn max_rows(&self) -> Option<usize> {
        None
    }

    /// How w13 and w2 are held, as the choice of kernels sees it; `None`: in floats.
    fn quantisation(&self) -> Option<[QuantWeights; 2]> {
        None
    }

    /// The kernels of the products, in words for plans.
    fn products(&self) -> &'static str {
        "grouped products"
    }

    /// Slots of the device, where there are fewer than experts and the others wait in host memory; `None`: all are there.
    fn num_slots(&self) -> Option<usize> {
        None
    }

    /// What experts in host memory have cost so far; `None` where all are on the device. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    fn traffic(&self) -> Result<Option<ExpertTraffic>> {
        Ok(None)
    }

    /// Where tensor parallelism cuts the experts: how many partial sums of a row are left apart, this
    /// rank's segments of the intermediate size in ascending order.
    fn segments(&self) -> Option<usize> {
        None
    }

    /// Dims of `out` for these rows.
    fn out_dims(&self, dispatched: &Dispatched) -> Result<Dims> {
        let dims = dispatched.expert_out_dims()?;
        match self.segments() {
            None => Ok(dims),
            Some(segments) => Dims::new(&[&[segments], &*dims].concat()),
        }
    }

    /// The buffers that one call of [`apply`](Self::apply) takes from the workspace, beside `out`,
    /// for at most `max_tokens` rows (Standard: token rows of `top_k` slots each; BatchedExperts:
    /// rows per local expert, `top_k` does not matter). Kernels may take scratch of their own, whose
    /// size does not grow with the number of tokens beyond some bound; before a workspace is
    /// frozen, one call of the largest size makes it hold that too.
    ///
    /// # Errors
    /// Sizes that overflow.
    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation>;

    /// The slots' unweighted rows [T' K, H] f32 of experts that else weight and reduce by themselves, where they can be had: a launch
    /// that sends sums to other ranks may add them up on the way. Rows of slots without a local expert are unspecified. `None`: use
    /// [`apply`](Self::apply).
    ///
    /// # Errors
    /// As `apply`.
    fn slot_rows(&self, dispatched: &Dispatched, ex: &mut Exec) -> Result<Option<Scratch>> {
        let _ = (dispatched, ex);
        Ok(None)
    }

    /// Computes every slot of a local expert, and with `NoOp` adds them up.
    ///
    /// # Errors
    /// Rows in the other format; wrong dims or dtypes; an expert id or a row count out of range.
    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()>;
}

/// Monolithic experts: the router is part of the launch, so they take rows and the gate, and their output is weighted and
/// reduced. Routing cannot be seen, forced or dispatched around them. A layer holds them beside its modular experts, over
/// the same weights, and its plan says which steps they compute.
pub trait MonolithicExperts: Send + Sync {
    /// The name in explanations and error messages.
    fn name(&self) -> &str;

    /// Sizes and dtype of the experts on this rank.
    fn shape(&self) -> ExpertsShape;

    /// Whether this implementation computes such a step on this machine, or the first reason why not. It looks at its
    /// arguments and at what the experts are, never at a device.
    ///
    /// # Errors
    /// That reason.
    fn fits(&self, call: &MonolithicCall, machine: &Machine) -> std::result::Result<(), Reason>;

    /// The weighted sums of the experts that the gate chooses and that live here. `expert_map` \[E\] i32 says which expert
    /// is which local one, -1 = elsewhere; `None` = all are here.
    ///
    /// # Errors
    /// Wrong dims or dtypes; what [`fits`](Self::fits) refuses.
    fn apply(
        &self,
        gate: &Gate<'_>,
        expert_map: Option<View<'_>>,
        io: SublayerIo<'_>,
        ex: &mut Exec,
    ) -> Result<()>;
}

/// Scratch buffers that a call holds at once: dtype and number of elements of each.
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

    /// Makes the workspace hold all of the buffers at once, so that a call within the reserved size
    /// does not allocate them.
    ///
    /// # Errors
    /// A frozen workspace that lacks one of them.
    pub fn reserve(&self, workspace: &Workspace) -> Result<()> {
        let held = self.buffers.iter().map(|(dtype, len)| workspace.scratch(*dtype, &[*len]));
        held.collect::<Result<Vec<_>>>().map(drop)
    }
}
