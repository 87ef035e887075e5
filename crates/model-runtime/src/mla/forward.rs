//! The launches of latent attention in a step. What a plan says of them is in `plan.rs`.

use candle_core::{DType, Result};
use moe_comm::RowParallel;
use moe_kernels::plan::{Fusion, Machine, Reason, Stage};
use moe_kernels::{Exec, MlaLatent, ProductRows, TensorView, View, mla_cache_into, mla_latent_into};
use moe_layer::PlanStep;
use tracing::trace_span;

use super::attend::{Source, WithLatents};
use super::config::MlaConfig;
use super::layer::MlaAttention;
use super::projections::{Down, Up};
use crate::kv_cache::{KvLayer, LayerCache, LayerState};
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
            (Fusion::NormAdd, Down::Packed(first)) => self.fits_norm_add(first, step, machine),
            (Fusion::NormAdd, Down::Apart { query, kv_a }) => {
                self.fits_norm_add(query.first(), step, machine)?;
                self.fits_norm_add(kv_a, step, machine)
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
        cache: &mut LayerCache,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("attention").entered();
        let attended = self.attended(&io, step, rope, cache.paged()?, ex)?;
        self.o.last_into(attended.rows(), io, self.ranks.as_ref(), ex)
    }
}

impl MlaAttention {
    /// Whether the first product and the last one support the norm and the addition in their launches.
    fn fits_norm_add(
        &self,
        first: &Projection,
        step: &PlanStep,
        machine: &Machine,
    ) -> std::result::Result<(), Reason> {
        fits_products(Fusion::NormAdd, [first, &self.o], self.ranks.as_ref(), step.rows, machine)
    }

    /// Writes the rows' cache entries of the naive form: keys and values of every head, which `up` makes of the
    /// latents.
    fn cache_heads(
        &self,
        latents: View,
        up: &Projection,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = latents.rows();
        let dtype = self.o.weight.dtype();
        let norm = TensorView::new(&self.kv_a_norm)?;
        let args = MlaLatent {
            compressed: latents,
            norm: norm.view()?,
            eps: self.config.norm_eps as f32,
            cos: rope.cos(),
            sin: rope.sin(),
        };
        let mut latent = ex.scratch(dtype, &[t, l])?;
        let mut rotated = ex.scratch(dtype, &[t, r])?;
        mla_latent_into(&args, latent.view_mut(), rotated.view_mut(), ex)?;
        let width = self.config.qk_nope_head_dim + self.config.v_head_dim;
        let mut heads = ex.scratch(DType::F32, &[t, num_heads * width])?;
        up.forward_into(latent.view(), heads.view_mut(), ex)?;
        let rows = heads.view().reshape(&[t, num_heads, width])?;
        let (k_cache, v_cache) = kv.kv_mut();
        mla_cache_into(rows, rotated.view(), step.slot_mapping, k_cache, v_cache, ex)
    }

    /// The input of the output product.
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
        let norm = TensorView::new(&self.kv_a_norm)?;
        let with_latents = |products, latents| -> Result<Source<'_>> {
            let slots = step.slot_mapping;
            Ok(Source::WithLatents(WithLatents { products, latents, norm: norm.view()?, slots }))
        };
        match &self.down {
            Down::Packed(packed) => {
                let mut products = ex.scratch(DType::F32, &[t, self.config.query_rows() + l + r])?;
                packed.first_into(io, products.view_mut(), ex)?;
                let rows = self.rows(with_latents(products.view(), None)?, rope);
                self.attend_into(&rows, step, kv, attended.view_mut(), ex)?;
            }
            Down::Apart { query, kv_a } => {
                let mut latents = ex.scratch(DType::F32, &[t, l + r])?;
                kv_a.first_into(io, latents.view_mut(), ex)?;
                if let Up::Naive(up) = &self.up {
                    self.cache_heads(latents.view(), up, step, rope, kv, ex)?;
                }
                let mut q = ex.scratch(DType::F32, &[t, self.config.query_rows()])?;
                query.forward_into(io, q.view_mut(), ex)?;
                let source = match &self.up {
                    Up::Naive(_) => Source::Queries(q.view()),
                    Up::Absorbed { .. } => with_latents(q.view(), Some(latents.view()))?,
                };
                self.attend_into(&self.rows(source, rope), step, kv, attended.view_mut(), ex)?;
            }
        }
        Ok(ProductRows::Floats(attended))
    }
}
