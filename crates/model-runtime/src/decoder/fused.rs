//! Decode steps of a few tokens on CUDA: four launches a layer, with norms and additions inside.

use candle_core::Result;
use moe_kernels::{Exec, ViewMut};

use super::{Decoder, DecoderLayer, Mlp, SelfAttention};
use crate::kv_cache::KvCache;
use crate::rope::RopeRows;
use crate::step::StepViews;

impl<A: SelfAttention> Decoder<A> {
    pub(super) fn fuses(&self, step: &StepViews, ex: &Exec) -> bool {
        let tokens = step.num_tokens();
        let layer_fuses = |layer: &DecoderLayer<A>| {
            let block = match &layer.mlp {
                Mlp::Dense(_) => None,
                Mlp::Sparse(sparse) => sparse.block(),
            };
            layer.attention.fuses(tokens, ex) && block.is_some_and(|block| block.fuses(tokens, ex))
        };
        step.one_row_each && step.num_logits() == tokens && self.layers.iter().all(layer_fuses)
    }

    pub(super) fn add_layers_into(
        &self,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvCache,
        mut residual: ViewMut,
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
                norm.with_pre_norm(|norm| block.add_normed_into(norm, residual.reborrow(), ex))?;
            }
        }
        Ok(())
    }
}
