//! What a checkpoint has of experts beside what is loaded.

use candle_core::Result;
use candle_nn::VarBuilder;
use moe_kernels::Unread;

use super::LoadSpec;

/// The packs of this rank, as a source shows them.
const LOCAL_PACKS: [&str; 2] = ["w13", "w2"];

impl LoadSpec {
    /// Fails if the checkpoint has tensors of its experts that are not read and would change what they compute: biases other
    /// than zero where there should be none, scales of quantised weights, more experts than [`num_experts`](Self::num_experts),
    /// or experts both one by one and in packs. Experts of all ranks are looked at, so that all ranks fail alike.
    ///
    /// # Errors
    /// The tensors, by name.
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
            // Behind the last expert that is there nothing follows, whatever number is asked for.
            if !vb.contains_tensor(&format!("{expert}.{}.weight", names.gate)) {
                break;
            }
        }
        // Of another number of experts the router would know nothing.
        unread.tensor(&format!("{}.{}.weight", self.num_experts, names.gate));
        if vb.contains_tensor(names.packed_gate_up) {
            unread.tensor(&format!("0.{}.weight", names.gate));
        }
        unread.refuse(
            "experts",
            "biases are read with `LoadSpec::with_bias`, quantised weights through a source that knows their header; a block \
             of moe-layer has neither biases nor more experts than its router",
        )
    }
}
