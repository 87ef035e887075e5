//! Grouped-query attention over ranks: which tensors its layers have, which parts of them a rank holds, what it caches.
//!
//! Heads are cut over ranks. A rank has the rows of its heads in q, k and v, and their columns in the output product.
//! If there are more ranks than key-value heads, neighbouring ranks hold the same ones.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_comm::{Collectives, Geometry, GeometryError};
use moe_kernels::names::AttentionNames;
use moe_kernels::plan::Stage;
use moe_kernels::{Exec, HeadsNorm, QkvHeads, TensorView, ViewMut, head_squares_into, heads_norm_into};
use moe_layer::BlockContext;

use super::config::{AttentionConfig, QkNorm};
use super::layer::{Attention, HeadRanks};
use crate::checkpoint::TensorLayout;
use crate::kv_cache::KvLayout;

/// What a plan calls a norm over all heads.
const ALL_HEADS: &str = "head_squares, heads_norm";
/// What errors call the reduced size of the output product.
const OUTPUT: &str = "the width of all query heads";

impl AttentionConfig {
    /// This layer's part on the rank of `geometry`.
    ///
    /// # Errors
    /// Heads that the geometry cannot cut.
    pub fn part(&self, geometry: &Geometry) -> std::result::Result<Self, GeometryError> {
        let heads = geometry.attention_heads(self.num_heads, self.num_kv_heads)?;
        Ok(Self { num_heads: heads.heads.len(), num_kv_heads: heads.kv_heads.len(), ..self.clone() })
    }

    /// What a layer with these heads caches of a token.
    pub fn kv_layout(&self, dtype: DType) -> KvLayout {
        let Self { num_kv_heads, head_dim, .. } = *self;
        KvLayout { num_kv_heads, head_dim, value_dim: Some(head_dim), dtype }
    }

    /// Adds the layer's tensors, which are under `prefix`, to a list.
    ///
    /// # Errors
    /// Heads that the list's geometry cannot cut.
    pub fn layout(
        &self,
        names: &AttentionNames,
        prefix: &str,
        list: &mut TensorLayout,
    ) -> std::result::Result<(), GeometryError> {
        let Self { hidden_size: h, head_dim: d, num_heads, num_kv_heads, .. } = *self;
        let heads = list.geometry.attention_heads(num_heads, num_kv_heads)?;
        let q = list.geometry.row_shard(OUTPUT, num_heads * d)?.range;
        let kv = heads.kv_heads.start * d..heads.kv_heads.end * d;
        // With an output gate, each query head has as many rows of the gate.
        let doubled = if self.output_gate { 2 } else { 1 };
        let q_rows = doubled * q.start..doubled * q.end;
        for (name, rows, held) in [
            (names.q, doubled * num_heads * d, &q_rows),
            (names.k, num_kv_heads * d, &kv),
            (names.v, num_kv_heads * d, &kv),
        ] {
            list.rows(format!("{prefix}.{name}.weight"), [rows, h], held.clone());
            if !self.is_in_stored_order() {
                list.floats.insert(format!("{prefix}.{name}.weight"));
            }
            if self.qkv_bias {
                list.part(format!("{prefix}.{name}.bias"), &[rows], std::slice::from_ref(held));
            }
        }
        list.columns(format!("{prefix}.{}.weight", names.o), [h, num_heads * d], q.clone());
        if self.o_bias {
            list.whole(format!("{prefix}.{}.bias", names.o), &[h]);
        }
        if self.sinks {
            let held = q.start / d..q.end / d;
            list.part(format!("{prefix}.{}", names.sinks), &[num_heads], std::slice::from_ref(&held));
        }
        for (norm, heads, held) in [(names.q_norm, num_heads, q), (names.k_norm, num_kv_heads, kv)] {
            let name = format!("{prefix}.{norm}.weight");
            match self.qk_norm {
                QkNorm::None => {}
                QkNorm::PerHead => list.whole(name, &[d]),
                QkNorm::AllHeads => list.part(name, &[heads * d], &[held]),
            }
        }
        Ok(())
    }
}

impl Attention {
    /// Loads this rank's part of a layer. `config` counts the heads of all ranks, and `vb` contains this rank's slices
    /// ([`AttentionConfig::layout`]).
    ///
    /// # Errors
    /// The errors of [`load_on`](Self::load_on); heads that the geometry cannot cut.
    pub fn load_part(
        config: &AttentionConfig,
        names: AttentionNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let heads = context.geometry.attention_heads(config.num_heads, config.num_kv_heads)?;
        let output = context.row_parallel(OUTPUT, config.num_heads * config.head_dim)?;
        let comm = &context.groups.tp;
        let kv_replicas = heads.kv_replicas;
        let ranks = output.map(|output| HeadRanks { output, comm: comm.clone(), kv_replicas });
        let part = config.part(&context.geometry)?;
        Ok(Self { ranks, ..Self::load_on(part, names, vb, context)? })
    }

    /// Norms q and k in `qkv` [T, (Hq + 2 Hkv) * D] f32 over all heads of all ranks.
    pub(super) fn norm_all_heads(
        &self,
        q_norm: &Tensor,
        k_norm: &Tensor,
        qkv: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let _norm = ex.launched_as_one(|| ALL_HEADS);
        let AttentionConfig { num_heads: q, num_kv_heads: kv, head_dim: dim, .. } = self.config;
        let heads = QkvHeads { q, kv, dim };
        let rows = qkv.rows();
        let (ranks, kv_replicas) =
            self.ranks.as_ref().map_or((1, 1), |ranks| (ranks.comm.world_size(), ranks.kv_replicas));
        let mut squares = ex.scratch(DType::F32, &[rows, heads.normed()])?;
        head_squares_into(qkv.as_view(), heads, squares.view_mut(), ex)?;
        if let Some(ranks_of_heads) = &self.ranks {
            let mut all = ex.scratch(DType::F32, &[ranks * rows, heads.normed()])?;
            ranks_of_heads.comm.all_gather(squares.view(), all.view_mut(), ex)?;
            squares = all;
        }
        let q_norm = TensorView::new(q_norm)?;
        let k_norm = TensorView::new(k_norm)?;
        let args = HeadsNorm {
            squares: squares.view().reshape(&[ranks, rows, heads.normed()])?,
            kv_replicas,
            q_norm: q_norm.view()?,
            k_norm: k_norm.view()?,
            eps: self.config.rms_norm_eps as f32,
        };
        heads_norm_into(&args, heads, qkv, ex)
    }

    /// What [`norm_all_heads`](Self::norm_all_heads) launches.
    pub(super) fn all_heads_stage(&self) -> Stage {
        let computes: &[&str] = match self.ranks {
            Some(_) => &["sums of squares over ranks", "norm of all heads"],
            None => &["norm of all heads"],
        };
        Stage::new(computes, ALL_HEADS)
    }
}
