//! The result of a turn of the conversation, and the speed of its answer.

use std::time::Duration;

/// How a turn went.
#[derive(Clone, Copy, PartialEq)]
pub enum Turn {
    /// There is an answer, which may be incomplete.
    Answered,
    /// There is no answer; the reason has been printed.
    Failed,
    /// The reader of the answers has gone.
    Closed,
}

/// The speed of an answer.
#[derive(Clone, Copy, Default)]
pub struct Speed {
    /// New tokens.
    pub tokens: usize,
    /// The time to the first of them.
    pub first: Duration,
    /// The time of the others.
    pub rest: Duration,
}
