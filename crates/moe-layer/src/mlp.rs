//! The gated MLP of dense layers and of shared experts: `down(act(gate(x)) * up(x))`.
//!
//! It runs on the experts' own kernels, as one expert that every token visits, so dense and
//! sparse layers share one arithmetic: fused gate and up products, one rounding of the
//! activation, and a row-parallel down product.

use moe_comm::RowParallel;
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Activation, CpuIsa, Exec, ExpertGroups, View, ViewMut, Weight, Workspace, forward_rows,
    grouped_gate_up_into, linear_row_parallel_into, one_group_into,
};

use crate::context::BlockContext;
use crate::pack::load_weight;

/// A gated MLP with packed gate and up weights.
///
/// | tensor | shape |
/// |---|---|
/// | w13 | [1, 2I, H]: gate rows, then up rows |
/// | w2 | [H, I] |
#[derive(Debug, Clone)]
pub struct GatedMlp {
    w13: Weight,
    w2: Weight,
    activation: Activation,
    /// The ranks that cut it, if it is a part.
    ranks: Option<RowParallel>,
    workspace: Workspace,
}

impl GatedMlp {
    /// From packed weights `w13` [2I, H] (gate rows, then up rows) and `w2` [H, I].
    ///
    /// # Errors
    /// Dims that do not match each other; two dtypes.
    pub fn new(w13: Tensor, w2: Tensor, activation: Activation) -> Result<Self> {
        w13.dims2()?;
        Self::of(Weight::new(w13)?, Weight::new(w2)?, activation)
    }

    /// From weights `w13` [2I, H] or [1, 2I, H] and `w2` [H, I].
    fn of(w13: Weight, w2: Weight, activation: Activation) -> Result<Self> {
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
        Ok(Self { w13, w2, activation, ranks: None, workspace: Workspace::new() })
    }

    /// Loads `gate_proj.weight`, `up_proj.weight` [I, H] and `down_proj.weight` [H, I]; gate and up
    /// go straight into their pack.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: candle_nn::VarBuilder,
    ) -> Result<Self> {
        Self::load_on(hidden_size, intermediate_size, activation, vb, &BlockContext::default())
    }

    /// The same on a rank, where projections may be quantised: the intermediate size is that of the rank's part.
    ///
    /// # Errors
    /// As `load`; quantised tensors that are not what the header says.
    pub fn load_on(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: candle_nn::VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let modules = ["gate_proj", "up_proj"].map(|name| (name, intermediate_size));
        let w13 = load_weight(&vb, &modules, hidden_size, QuantUse::GateUp, context)?;
        let down = [("down_proj", hidden_size)];
        let usage = context.row_parallel_use(intermediate_size);
        Self::of(w13, load_weight(&vb, &down, intermediate_size, usage, context)?, activation)
    }

    /// The same MLP with its weights in the order that a path of the CPU reads best, see [`Weight::packed`].
    ///
    /// # Errors
    /// No memory left.
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let (width, hidden) = (self.intermediate_size(), self.hidden_size());
        Ok(Self { w13: self.w13.packed(isa, width)?, w2: self.w2.packed(isa, hidden)?, ..self })
    }

    /// Makes this the part of an MLP that some ranks cut along its intermediate size; each holds its
    /// rows of gate and up and its columns of down.
    pub fn with_row_parallel(self, ranks: impl Into<Option<RowParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// On CUDA, leaves the sum over the ranks that cut this MLP to the caller; whether there is one.
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

    /// `out` [T, H] (the weights' dtype or f32) = MLP(`x` [T, H], the weights' dtype).
    pub fn forward_into(&self, x: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let rows = x.rows();
        let (mut offsets, mut index) = (ex.scratch(DType::U32, &[2])?, ex.scratch(DType::U32, &[rows])?);
        one_group_into(offsets.view_mut(), index.view_mut(), ex)?;
        let groups = ExpertGroups { offsets: offsets.view(), in_rows: index.view(), out_rows: index.view() };
        let (w13, w2) = (self.w13.read()?, self.w2.read()?);
        let mut activated = ex.scratch(x.dtype(), &[rows, self.intermediate_size()])?;
        grouped_gate_up_into(x, &groups, w13.view()?, None, self.activation, activated.view_mut(), ex)?;
        match &self.ranks {
            None => linear_row_parallel_into(activated.view(), w2.view()?, None, out, ex),
            Some(ranks) => ranks.linear_into(activated.view(), w2.view()?, None, out, ex),
        }
    }

    /// The same on candle tensors: `x` [.., H] in the weights' dtype and on their device, in any layout.
    ///
    /// # Errors
    /// Another hidden size, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        forward_rows(x, (self.hidden_size(), x.dtype()), &self.workspace, |x, out, ex| {
            self.forward_into(x, out, ex)
        })
    }
}
