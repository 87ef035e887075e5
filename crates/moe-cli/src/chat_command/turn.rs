//! How a turn of the conversation went, and how fast its answer was.

use std::time::Duration;

/// How a turn went.
#[derive(Clone, Copy, PartialEq)]
pub enum Turn {
    /// There is an answer, perhaps not all of it.
    Answered,
    /// There is none; why has been said.
    Failed,
    /// Nobody reads the answers any more.
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
