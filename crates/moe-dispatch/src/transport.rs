//! The part of a backend over several ranks that does not depend on who adds.

use std::fmt::Debug;

use candle_core::Result;
use moe_kernels::{ActivationFormat, Dispatched, Exec};

use crate::back::Back;
use crate::call::Call;
use crate::prepare_finalize::WhoAdds;

/// How rows reach their experts, and how the results return. Each backend has a transport, in a file of `backends`.
pub(crate) trait Transport: Debug + Send + Sync {
    /// The name in error messages, logs and explanations.
    fn name(&self) -> &'static str;

    /// The layout of the rows that it gives to the experts.
    fn activation_format(&self, who_adds: WhoAdds) -> ActivationFormat {
        let _ = who_adds;
        ActivationFormat::Standard
    }

    /// The largest number of tokens that one rank may bring to a call, which determines the memory that a call needs;
    /// `None` means no limit.
    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        None
    }

    /// Whether every rank has the same tokens, so that no token is sent to its experts.
    fn is_replicated(&self) -> bool {
        false
    }

    /// Whether, by rank, the communicator may return the sums in one launch with the norm that follows
    /// ([`FusedCollective::CombineAddNorm`](moe_comm::FusedCollective::CombineAddNorm)).
    fn combines(&self) -> bool {
        false
    }

    /// The name of this transport in steps in which ranks [dispatch](EpRanks::dispatches) only needed rows in one
    /// launch, if it does that.
    fn sends_needed_rows(&self) -> Option<&'static str> {
        None
    }

    /// Whether a call reads data of the device on the host. A step with such a call cannot be recorded as a graph.
    fn reads_on_the_host(&self, who_adds: WhoAdds) -> bool {
        who_adds == WhoAdds::BySlot
    }

    /// Returns the rows for the experts of this rank, and how their results return. It is a collective, unless every
    /// rank has the same tokens.
    ///
    /// # Errors
    /// Ids that no rank owns; a rank died.
    fn prepare<'a>(&self, call: Call<'_, 'a>, ex: &mut Exec) -> Result<(Dispatched<'a>, Back)>;
}
