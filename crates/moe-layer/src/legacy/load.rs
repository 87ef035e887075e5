//! Separate weights of a rank's experts from a checkpoint, in either layout.

use std::ops::Range;

use candle_nn::VarBuilder;
use moe_comm::ExpertLayout;
use moe_experts::ExpertsShape;
use moe_kernels::candle::{Device, Result, Tensor};

use super::{ExpertLoop, ExpertMlp};
use crate::context::BlockContext;
use crate::load::BlockOptions;

/// What to read of each expert.
struct Part {
    hidden: usize,
    /// Width of the stored matrices, or of the slices that stand for them.
    stored: usize,
    /// This rank's part of that width.
    range: Range<usize>,
}

impl ExpertLoop {
    /// Loads the experts of a rank, from per-expert tensors or, split, from packed ones: the layouts of
    /// [`load_block_on`](crate::load_block_on).
    pub(crate) fn load(
        options: &BlockOptions,
        context: &BlockContext,
        layout: &ExpertLayout,
        vb: VarBuilder,
    ) -> Result<Self> {
        let shard = context.geometry.expert_intermediate(options.intermediate_size)?;
        let width = shard.range.len();
        let (stored, range) = match context.sliced_weights {
            true => (width, 0..width),
            false => (options.intermediate_size, shard.range.clone()),
        };
        let part = Part { hidden: options.hidden_size, stored, range };
        let local = &layout.local_experts;
        let experts = match vb.contains_tensor("gate_up_proj") && !local.is_empty() {
            true => part.split(layout, &vb)?,
            false => local.iter().map(|e| part.load(&vb.pp(e))).collect::<Result<_>>()?,
        };
        let shape = ExpertsShape {
            num_local_experts: local.len(),
            hidden_size: options.hidden_size,
            intermediate_size: width,
            dtype: vb.dtype(),
        };
        Ok(Self::new(experts, shape, options.activation)?.with_shard(&shard))
    }
}

impl Part {
    fn load(&self, vb: &VarBuilder) -> Result<ExpertMlp> {
        let rows = |name: &str| {
            let whole = vb.get((self.stored, self.hidden), name)?;
            whole.narrow(0, self.range.start, self.range.len())?.contiguous()
        };
        let down = vb.get((self.hidden, self.stored), "down_proj.weight")?;
        Ok(ExpertMlp {
            gate: rows("gate_proj.weight")?,
            up: rows("up_proj.weight")?,
            down: down.narrow(1, self.range.start, self.range.len())?.contiguous()?,
        })
    }

    /// Experts out of packed tensors, each with memory of its own, on the device of `vb`.
    fn split(&self, layout: &ExpertLayout, vb: &VarBuilder) -> Result<Vec<ExpertMlp>> {
        let (experts, Range { start, .. }, len) =
            (layout.num_experts(), self.range.clone(), self.range.len());
        let host = vb.clone().set_device(Device::Cpu);
        let own = |tensor: Tensor| tensor.force_contiguous()?.to_device(vb.device());
        let gate_up = host.get((experts, 2 * self.stored, self.hidden), "gate_up_proj")?;
        let halves = |&e: &u32| -> Result<(Tensor, Tensor)> {
            let rows = gate_up.get(e as usize)?;
            Ok((own(rows.narrow(0, start, len)?)?, own(rows.narrow(0, self.stored + start, len)?)?))
        };
        let halves = layout.local_experts.iter().map(halves).collect::<Result<Vec<_>>>()?;
        drop(gate_up);
        let down = host.get((experts, self.hidden, self.stored), "down_proj")?;
        let expert = |(&e, (gate, up)): (&u32, (Tensor, Tensor))| {
            Ok(ExpertMlp { gate, up, down: own(down.get(e as usize)?.narrow(1, start, len)?)? })
        };
        layout.local_experts.iter().zip(halves).map(expert).collect()
    }
}
