//! The gated MLP of dense layers and of shared experts: `down(act(gate(x)) * up(x))`.
//!
//! On the CPU it runs on the experts' own kernels, as one expert that computes every token. So dense and sparse layers
//! have the same arithmetic: fused gate and up products, one rounding of the activation, and a row-parallel down
//! product. On a GPU dense products are faster than grouped products for one expert, and the activation is a launch
//! between them.

use candle_nn::Module;
use moe_comm::RowParallel;
use moe_kernels::arguments::{expect_matrix, expect_rows};
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::names::MlpNames;
use moe_kernels::plan::{Form, FusedLinearForm, LinearCall, LinearForm, Machine, Stage, in_parts};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Activation, CpuIsa, Exec, ExpertGroups, Scratch, Unread, View, ViewMut, Weight, forward_rows,
    gated_rows_into, grouped_gate_up_into, linear_add_into, linear_into, linear_row_parallel_into,
    one_group_into,
};

use crate::context::BlockContext;
use crate::pack::load_weight;

/// The number of rows that a GPU computes at a time, because the sums of gate and up are in memory between the
/// launches.
const ROWS_AT_ONCE: usize = 8192;
/// The name in plans of the products and the activation on the CPU.
const GROUPED: &str = "grouped products";

/// A gated MLP with packed gate and up weights.
///
/// | tensor | shape |
/// |---|---|
/// | w13 | [1, 2I, H]: gate rows, then up rows |
/// | w2 | [H, I] |
#[derive(Debug, Clone)]
#[must_use = "it computes nothing until it is called"]
pub struct GatedMlp {
    w13: Weight,
    w2: Weight,
    activation: Activation,
    /// The ranks that cut the MLP, if this is a part of it.
    ranks: Option<RowParallel>,
}

impl GatedMlp {
    /// Makes an MLP from packed weights `w13` [2I, H] (gate rows, then up rows) and `w2` [H, I].
    ///
    /// # Errors
    /// Dims that do not match; two dtypes.
    pub fn new(w13: Tensor, w2: Tensor, activation: Activation) -> Result<Self> {
        expect_matrix("gated MLP", "w13", &w13)?;
        expect_matrix("gated MLP", "w2", &w2)?;
        Self::of(Weight::new(w13)?, Weight::new(w2)?, activation)
    }

    /// Makes an MLP from weights `w13` [2I, H] or [1, 2I, H] and `w2` [H, I].
    fn of(w13: Weight, w2: Weight, activation: Activation) -> Result<Self> {
        activation.check()?;
        let w13 = w13.with_experts()?;
        match (w13.dims(), w2.dims()) {
            (&[1, rows, hidden], &[out, i]) if rows == 2 * i && out == hidden => {}
            (w13, w2) => {
                let w13 = w13.get(1..).unwrap_or(w13);
                bail!("gated MLP: expected w13 [2I, H] and w2 [H, I], got {w13:?} and {w2:?}")
            }
        }
        if w13.dtype() != w2.dtype() {
            bail!("gated MLP: w13 is {} but w2 is {}", w13.dtype().as_str(), w2.dtype().as_str())
        }
        Ok(Self { w13, w2, activation, ranks: None })
    }

    /// Loads `gate_proj.weight`, `up_proj.weight` [I, H] and `down_proj.weight` [H, I]; gate and up
    /// go straight into their pack, which is then packed for this machine ([`packed`](Self::packed)).
    ///
    /// # Errors
    /// Tensors that are missing or have a wrong shape; biases other than zero and scales of quantised weights, because
    /// they are not read.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: candle_nn::VarBuilder,
    ) -> Result<Self> {
        let context = BlockContext::default();
        Self::load_on(hidden_size, intermediate_size, activation, vb, &context)?.packed(context.cpu_isa)
    }

    /// Does the same as [`load`](Self::load) on a rank, with the context's names of matrices, which may be quantised.
    /// `intermediate_size` is the size of this rank's part.
    ///
    /// # Errors
    /// The errors of `load`; quantised tensors that do not match the header.
    pub fn load_on(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: candle_nn::VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let names = &context.names;
        refuse_unread(names, &vb)?;
        let modules = [names.gate, names.up].map(|name| (name, intermediate_size));
        let w13 = load_weight(&vb, &modules, hidden_size, QuantUse::GateUp, context)?;
        let down = [(names.down, hidden_size)];
        let usage = context.row_parallel_use(intermediate_size);
        Self::of(w13, load_weight(&vb, &down, intermediate_size, usage, context)?, activation)
    }

    /// Returns the same MLP with its weights in the order that an instruction set of the CPU reads best, see
    /// [`Weight::packed`].
    ///
    /// # Errors
    /// No memory is left.
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let width = self.intermediate_size();
        let hidden = self.hidden_size();
        Ok(Self { w13: self.w13.packed(isa, width)?, w2: self.w2.packed(isa, hidden)?, ..self })
    }

    /// Makes this the part of an MLP that some ranks cut along its intermediate size; each holds its
    /// rows of gate and up and its columns of down.
    pub fn with_row_parallel(self, ranks: impl Into<Option<RowParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// On CUDA, leaves the sum over the ranks that cut this MLP to the caller. Returns whether there is such a sum.
    #[must_use = "true means that the caller must add the sum"]
    pub fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(RowParallel::defer_sum).is_some()
    }

    /// Width of the activation between the two products.
    pub fn intermediate_size(&self) -> usize {
        self.w2.dims()[1]
    }

    /// Dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.w2.dtype()
    }

    /// Hidden size H.
    pub fn hidden_size(&self) -> usize {
        self.w2.dims()[0]
    }

    /// The kernels of [`forward_into`](Self::forward_into) for `rows` rows, in their order.
    pub fn stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        let mut stages = self.part_stages(rows, machine);
        stages.extend(self.sum_stage());
        stages
    }

    /// The kernels of [`part_into`](Self::part_into).
    pub(crate) fn part_stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        let mut stages = self.activated_stages(rows, machine);
        stages.push(LinearForm::stage(&["down"], &self.down_call(rows), machine));
        stages
    }

    /// The sum of [`add_parts`](Self::add_parts).
    pub(crate) fn sum_stage(&self) -> Option<Stage> {
        self.ranks.as_ref().and_then(RowParallel::sum_stage)
    }

    /// The kernels of [`add_into`](Self::add_into) to sums in f32.
    pub(crate) fn add_stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        if self.ranks.is_some() {
            let mut stages = self.stages(rows, machine);
            stages.push(Stage::new(&["add"], "add"));
            return stages;
        }
        let mut stages = self.activated_stages(rows, machine);
        let computes: [&[&str]; 3] = [&["down"], &["add"], &["down", "add"]];
        stages.extend(FusedLinearForm::added(computes, &self.down_call(rows), machine));
        stages
    }

    fn activated_stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        if machine.gpu.is_none() {
            return vec![Stage::new(&["gate, up, activation"], GROUPED)];
        }
        let pieces: Vec<usize> =
            (0..rows).step_by(ROWS_AT_ONCE).map(|first| ROWS_AT_ONCE.min(rows - first)).collect();
        in_parts(&pieces, |rows| {
            let call = linear_call(rows, 2 * self.intermediate_size(), self.hidden_size(), &self.w13);
            let gate_up = LinearForm::stage(&["gate, up"], &call, machine);
            vec![gate_up, Stage::new(&["activation"], "gated_rows")]
        })
    }

    fn down_call(&self, rows: usize) -> LinearCall {
        linear_call(rows, self.hidden_size(), self.intermediate_size(), &self.w2)
    }

    /// `out` [T, H] (the weights' dtype or f32) = MLP(`x` [T, H], the weights' dtype).
    pub fn forward_into(&self, x: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let activated = self.activated(x, ex)?;
        let w2 = self.w2.read()?;
        match &self.ranks {
            None => linear_row_parallel_into(activated.view(), w2.view()?, None, out, ex),
            Some(ranks) => ranks.linear_into(activated.view(), w2.view()?, None, out, ex),
        }
    }

    /// The first half of [`forward_into`](Self::forward_into) on CUDA: computes the partial result of this rank's
    /// weights, [T, H].
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub(crate) fn part_into(&self, x: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let activated = self.activated(x, ex)?;
        let w2 = self.w2.read()?;
        match &self.ranks {
            None => linear_row_parallel_into(activated.view(), w2.view()?, None, out, ex),
            Some(ranks) => ranks.part_into(activated.view(), w2.view()?, None, out, ex),
        }
    }

    /// The second half: adds the ranks' parts.
    ///
    /// # Errors
    /// Ranks that disagree, or died.
    pub(crate) fn add_parts(&self, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.add_parts(out, ex))
    }

    /// `acc` [T, H] (the weights' dtype or f32) += MLP(`x` [T, H], the weights' dtype), whose result stays in f32.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn add_into(&self, x: View<'_>, acc: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        if self.ranks.is_none() && acc.dtype() == DType::F32 {
            let activated = self.activated(x, ex)?;
            return linear_add_into(activated.view(), self.w2.read()?.view()?, None, acc, ex);
        }
        let mut rows = ex.scratch(DType::F32, x.dims())?;
        self.forward_into(x, rows.view_mut(), ex)?;
        moe_kernels::add_into(rows.view(), acc, ex)
    }

    /// act(gate(x)) * up(x), [T, I] in the weights' dtype.
    fn activated(&self, x: View<'_>, ex: &mut Exec) -> Result<Scratch> {
        let rows = x.rows();
        let width = self.intermediate_size();
        let w13 = self.w13.read()?;
        let mut activated = ex.scratch(x.dtype(), &[rows, width])?;
        if !ex.is_cuda() {
            let _products = ex.launched_as_one(|| GROUPED);
            let mut offsets = ex.scratch(DType::U32, &[2])?;
            let mut index = ex.scratch(DType::U32, &[rows])?;
            one_group_into(offsets.view_mut(), index.view_mut(), ex)?;
            let offsets = offsets.view();
            let index = index.view();
            let groups = ExpertGroups { offsets, in_rows: index, out_rows: index };
            let out = activated.view_mut();
            grouped_gate_up_into(x, &groups, w13.view()?, None, self.activation, out, ex)?;
            return Ok(activated);
        }
        let w13 = w13.view()?.only_matrix("gated MLP")?;
        let mut sums = ex.scratch(DType::F32, &[rows.min(ROWS_AT_ONCE), 2 * width])?;
        for first in (0..rows).step_by(ROWS_AT_ONCE) {
            let count = ROWS_AT_ONCE.min(rows - first);
            linear_into(x.narrow(first, count)?, w13, None, sums.view_mut().narrow(0, count)?, ex)?;
            let to = activated.view_mut().narrow(first, count)?;
            gated_rows_into(sums.view().narrow(0, count)?, self.activation, to, ex)?;
        }
        Ok(activated)
    }

    /// [`forward_into`](Self::forward_into) on candle tensors: `x` [.., H] in the weights' dtype and on their device,
    /// in any layout.
    ///
    /// # Errors
    /// Another hidden size, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        expect_rows("gated MLP", "x", x, self.hidden_size(), self.dtype())?;
        forward_rows(x, self.hidden_size(), x.dtype(), |x, out, ex| self.forward_into(x, out, ex))
    }
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        GatedMlp::forward(self, x)
    }
}

/// The product of `rows` rows with a weight [n, k].
fn linear_call(rows: usize, n: usize, k: usize, weight: &Weight) -> LinearCall {
    let dtype = weight.dtype();
    let quant = weight.quantisation();
    LinearCall { rows, n, k, dtype, quant, bias: false, aligned: true }
}

/// Checks that the checkpoint has no biases of the MLP, and no scales of its weights.
fn refuse_unread(names: &MlpNames, vb: &candle_nn::VarBuilder) -> Result<()> {
    let mut unread = Unread::under(vb);
    for name in names.matrices() {
        unread.bias(&format!("{name}.bias"));
        unread.scales(&format!("{name}.weight"));
    }
    unread.refuse(
        "gated MLP",
        "an MLP has no biases here, and quantised weights need the source of a checkpoint's header",
    )
}
