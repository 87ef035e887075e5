//! Queries and attention of a step: over keys and values of every head, in latent space, or, for prompts on a GPU, over
//! keys and values that are made from the latents for this step.

use candle_core::{DType, Result};
use moe_kernels::plan::{Form, PromptForm};
use moe_kernels::{
    AttentionMeta, Exec, MlaPrompt, MlaQuery, MlaRows, TensorView, View, ViewMut, mla_attention_into,
    mla_prompt_into, mla_query_into, mla_rows_into, paged_attention_into,
};

use super::config::MlaConfig;
use super::layer::MlaAttention;
use super::projections::Up;
use crate::kv_cache::KvLayer;
use crate::rope::RopeRows;
use crate::step::StepViews;

/// Where the queries of rows come from.
// A step holds one value at a time, on the stack: a box would be an allocation in every layer.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// [T, Hq (N + R)] f32, not rotated. The rows' cache entries have been written.
    Queries(View<'a>),
    /// Queries with latents, whose cache entries are written with the queries.
    WithLatents(WithLatents<'a>),
}

/// Queries and latents as [`MlaRows`] takes them.
#[derive(Clone, Copy)]
pub(super) struct WithLatents<'a> {
    pub products: View<'a>,
    pub latents: Option<View<'a>>,
    pub norm: View<'a>,
    pub slots: View<'a>,
}

/// Rows of a step with their angles.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    source: Source<'a>,
    cos: View<'a>,
    sin: View<'a>,
    heads: usize,
    /// Epsilon of the latents' norm.
    eps: f32,
}

impl<'a> Rows<'a> {
    fn len(&self) -> usize {
        self.cos.rows()
    }

    fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let rows = |view: View<'a>| view.narrow(start, len);
        let source = match self.source {
            Source::Queries(q) => Source::Queries(rows(q)?),
            Source::WithLatents(WithLatents { products, latents, norm, slots }) => {
                let products = rows(products)?;
                let latents = latents.map(rows).transpose()?;
                Source::WithLatents(WithLatents { products, latents, norm, slots: rows(slots)? })
            }
        };
        Ok(Self { source, cos: rows(self.cos)?, sin: rows(self.sin)?, ..*self })
    }

    /// Writes rotated queries, with `w_uk` in latent space, and the rows' cache entries, unless they have been written.
    fn query_into(&self, w_uk: Option<View>, out: ViewMut, kv: &mut KvLayer, ex: &mut Exec) -> Result<()> {
        let Self { cos, sin, heads, eps, .. } = *self;
        match self.source {
            Source::Queries(q) => {
                let [t, width] = [q.rows(), q.dims()[1] / heads];
                let q = q.reshape(&[t, heads, width])?;
                mla_query_into(&MlaQuery { q, w_uk, cos, sin }, out, ex)
            }
            Source::WithLatents(WithLatents { products, latents, norm, slots: slot_mapping }) => {
                let args = MlaRows { products, latents, norm, eps, w_uk, cos, sin, slot_mapping };
                mla_rows_into(&args, out, kv.kv_mut().0, ex)
            }
        }
    }
}

impl MlaAttention {
    /// Rows of a source, with the angles of a step.
    pub(super) fn rows<'a>(&self, source: Source<'a>, rope: &'a RopeRows) -> Rows<'a> {
        let heads = self.config.num_heads;
        let eps = self.config.norm_eps as f32;
        Rows { source, cos: rope.cos(), sin: rope.sin(), heads, eps }
    }

    /// `out` [T, Hq * V] (model dtype): attention of the step's rows.
    pub(super) fn attend_into(
        &self,
        rows: &Rows,
        step: &StepViews,
        kv: &mut KvLayer,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, qk_nope_head_dim, qk_rope_head_dim, .. } = self.config;
        let t = rows.len();
        let width = qk_nope_head_dim + qk_rope_head_dim;
        let meta = AttentionMeta {
            query_start_loc: step.query_start_loc,
            positions: step.positions,
            block_tables: step.block_tables,
            scale: self.config.softmax_scale as f32,
            sliding_window: None,
            sinks: None,
            gates: None,
        };
        let Up::Absorbed { w_uk, w_uv } = &self.up else {
            let mut rotated = ex.scratch(DType::F32, &[t, num_heads, width])?;
            rows.query_into(None, rotated.view_mut(), kv, ex)?;
            return paged_attention_into(rotated.view(), kv.k(), kv.v(), &meta, out, ex);
        };
        let w_uk = TensorView::new(w_uk)?;
        let w_uv = TensorView::new(w_uv)?;
        let weights = (w_uk.view()?, w_uv.view()?);
        let first = step.decode_rows;
        let sequences = step.block_tables.rows();
        let call = self.prompt_call(t - first, Some(step.prompt_positions));
        if PromptForm::choose(&call, &ex.machine()) != Some(PromptForm::Expanded) {
            return self.in_latent_space(rows, weights, &meta, kv, out, ex);
        }
        if first > 0 {
            let decode = AttentionMeta {
                query_start_loc: meta.query_start_loc.narrow(0, first + 1)?,
                positions: meta.positions.narrow(0, first)?,
                block_tables: meta.block_tables.narrow(0, first)?,
                ..meta
            };
            let to = out.reborrow().narrow(0, first)?;
            self.in_latent_space(&rows.narrow(0, first)?, weights, &decode, kv, to, ex)?;
        }
        // Row numbers in query_start_loc count from the step's first row, so queries, positions and results stay whole.
        let prompts = AttentionMeta {
            query_start_loc: meta.query_start_loc.narrow(first, sequences - first + 1)?,
            block_tables: meta.block_tables.narrow(first, sequences - first)?,
            ..meta
        };
        let mut rotated = ex.scratch(out.dtype(), &[t, num_heads, width])?;
        let to = rotated.view_mut().narrow(first, t - first)?;
        rows.narrow(first, t - first)?.query_into(None, to, kv, ex)?;
        let args = MlaPrompt {
            q: rotated.view(),
            w_uk: weights.0,
            w_uv: weights.1,
            cache: kv.k(),
            meta: prompts,
            positions: step.prompt_positions,
        };
        mla_prompt_into(&args, out, ex)
    }

    /// Attention in latent space, over latent rows as they are in the cache.
    fn in_latent_space(
        &self,
        rows: &Rows,
        (w_uk, w_uv): (View, View),
        meta: &AttentionMeta,
        kv: &mut KvLayer,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = rows.len();
        let dtype = self.query_dtype(t, Some(kv.k().dims()[2]), &ex.machine());
        let mut q = ex.scratch(dtype, &[t, num_heads, l + r])?;
        rows.query_into(Some(w_uk), q.view_mut(), kv, ex)?;
        mla_attention_into(q.view(), kv.k(), meta, w_uv, out, ex)
    }
}
