//! Finds tensors of experts in a checkpoint that are not loaded.

use candle_core::Result;
use candle_nn::VarBuilder;
use moe_kernels::Unread;

use super::LoadSpec;

/// The names of this rank's packs in a source that offers them.
const LOCAL_PACKS: [&str; 2] = ["w13", "w2"];

impl LoadSpec {
    /// Checks that every tensor of the experts that would change their results is read. It refuses biases other than
    /// zero where there should be none, scales of quantised weights, more experts than
    /// [`num_experts`](Self::num_experts), and experts that are stored both one by one and in packs. The experts of all
    /// ranks are checked, so that all ranks report the same error.
    ///
    /// # Errors
    /// The names of the tensors that are not read.
    pub fn refuse_unread(&self, vb: &VarBuilder) -> Result<()> {
        let mut unread = Unread::under(vb);
        let names = &self.names;
        for pack in names.packs().into_iter().chain(LOCAL_PACKS) {
            if !self.has_bias {
                unread.bias(&format!("{pack}_bias"));
            }
            unread.scales(pack);
        }
        for expert in 0..self.num_experts {
            for matrix in names.matrices() {
                if !self.has_bias {
                    unread.bias(&format!("{expert}.{matrix}.bias"));
                }
                unread.scales(&format!("{expert}.{matrix}.weight"));
            }
            // Experts are numbered without gaps, so after the first missing one there are no others. `num_experts` may
            // be any number, so the search must end there.
            if !vb.contains_tensor(&format!("{expert}.{}.weight", names.gate)) {
                break;
            }
        }
        // If the checkpoint had more experts than this, the router would not know them.
        unread.tensor(&format!("{}.{}.weight", self.num_experts, names.gate));
        if vb.contains_tensor(names.packed_gate_up) {
            unread.tensor(&format!("0.{}.weight", names.gate));
        }
        unread.refuse(
            "experts",
            "biases are read with `LoadSpec::with_bias` or `BlockOptions::expert_bias`; quantised weights need the \
             `quantization_config` of config.json, which moe-layer's `CheckpointBlock` reads, or a `QuantSource`; a block has no \
             more experts than its router",
        )
    }
}
