//! Loads a block from a checkpoint.

use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_experts::Selection;
use moe_kernels::candle::Result;
use moe_kernels::names::MlpNames;
use moe_quant::QuantConfig;
use serde_json::Value;

use super::gate::router_gate;
use super::names::below;
use super::quantised::QuantisedVars;
use super::{CheckpointBlock, SharedSpec};
use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::error::refuse;
use crate::load::load_block_on;
use crate::mlp::GatedMlp;
use crate::shared::SharedExperts;

impl SparseMoeBlock {
    /// The sparse block of a published model: `config` is its `config.json`, `layer` the number of the decoder layer,
    /// `vb` has the prefix of the block (`model.layers.0.mlp`; `block_sparse_moe` in Mixtral, `feed_forward` in
    /// Llama-4). Experts may be stored one by one or packed, in floats or quantised (GPTQ, AWQ, compressed-tensors,
    /// FP8, AutoRound, ModelOpt, Quark, gpt-oss's MXFP4); quantised ones stay so, unless the block's `quant` says that
    /// they are [dequantised](QuantConfig::dequantised). Weights on the CPU are packed for this machine.
    ///
    /// ```
    /// use candle_nn::VarBuilder;
    /// use moe_layer::{DType, Device, SparseMoeBlock, Tensor};
    ///
    /// let config = serde_json::json!({
    ///     "model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 16, "num_experts": 4,
    ///     "num_experts_per_tok": 2, "norm_topk_prob": true,
    /// });
    /// // In a model: VarBuilder::from_mmaped_safetensors(..).
    /// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let block = SparseMoeBlock::from_hf(&config, 0, vb.pp("model.layers.0.mlp"))?;
    /// let hidden = Tensor::ones((2, 3, 8), DType::F32, &Device::Cpu)?; // [B, S, H]
    /// assert_eq!(block.forward(&hidden)?.dims(), [2, 3, 8]);
    /// # Ok::<(), moe_layer::candle::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`CheckpointBlock::from_config`] and [`CheckpointBlock::load_on`].
    pub fn from_hf(config: &Value, layer: usize, vb: VarBuilder) -> Result<Self> {
        CheckpointBlock::from_config(config, layer)?.load(vb)
    }
}

impl CheckpointBlock {
    /// Loads the block on one rank; `vb` has its prefix.
    ///
    /// # Errors
    /// The errors of [`load_on`](Self::load_on).
    pub fn load(&self, vb: VarBuilder) -> Result<SparseMoeBlock> {
        Ok(self.load_on(&BlockContext::default(), vb)?.0)
    }

    /// Loads this rank's part of the block, with its shared experts. `context` has the rank's place; its names of
    /// matrices are not used. Also returns the oracle's choice.
    ///
    /// # Errors
    /// The errors of [`load_block_on`]; quantised tensors that do not match the header; shared experts or quantised
    /// weights if several ranks cut products, because a `VarBuilder` cannot read parts.
    pub fn load_on(&self, context: &BlockContext, vb: VarBuilder) -> Result<(SparseMoeBlock, Selection)> {
        let mut context = BlockContext { names: self.names.matrices, ..context.clone() };
        self.check_ranks(&context)?;
        let mut vb = vb;
        if let (Some(config), None) = (&self.quant, &context.quant) {
            let vars = Arc::new(self.read_quantised(config, &vb)?);
            vb = vars.shown(&vb);
            context.quant = (!config.is_dequantised()).then_some(vars as _);
        }
        let gate = router_gate(&self.names, &vb);
        let experts = below(&vb, self.names.experts);
        let (block, selection) = load_block_on(&self.options, &context, gate, experts)?;
        let Some(shared) = &self.shared else { return Ok((block, selection)) };
        let shared = self.load_shared(*shared, &context, &vb)?;
        Ok((block.with_shared_experts(shared)?, selection))
    }

    fn load_shared(
        &self,
        shared: SharedSpec,
        context: &BlockContext,
        vb: &VarBuilder,
    ) -> Result<SharedExperts> {
        let context = BlockContext { names: self.names.shared_matrices, ..context.clone() };
        let mlp = vb.pp(self.names.shared_experts);
        let options = &self.options;
        let width = shared.intermediate_size;
        let mlp = GatedMlp::load_on(options.hidden_size, width, options.activation, mlp, &context)?;
        let gate = shared.gated.then(|| vb.pp(self.names.shared_expert_gate));
        let shared = SharedExperts::load_gated(mlp.packed(context.cpu_isa)?, gate)?;
        Ok(shared.with_stream(context.shared_experts_stream, None))
    }

    /// Checks that a `VarBuilder` can provide this rank's part. It reads whole tensors, so if ranks cut products, only
    /// floats of routed experts can be cut here.
    fn check_ranks(&self, context: &BlockContext) -> Result<()> {
        let geometry = &context.geometry;
        if geometry.tp_size > 1 && self.shared.is_some() {
            refuse!(
                Unsupported,
                "a checkpoint's block: shared experts over tp = {} ranks need a source that shows parts of tensors; load the \
                 block with `load_block_on` and add `SharedExperts`",
                geometry.tp_size
            )
        }
        let stays_quantised = self.quant.as_ref().is_some_and(|quant| !quant.is_dequantised());
        if geometry.moe_tp_size > 1 && stays_quantised && context.quant.is_none() {
            refuse!(
                Unsupported,
                "a checkpoint's block: quantised experts that {} ranks cut need a source that shows parts of them; set \
                 `BlockContext::quant`, spread whole experts over the ranks, or load floats (`QuantConfig::dequantised`)",
                geometry.moe_tp_size
            )
        }
        Ok(())
    }

    /// Reads the matrices of the block that are quantised in the checkpoint.
    fn read_quantised(&self, config: &QuantConfig, vb: &VarBuilder) -> Result<QuantisedVars> {
        let options = &self.options;
        let matrices = |mlp: VarBuilder, names: MlpNames, width: usize| {
            let [gate, up, down] = names.matrices().map(|name| mlp.pp(name).prefix());
            let rows = (width, options.hidden_size);
            let columns = (options.hidden_size, width);
            [(gate, rows), (up, rows), (down, columns)]
        };
        let experts = below(vb, self.names.experts);
        let expert = |id| matrices(experts.pp(id), self.names.matrices, options.intermediate_size);
        let routed = (0..options.packed_experts()).flat_map(expert);
        let shared = self.shared.iter().flat_map(|shared| {
            let mlp = vb.pp(self.names.shared_experts);
            matrices(mlp, self.names.shared_matrices, shared.intermediate_size)
        });
        QuantisedVars::read(config, vb, routed.chain(shared))
    }
}
