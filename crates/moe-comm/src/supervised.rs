//! Ranks whose end somebody else explains to the other ranks.

use crate::communicator::Communicator;

/// A communicator whose rank's end somebody else watches and explains to the other ranks.
pub trait Supervised: Communicator + 'static {
    /// Promises that the caller fails the world if this rank panics.
    fn supervise(&mut self) -> Supervisor;
}

/// Fails the world of a supervised rank.
pub struct Supervisor {
    pub(crate) name: String,
    pub(crate) fail: Box<dyn Fn(String) + Send>,
}

impl Supervisor {
    pub(crate) fn new(name: String, fail: impl Fn(String) + Send + 'static) -> Self {
        Self { name, fail: Box::new(fail) }
    }
}
