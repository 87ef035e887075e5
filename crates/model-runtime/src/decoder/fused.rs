//! Decode steps on CUDA with norms and additions inside other launches: of a few tokens four launches a layer, of more
//! the end of the experts.

use candle_core::Result;
use moe_kernels::{Exec, Scratch, StepContext, View, ViewMut};

use super::{Decoder, DecoderLayer, Mlp, SelfAttention};
use crate::kv_cache::KvCache;
use crate::layers::RmsNorm;
use crate::rope::RopeRows;
use crate::step::StepViews;

/// Whether [`add_next_norm`] computes this sub-layer in this step.
pub(super) fn fuses_next_norm(mlp: &Mlp, tokens: usize, context: &StepContext, ex: &Exec) -> bool {
    match mlp {
        Mlp::Dense(_) => false,
        Mlp::Sparse(sparse) => sparse.block().is_some_and(|block| block.fuses_next_norm(tokens, context, ex)),
    }
}

/// `residual` += sub-layer(`x`), then `x` = norm(`residual`); [`fuses_next_norm`] has said yes.
pub(super) fn add_next_norm(
    mlp: &Mlp,
    norm: &RmsNorm,
    residual: ViewMut,
    x: &mut Scratch,
    context: &StepContext,
    ex: &mut Exec,
) -> Result<()> {
    if let Mlp::Sparse(sparse) = mlp
        && let Some(block) = sparse.block()
    {
        let mut out = ex.scratch(x.view().dtype(), x.view().dims())?;
        norm.with_pre_norm(|norm| {
            block.forward_add_norm_into(x.view(), norm, residual, out.view_mut(), context, ex)
        })?;
        *x = out;
    }
    Ok(())
}

/// Whether [`forward_partial_into`] computes this rank's part of this sub-layer in this step.
pub(super) fn fuses_routing(mlp: &Mlp, tokens: usize, context: &StepContext, ex: &Exec) -> bool {
    match mlp {
        Mlp::Dense(_) => false,
        Mlp::Sparse(sparse) => sparse.block().is_some_and(|block| block.fuses_routing(tokens, context, ex)),
    }
}

/// `out` = this rank's part of sub-layer(`x`); [`fuses_routing`] has said yes.
pub(super) fn forward_partial_into(
    mlp: &Mlp,
    x: View,
    out: ViewMut,
    context: &StepContext,
    ex: &mut Exec,
) -> Result<()> {
    if let Mlp::Sparse(sparse) = mlp
        && let Some(block) = sparse.block()
    {
        return block.forward_partial_into(x, out, context, ex);
    }
    Ok(())
}

impl<A: SelfAttention> Decoder<A> {
    pub(super) fn fuses(&self, step: &StepViews, context: &StepContext, ex: &Exec) -> bool {
        let tokens = step.num_tokens();
        let layer_fuses = |layer: &DecoderLayer<A>| {
            let block = match &layer.mlp {
                Mlp::Dense(_) => None,
                Mlp::Sparse(sparse) => sparse.block(),
            };
            layer.attention.fuses(tokens, ex) && block.is_some_and(|block| block.fuses(tokens, context, ex))
        };
        step.one_row_each && step.num_logits() == tokens && self.layers.iter().all(layer_fuses)
    }

    pub(super) fn add_layers_into(
        &self,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvCache,
        mut residual: ViewMut,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            ex.mark("layer", index)?;
            let kv = kv.layer_mut(index)?;
            layer.input_norm.with_pre_norm(|norm| {
                layer.attention.add_normed_into(norm, residual.reborrow(), step, rope, kv, ex)
            })?;
            if let Mlp::Sparse(sparse) = &layer.mlp
                && let Some(block) = sparse.block()
            {
                let norm = &layer.post_attention_norm;
                norm.with_pre_norm(|norm| block.add_normed_into(norm, residual.reborrow(), context, ex))?;
            }
        }
        Ok(())
    }
}
