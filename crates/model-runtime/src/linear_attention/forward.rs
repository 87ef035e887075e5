//! The launches of a layer of linear attention in a step, and what a plan says of them.

use candle_core::{DType, Result};
use moe_kernels::plan::{DeltaCall, DeltaForm, Form, Fusion, Machine, Stage};
use moe_kernels::{
    CausalConv, Exec, GatedDelta, GatedRmsNorm, StateRows, TensorView, causal_conv_into, gated_delta_into,
    gated_rms_norm_into,
};
use moe_layer::PlanStep;
use tracing::trace_span;

use super::LinearAttention;
use crate::kv_cache::{LayerCache, LayerState};
use crate::mixer::{Mixer, MixerIo};
use crate::rope::RopeRows;
use crate::step::StepViews;

impl Mixer for LinearAttention {
    fn state(&self) -> LayerState {
        LayerState::Recurrent(self.config.state_layout())
    }

    fn stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let mut stages = vec![self.input.stage(&["qkv, gates"], fusion, step.rows, machine)];
        let rule = DeltaCall {
            prompt_rows: step.prompt_rows(),
            heads: self.config.heads,
            dtype: self.output.weight.dtype(),
            aligned: true,
        };
        stages.extend([
            Stage::new(&["convolution"], "causal_conv"),
            DeltaForm::stage(&["gated delta rule"], &rule, machine),
            Stage::new(&["gated norm"], "gated_rms_norm"),
        ]);
        stages.extend(self.output.last_stages(fusion, step.rows, self.ranks.as_ref(), machine));
        stages
    }

    fn forward_into(
        &self,
        io: MixerIo,
        step: &StepViews,
        _: &RopeRows,
        cache: &mut LayerCache,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("linear_attention").entered();
        let states = cache.recurrent()?;
        let t = step.num_tokens();
        let heads = self.config.heads;
        let StepViews { query_start_loc, positions, states: numbers, .. } = *step;
        let rows = StateRows { query_start_loc, positions, states: numbers };
        let mut projected = ex.scratch(DType::F32, &[t, heads.projected()])?;
        self.input.first_into(&io, projected.view_mut(), ex)?;
        let projected = projected.view();

        let mut mixed = ex.scratch(DType::F32, &[t, heads.channels()])?;
        let weight = TensorView::new(&self.conv)?;
        let conv = CausalConv { projected, weight: weight.view()?, rows };
        causal_conv_into(&conv, states.conv_mut(), mixed.view_mut(), ex)?;

        let mut read = ex.scratch(DType::F32, &[t, heads.value_width()])?;
        let a_log = TensorView::new(&self.a_log)?;
        let dt_bias = TensorView::new(&self.dt_bias)?;
        let delta = GatedDelta {
            heads,
            mixed: mixed.view(),
            projected,
            a_log: a_log.view()?,
            dt_bias: dt_bias.view()?,
            rows,
            prompt_rows: t - step.decode_rows.min(t),
            dtype: self.output.weight.dtype(),
        };
        gated_delta_into(&delta, states.delta_mut(), read.view_mut(), ex)?;

        let mut normed = ex.scratch(self.output.weight.dtype(), &[t, heads.value_width()])?;
        let weight = TensorView::new(&self.norm)?;
        let eps = self.config.rms_norm_eps as f32;
        let norm = GatedRmsNorm { heads, x: read.view(), projected, weight: weight.view()?, eps };
        gated_rms_norm_into(&norm, normed.view_mut(), ex)?;
        self.output.last_into(normed.view().into(), io, self.ranks.as_ref(), ex)
    }
}
