//! Shared experts: an MLP that every token visits beside its routed experts.
//!
//! DeepSeek adds the MLP as it is; Qwen2-MoE and Qwen3-Next scale it per token by
//! `sigmoid(shared_expert_gate(x))`.

use candle_nn::VarBuilder;
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::plan::{Machine, Stage};
use moe_kernels::{Activation, Exec, TensorView, View, ViewMut, add_scaled_into, linear_into, sigmoid_into};

use crate::mlp::GatedMlp;

/// Shared experts, fused into one MLP, with an optional per-token gate.
#[derive(Debug, Clone)]
pub struct SharedExperts {
    mlp: GatedMlp,
    gate: Option<Tensor>,
}

impl SharedExperts {
    /// `gate`: weight [1, H] of the sigmoid gate, in the MLP's dtype.
    ///
    /// # Errors
    /// A gate of another shape or dtype.
    pub fn new(mlp: GatedMlp, gate: Option<Tensor>) -> Result<Self> {
        if let Some(gate) = &gate
            && (gate.dims() != [1, mlp.hidden_size()] || gate.dtype() != mlp.dtype())
        {
            bail!(
                "shared experts: expected a gate weight [1, {}] of dtype {} like the MLP, got {:?} of {}",
                mlp.hidden_size(),
                mlp.dtype().as_str(),
                gate.dims(),
                gate.dtype().as_str()
            )
        }
        Ok(Self { mlp, gate: gate.map(|g| g.contiguous()).transpose()? })
    }

    /// Loads the MLP under `mlp` (`mlp.shared_experts` in DeepSeek, `mlp.shared_expert` in
    /// Qwen2-MoE; see [`GatedMlp::load`]) and, if given, the gate's `weight` [1, H] under `gate`
    /// (`mlp.shared_expert_gate`). `intermediate_size` is that of the fused MLP: the sum over the
    /// shared experts.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        mlp: VarBuilder,
        gate: Option<VarBuilder>,
    ) -> Result<Self> {
        let mlp = GatedMlp::load(hidden_size, intermediate_size, activation, mlp)?;
        let gate = gate.map(|vb| vb.get((1, hidden_size), "weight")).transpose()?;
        Self::new(mlp, gate)
    }

    /// Hidden size H.
    pub fn hidden_size(&self) -> usize {
        self.mlp.hidden_size()
    }

    /// Dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.mlp.dtype()
    }

    /// Width of the fused MLP's activation, on this rank.
    pub fn intermediate_size(&self) -> usize {
        self.mlp.intermediate_size()
    }

    /// The kernels of a step of `rows` rows, in their order.
    pub(crate) fn stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        let mut stages = self.mlp.stages(rows, machine);
        for stage in &mut stages {
            stage.kernel = format!("{} (shared experts)", stage.kernel);
        }
        stages
    }

    /// Fails unless the experts take the rows that a router `gate` [E, H] takes.
    pub(crate) fn check_fits(&self, gate: &Tensor) -> Result<()> {
        let (hidden, dtype) = (gate.dims2()?.1, gate.dtype());
        if self.hidden_size() != hidden || self.dtype() != dtype {
            bail!(
                "shared experts: expected hidden size {hidden} and dtype {} like the router gate, got {} and {}",
                dtype.as_str(),
                self.hidden_size(),
                self.dtype().as_str()
            )
        }
        Ok(())
    }

    /// Adds the shared experts' output for `x` [T, H] (model dtype) to `acc` [T, H] (model
    /// dtype or f32). The output and its scaling stay in f32; the sum is rounded once.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn add_into(&self, x: View<'_>, acc: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let Some(gate) = &self.gate else { return self.mlp.add_into(x, acc, ex) };
        let mut rows = ex.scratch(DType::F32, x.dims())?;
        self.mlp.forward_into(x, rows.view_mut(), ex)?;
        let mut scales = ex.scratch(DType::F32, &[x.rows(), 1])?;
        let gate = TensorView::new(gate)?;
        linear_into(x, gate.view()?, None, scales.view_mut(), ex)?;
        sigmoid_into(scales.view_mut(), ex)?;
        add_scaled_into(rows.view(), scales.view(), acc, ex)
    }
}
