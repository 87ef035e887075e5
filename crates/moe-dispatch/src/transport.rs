//! How packed rows travel: the part of the all-to-all backends that peer-memory kernels replace.

use std::sync::Arc;

use candle_core::Result;
use moe_comm::Communicator;
use moe_kernels::{Exec, Scratch, ViewMut};

/// Sends a block of rows to every rank and receives one from each, in two halves.
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// Begins to send `rows` [sum(counts), ..]: `counts[r]` rows to each rank r, in rank order.
    ///
    /// # Errors
    /// A rank that died.
    fn start(&self, rows: Scratch, counts: Vec<usize>, ex: &mut Exec) -> Result<Sent>;

    /// Waits for `counts[r]` rows from each rank r, in rank order, in `out` [sum(counts), ..].
    ///
    /// # Errors
    /// Ranks that disagree, or died.
    fn finish(&self, sent: Sent, out: ViewMut<'_>, counts: &[usize], ex: &mut Exec) -> Result<()>;

    /// Whether data moves between [`start`](Self::start) and [`finish`](Self::finish).
    fn is_async(&self) -> bool {
        false
    }

    /// Fails the ranks that wait for what will not come.
    fn abort(&self, reason: &str);
}

/// Rows on their way.
#[derive(Debug)]
#[must_use = "peers wait for the second half"]
pub struct Sent {
    /// The rows, which must stay as they are until they have arrived.
    pub rows: Scratch,
    /// Rows for each rank.
    pub counts: Vec<usize>,
}

/// The collective `all_to_all_v` of a communicator, in the second half.
#[derive(Clone, Debug)]
pub struct Collective(pub Arc<dyn Communicator>);

impl Transport for Collective {
    fn start(&self, rows: Scratch, counts: Vec<usize>, _: &mut Exec) -> Result<Sent> {
        Ok(Sent { rows, counts })
    }

    fn finish(&self, sent: Sent, out: ViewMut<'_>, counts: &[usize], ex: &mut Exec) -> Result<()> {
        self.0.all_to_all_v(sent.rows.view(), &sent.counts, out, counts, ex)
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}
