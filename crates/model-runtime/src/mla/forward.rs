//! The launches of latent attention in a step. What a plan says of them is in `plan.rs`.

use candle_core::{DType, Result};
use moe_comm::RowParallel;
use moe_kernels::plan::{Fusion, Machine, Reason, Stage};
use moe_kernels::{Exec, MlaLatent, ProductRows, TensorView, View, mla_cache_into, mla_latent_into};
use moe_layer::PlanStep;
use tracing::trace_span;

use super::attend::{Packed, Source};
use super::config::MlaConfig;
use super::layer::MlaAttention;
use super::projections::{Down, Up};
use crate::kv_cache::{KvLayer, LayerState};
use crate::mixer::{Mixer, MixerIo};
use crate::projection::{Projection, fits_products};
use crate::rope::RopeRows;
use crate::step::StepViews;

/// `rope` has R dimensions; the layout of `kv` is [`MlaConfig::kv_layout`].
impl Mixer for MlaAttention {
    fn state(&self) -> LayerState {
        LayerState::Paged(self.config.kv_layout(self.o.weight.dtype()))
    }

    fn defer_sum(&mut self) -> bool {
        self.ranks.as_mut().map(RowParallel::defer_sum).is_some()
    }

    fn fits(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        match (fusion, &self.down) {
            (Fusion::Nothing, _) => Ok(()),
            (Fusion::NormAdd, Down::Packed(first)) => {
                fits_products(fusion, [first, &self.o], self.ranks.as_ref(), step.rows, machine)
            }
            (Fusion::NormAdd, Down::Apart { .. }) => {
                Err(Reason::Part { part: "queries and latents out of products of their own" })
            }
            (Fusion::Add | Fusion::AddNorm, _) => {
                Err(Reason::Part { part: "an attention whose last product does not add" })
            }
        }
    }

    fn stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        self.step_stages(fusion, step, machine)
    }

    fn forward_into(
        &self,
        io: MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let attended = self.attended(&io, step, rope, kv, ex)?;
        self.o.last_into(attended.rows(), io, self.ranks.as_ref(), ex)
    }
}

impl MlaAttention {
    /// Writes the rows' cache entries, where the latents have a product of their own.
    fn cache(
        &self,
        kv_a: &Projection,
        x: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = x.rows();
        let dtype = x.dtype();
        let mut compressed = ex.scratch(DType::F32, &[t, l + r])?;
        kv_a.forward_into(x, compressed.view_mut(), ex)?;
        let norm = TensorView::new(&self.kv_a_norm)?;
        let args = MlaLatent {
            compressed: compressed.view(),
            norm: norm.view()?,
            eps: self.config.norm_eps as f32,
            cos: rope.cos(),
            sin: rope.sin(),
        };
        let mut latent = ex.scratch(dtype, &[t, l])?;
        let mut rotated = ex.scratch(dtype, &[t, r])?;
        mla_latent_into(&args, latent.view_mut(), rotated.view_mut(), ex)?;
        let (k_cache, v_cache) = kv.kv_mut();
        match &self.up {
            Up::Absorbed { .. } => {
                let rows = latent.view().reshape(&[t, 1, l])?;
                mla_cache_into(rows, rotated.view(), step.slot_mapping, k_cache, v_cache, ex)
            }
            Up::Naive(up) => {
                let width = self.config.qk_nope_head_dim + self.config.v_head_dim;
                let mut heads = ex.scratch(DType::F32, &[t, num_heads * width])?;
                up.forward_into(latent.view(), heads.view_mut(), ex)?;
                let rows = heads.view().reshape(&[t, num_heads, width])?;
                mla_cache_into(rows, rotated.view(), step.slot_mapping, k_cache, v_cache, ex)
            }
        }
    }

    /// What the output product reads.
    fn attended(
        &self,
        io: &MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<ProductRows> {
        let MlaConfig { num_heads, v_head_dim, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = step.num_tokens();
        let mut attended = ex.scratch(self.o.weight.dtype(), &[t, num_heads * v_head_dim])?;
        match &self.down {
            Down::Packed(packed) => {
                let mut products = ex.scratch(DType::F32, &[t, self.config.query_rows() + l + r])?;
                packed.first_into(io, products.view_mut(), ex)?;
                let norm = TensorView::new(&self.kv_a_norm)?;
                let slots = step.slot_mapping;
                let packed = Packed { products: products.view(), norm: norm.view()?, slots };
                let rows = self.rows(Source::Packed(packed), rope);
                self.attend_into(&rows, step, kv, attended.view_mut(), ex)?;
            }
            Down::Apart { query, kv_a } => {
                let x = io.x("latent attention with products of their own")?.floats("latent attention")?;
                self.cache(kv_a, x, step, rope, kv, ex)?;
                let mut q = ex.scratch(DType::F32, &[t, self.config.query_rows()])?;
                query.forward_into(x, q.view_mut(), ex)?;
                let rows = self.rows(Source::Queries(q.view()), rope);
                self.attend_into(&rows, step, kv, attended.view_mut(), ex)?;
            }
        }
        Ok(ProductRows::Floats(attended))
    }
}
