//! Shared experts: an MLP that computes every token in addition to its routed experts.
//!
//! DeepSeek adds the MLP as it is; Qwen2-MoE and Qwen3-Next scale it per token by
//! `sigmoid(shared_expert_gate(x))`.
//!
//! On a GPU the MLP may run on a second stream, at the same time as the routed experts, with the same bits. With
//! several ranks the second stream computes this rank's part, and the collective for it runs after the collective of
//! the routed experts. None of this applies if shared experts are slots of the routed ones (`slots.rs`).

use std::ops::RangeInclusive;

use candle_nn::VarBuilder;
use moe_kernels::candle::{DType, Result, Tensor, bail};
use moe_kernels::plan::{
    Form, Fp8Activations, LinearCall, LinearForm, Machine, Reason, Rejected, Stage, Target,
};
use moe_kernels::{
    Activation, Exec, TensorView, Unread, View, ViewMut, add_into, add_scaled_into, linear_into, sigmoid_into,
};
use tracing::trace_span;

use crate::mlp::GatedMlp;
use crate::shared_stream::SharedExpertsStream;

/// The numbers of rows for which the second stream is faster. With fewer rows the addition after it costs more time
/// than the stream saves. With more rows each of the two keeps the whole GPU busy by itself (docs/lessons/experts.md).
const STREAM_ROWS: RangeInclusive<usize> = 8..=256;

/// Shared experts, fused into one MLP, with an optional per-token gate.
#[derive(Debug, Clone)]
#[must_use = "it computes nothing until it is called"]
pub struct SharedExperts {
    mlp: GatedMlp,
    gate: Option<Tensor>,
    stream: SharedExpertsStream,
    /// The reason why they are not slots of the routed experts, if slots were considered.
    apart: Option<Reason>,
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
        let gate = gate.map(|g| g.contiguous()).transpose()?;
        Ok(Self { mlp, gate, stream: SharedExpertsStream::default(), apart: None })
    }

    /// Sets where they run. `apart` is the reason why they are not slots of the routed experts.
    pub fn with_stream(self, stream: SharedExpertsStream, apart: Option<Reason>) -> Self {
        Self { stream, apart, ..self }
    }

    /// Loads the MLP under `mlp` (`mlp.shared_experts` in DeepSeek, `mlp.shared_expert` in
    /// Qwen2-MoE; see [`GatedMlp::load`]) and, if given, the gate's `weight` [1, H] under `gate`
    /// (`mlp.shared_expert_gate`). `intermediate_size` is the fused MLP's: the sum over the
    /// shared experts.
    ///
    /// # Errors
    /// Tensors that are missing or have a wrong shape; biases other than zero, because they are not read.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        mlp: VarBuilder,
        gate: Option<VarBuilder>,
    ) -> Result<Self> {
        Self::load_gated(GatedMlp::load(hidden_size, intermediate_size, activation, mlp)?, gate)
    }

    /// Makes shared experts of a loaded MLP, with the `weight` [1, H] of its gate under `gate`, if it has one.
    ///
    /// # Errors
    /// A gate that is missing or has a wrong shape; a bias of the gate other than zero, because it is not read.
    pub fn load_gated(mlp: GatedMlp, gate: Option<VarBuilder>) -> Result<Self> {
        let gate = gate.map(|vb| load_gate(mlp.hidden_size(), &vb)).transpose()?;
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

    /// The kernels of [`add_to`](Self::add_to) for `rows` rows, in their order: first the kernels of the `routed`
    /// experts, then the kernels of the shared experts.
    pub(crate) fn stages(&self, rows: usize, routed: Vec<Stage>, machine: &Machine) -> Vec<Stage> {
        let second_stream = self.fits_second_stream(rows, machine);
        let mut own = match (&second_stream, &self.gate) {
            // A context of the second stream does not quantise activations.
            (Ok(()), _) => {
                let machine = Machine { fp8_activations: Fp8Activations::Off, ..*machine };
                let mut stages = self.mlp.part_stages(rows, &machine);
                stages.extend(self.scales_stages(rows, &machine));
                stages
            }
            (Err(_), None) => self.mlp.add_stages(rows, machine),
            (Err(_), Some(_)) => {
                let mut stages = self.mlp.stages(rows, machine);
                stages.extend(self.scales_stages(rows, machine));
                stages.push(self.add_stage());
                stages
            }
        };
        let place = if second_stream.is_ok() { "shared experts, second stream" } else { "shared experts" };
        own.iter_mut().for_each(|stage| stage.note = Some(place.to_string()));
        let overlaps = second_stream.is_ok();
        if let Some(first) = own.first_mut().filter(|_| machine.gpu.is_some()) {
            let slots = self.apart.clone().map(|reason| ("slots of the routed experts", reason));
            let tried = slots.into_iter().chain(second_stream.err().map(|reason| ("second stream", reason)));
            let rejected = tried.map(|(form, reason)| Rejected { kernel: form.to_string(), reason });
            first.rejected.splice(0..0, rejected);
        }
        if !overlaps {
            return [routed, own].concat();
        }
        own.extend(routed);
        own.extend(self.mlp.sum_stage());
        own.push(self.add_stage());
        own
    }

    /// The kernels of the gate.
    fn scales_stages(&self, rows: usize, machine: &Machine) -> Vec<Stage> {
        let Some(gate) = &self.gate else { return Vec::new() };
        let call = LinearCall {
            rows,
            n: 1,
            k: self.hidden_size(),
            dtype: gate.dtype(),
            quant: None,
            bias: false,
            aligned: true,
        };
        let logits = LinearForm::stage(&["gate of the shared experts"], &call, machine);
        vec![logits, Stage::new(&["sigmoid of the gate"], "sigmoid")]
    }

    fn add_stage(&self) -> Stage {
        Stage::new(&["add"], if self.gate.is_some() { "add_scaled" } else { "add" })
    }

    /// Whether they run on a second stream in a step of `rows` rows, or the reason why not.
    fn fits_second_stream(&self, rows: usize, machine: &Machine) -> std::result::Result<(), Reason> {
        use SharedExpertsStream::{Auto, Off, On};
        Target::Gpu.expect(machine.gpu.as_ref())?;
        match self.stream {
            Off => Err(Reason::NotRequested { requested: "`shared_experts_stream` off" }),
            Auto if !STREAM_ROWS.contains(&rows) => {
                Err(Reason::Rows { least: *STREAM_ROWS.start(), most: Some(*STREAM_ROWS.end()), got: rows })
            }
            On | Auto => Ok(()),
        }
    }

    /// Checks that the experts accept the rows for which the router `gate` [E, H] is made.
    pub(crate) fn check_fits(&self, hidden: usize, dtype: DType) -> Result<()> {
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

    /// Runs `routed`, which writes `out` [T, H] (model dtype or f32), and adds the shared experts' output for `x` [T,
    /// H] (model dtype). That output is computed after the routed experts or at the same time. Both give the same bits.
    ///
    /// # Errors
    /// Wrong dims or dtypes; any error of `routed`.
    pub fn add_to(
        &self,
        x: View<'_>,
        mut out: ViewMut<'_>,
        ex: &mut Exec,
        routed: impl FnOnce(ViewMut<'_>, &mut Exec) -> Result<()>,
    ) -> Result<()> {
        if self.fits_second_stream(x.rows(), &ex.machine()).is_err() {
            routed(out.reborrow(), ex)?;
            return trace_span!("shared_experts").in_scope(|| self.add_into(x, out, ex));
        }
        // These rows belong to the workspace of this stream and are borrowed until the sum has read them.
        let mut rows = ex.scratch(DType::F32, x.dims())?;
        let mut scales = self.gate.as_ref().map(|_| ex.scratch(DType::F32, &[x.rows(), 1])).transpose()?;
        ex.overlap(
            |ex| {
                self.mlp.part_into(x, rows.view_mut(), ex)?;
                scales.as_mut().map_or(Ok(()), |scales| self.scales_into(x, scales.view_mut(), ex))
            },
            |ex| routed(out.reborrow(), ex),
        )?;
        self.mlp.add_parts(rows.view_mut(), ex)?;
        match &scales {
            Some(scales) => add_scaled_into(rows.view(), scales.view(), out, ex),
            None => add_into(rows.view(), out, ex),
        }
    }

    /// Adds the shared experts' output for `x` [T, H] (model dtype) to `acc` [T, H] (model
    /// dtype or f32). The output and its scaling stay in f32; the sum is rounded once.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn add_into(&self, x: View<'_>, acc: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        if self.gate.is_none() {
            return self.mlp.add_into(x, acc, ex);
        }
        let mut rows = ex.scratch(DType::F32, x.dims())?;
        self.mlp.forward_into(x, rows.view_mut(), ex)?;
        let mut scales = ex.scratch(DType::F32, &[x.rows(), 1])?;
        self.scales_into(x, scales.view_mut(), ex)?;
        add_scaled_into(rows.view(), scales.view(), acc, ex)
    }

    /// The sigmoid of the gate's logit of each row, [T, 1] f32.
    fn scales_into(&self, x: View<'_>, mut scales: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let Some(gate) = &self.gate else { return Ok(()) };
        linear_into(x, TensorView::new(gate)?.view()?, None, scales.reborrow(), ex)?;
        sigmoid_into(scales, ex)
    }
}

fn load_gate(hidden_size: usize, vb: &VarBuilder) -> Result<Tensor> {
    let mut unread = Unread::under(vb);
    unread.bias("bias");
    unread.scales("weight");
    unread.refuse("shared experts", "their gate has a weight alone")?;
    vb.get((1, hidden_size), "weight")
}
