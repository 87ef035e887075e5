//! What a backend over ranks says and does, apart from who adds.

use std::fmt::Debug;

use candle_core::Result;
use moe_kernels::{ActivationFormat, Dispatched, Exec};

use crate::back::Back;
use crate::call::Call;
use crate::prepare_finalize::WhoAdds;

/// How rows reach their experts, and which way what these compute goes back. Each backend has one, in a file of `backends`.
pub(crate) trait Transport: Debug + Send + Sync {
    /// The name in error messages, logs and explanations.
    fn name(&self) -> &'static str;

    /// The layout of the rows that it hands over.
    fn activation_format(&self, who_adds: WhoAdds) -> ActivationFormat {
        let _ = who_adds;
        ActivationFormat::Standard
    }

    /// The most tokens that one rank may bring to a call, and so the rows that a call needs memory for; `None` = no limit.
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        None
    }

    /// Whether every rank has the same tokens, so that none travels to its experts.
    fn is_replicated(&self) -> bool {
        false
    }

    /// Whether ranks that add get the rows of all ranks, and return sums of all: what the communicator may do in one launch with the
    /// norm that follows ([`FusedCollective::CombineAddNorm`](moe_comm::FusedCollective::CombineAddNorm)).
    fn returns_all_rows(&self) -> bool {
        false
    }

    /// Whether a call reads on the host what is on the device, so that no step that has such a call can be recorded as a graph.
    fn reads_on_the_host(&self, who_adds: WhoAdds) -> bool {
        who_adds == WhoAdds::BySlot
    }

    /// The rows for the experts of this rank, and the way back of what becomes of them. A collective, unless every rank has the same
    /// tokens.
    ///
    /// # Errors
    /// Ids that no rank owns; a rank that died.
    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)>;
}
