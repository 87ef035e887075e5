//! Queries and attention of a step: over keys and values of every head, in latent space, or, for prompts on a GPU, with
//! keys and values that are made out of the latents for the step.

use candle_core::{DType, Result};
use moe_kernels::plan::{Form, PromptForm};
use moe_kernels::{
    AttentionMeta, Exec, MlaPrompt, MlaQuery, TensorView, View, ViewMut, mla_prompt_into, mla_query_into,
    mla_value_into, paged_attention_into,
};

use super::projections::Up;
use super::{MlaAttention, MlaConfig};
use crate::kv_cache::KvLayer;
use crate::rope::RopeRows;
use crate::step::StepViews;

/// Rows of a step with their angles.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// [T, Hq, N + R] f32, not rotated.
    q: View<'a>,
    cos: View<'a>,
    sin: View<'a>,
}

impl<'a> Rows<'a> {
    fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let rows = |view: View<'a>| view.narrow(start, len);
        Ok(Self { q: rows(self.q)?, cos: rows(self.cos)?, sin: rows(self.sin)? })
    }

    fn query(&self, w_uk: Option<View<'a>>) -> MlaQuery<'a> {
        MlaQuery { q: self.q, w_uk, cos: self.cos, sin: self.sin }
    }
}

impl MlaAttention {
    /// `out` [T, Hq * V] (model dtype): attention of the rows of `x`, whose cache entries are written.
    pub(super) fn attend_into(
        &self,
        x: View,
        step: &StepViews,
        rope: &RopeRows,
        kv: &KvLayer,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, qk_nope_head_dim, qk_rope_head_dim, .. } = self.config;
        let (t, width) = (x.rows(), qk_nope_head_dim + qk_rope_head_dim);
        let mut q = ex.scratch(DType::F32, &[t, num_heads * width])?;
        self.query.forward_into(x, q.view_mut(), ex)?;
        let q = q.view().reshape(&[t, num_heads, width])?;
        let rows = Rows { q, cos: rope.cos(), sin: rope.sin() };
        let meta = AttentionMeta {
            query_start_loc: step.query_start_loc,
            positions: step.positions,
            block_tables: step.block_tables,
            scale: self.config.softmax_scale as f32,
            sliding_window: None,
        };
        let Up::Absorbed { w_uk, w_uv } = &self.up else {
            let mut rotated = ex.scratch(DType::F32, &[t, num_heads, width])?;
            mla_query_into(&rows.query(None), rotated.view_mut(), ex)?;
            return paged_attention_into(rotated.view(), kv.k(), kv.v(), &meta, out, ex);
        };
        let (w_uk, w_uv) = (TensorView::new(w_uk)?, TensorView::new(w_uv)?);
        let weights = (w_uk.view()?, w_uv.view()?);
        let (first, sequences) = (step.decode_rows, step.block_tables.rows());
        let call = self.prompt_call(t - first, Some(step.prompt_positions));
        if PromptForm::choose(&call, &ex.machine()) != Some(PromptForm::Expanded) {
            return self.in_latent_space(&rows, weights, &meta, kv, out, ex);
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
        let mut rotated = ex.scratch(x.dtype(), &[t, num_heads, width])?;
        let to = rotated.view_mut().narrow(first, t - first)?;
        mla_query_into(&rows.narrow(first, t - first)?.query(None), to, ex)?;
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

    /// The same over latent rows as they are in the cache.
    fn in_latent_space(
        &self,
        rows: &Rows,
        (w_uk, w_uv): (View, View),
        meta: &AttentionMeta,
        kv: &KvLayer,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let MlaConfig { num_heads, kv_lora_rank: l, qk_rope_head_dim: r, .. } = self.config;
        let t = rows.q.rows();
        let dtype = self.query_dtype(t, kv.k().dims()[2], &ex.machine());
        let mut q = ex.scratch(dtype, &[t, num_heads, l + r])?;
        let query = MlaQuery { q: rows.q, w_uk: Some(w_uk), cos: rows.cos, sin: rows.sin };
        mla_query_into(&query, q.view_mut(), ex)?;
        let mut latents = ex.scratch(out.dtype(), &[t, num_heads * l])?;
        paged_attention_into(q.view(), kv.k(), kv.v(), meta, latents.view_mut(), ex)?;
        mla_value_into(latents.view(), w_uv, out, ex)
    }
}
