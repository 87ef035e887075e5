//! Separate weights of a rank's experts from a checkpoint, in any of its layouts.

use candle_nn::VarBuilder;
use moe_comm::ExpertLayout;
use moe_experts::ExpertWeights;
use moe_kernels::candle::Result;

use super::{ExpertLoop, ExpertMlp};
use crate::context::BlockContext;
use crate::load::{BlockOptions, load_spec};

impl ExpertLoop {
    /// Loads the experts of a rank as [`load_block_on`](crate::load_block_on) does; each matrix is a
    /// part of the loaded packs.
    pub(crate) fn load(
        options: &BlockOptions,
        context: &BlockContext,
        layout: &ExpertLayout,
        vb: VarBuilder,
    ) -> Result<Self> {
        let shard = context.geometry.expert_intermediate(options.intermediate_size)?;
        let weights = ExpertWeights::load(&load_spec(options, context, layout)?, vb)?;
        let width = shard.range.len();
        let expert = |slot| {
            let (w13, down) = (weights.w13().get(slot)?, weights.w2().get(slot)?);
            Ok(ExpertMlp { gate: w13.narrow(0, 0, width)?, up: w13.narrow(0, width, width)?, down })
        };
        let shape = weights.shape();
        let experts = (0..shape.num_local_experts).map(expert).collect::<Result<_>>()?;
        Ok(Self::new(experts, shape, options.activation)?.with_shard(&shard))
    }
}
