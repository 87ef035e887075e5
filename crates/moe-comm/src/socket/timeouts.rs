//! The time limits of ranks that wait for each other, and the variables that set them.

use std::time::Duration;

use crate::env::{Env, invalid};
use crate::error::LaunchError;

/// The time limits of ranks that wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketTimeouts {
    /// The limit for all ranks to appear: hosts may start minutes apart.
    pub rendezvous: Duration,
    /// The limit for the other ranks in one collective.
    pub collective: Duration,
}

impl Default for SocketTimeouts {
    /// Five minutes for both, which is far longer than any layer computes.
    fn default() -> Self {
        Self { rendezvous: Duration::from_secs(300), collective: Duration::from_secs(300) }
    }
}

impl SocketTimeouts {
    /// The defaults, replaced by `MOE_RENDEZVOUS_TIMEOUT` and `MOE_COLLECTIVE_TIMEOUT` (in seconds) if they are set.
    /// `lookup` returns a variable's value.
    ///
    /// # Errors
    /// A value that is not a whole number of at least 1.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let env = Env(&lookup);
        let seconds = |name: &'static str, default: Duration| match env.optional_number(name)? {
            Some(0) => Err(invalid(name, "0", "seconds, a whole number of at least 1")),
            Some(seconds) => Ok(Duration::from_secs(seconds as u64)),
            None => Ok(default),
        };
        let default = Self::default();
        Ok(Self {
            rendezvous: seconds("MOE_RENDEZVOUS_TIMEOUT", default.rendezvous)?,
            collective: seconds("MOE_COLLECTIVE_TIMEOUT", default.collective)?,
        })
    }
}
