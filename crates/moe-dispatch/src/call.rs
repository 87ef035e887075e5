//! One call of a backend over several ranks, as its transport receives it.

use candle_core::Result;
use moe_kernels::{Exec, Lent, View};

use crate::prepare_finalize::WhoAdds;
use crate::ranks::EpRanks;

/// The checked arguments of a call: rows [T, H], ids and weights [T, K].
pub(crate) struct Call<'c, 'a> {
    /// The name of the backend, for errors.
    pub op: &'static str,
    pub ranks: &'c EpRanks,
    pub who_adds: WhoAdds,
    pub input: Lent<'a>,
    pub ids: View<'a>,
    pub weights: View<'a>,
    /// The number of tokens that each rank brings, if the ranks know it.
    pub agreed: Option<&'c [usize]>,
}

impl<'a> Call<'_, 'a> {
    /// The weights, if experts need them to add up rows.
    pub fn weights_that_travel(&self) -> Option<View<'a>> {
        (self.who_adds == WhoAdds::ByRank).then_some(self.weights)
    }

    /// The number of tokens that each rank owns. It is a collective, unless the ranks know the numbers.
    pub fn owned_counts(&self, ex: &mut Exec) -> Result<Vec<usize>> {
        let tokens = self.ranks.rank_tokens(self.op, self.ids.rows(), self.agreed, ex)?;
        Ok(self.ranks.owned_counts(&tokens))
    }
}
