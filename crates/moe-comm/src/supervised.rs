//! Ranks whose panic or error is reported to the other ranks by their caller.

use crate::communicator::Communicator;

/// A communicator whose caller watches the rank and reports its end to the other ranks.
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
