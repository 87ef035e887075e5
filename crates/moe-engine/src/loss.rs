//! The loss of ranks that the others survive by loading the model again.

use std::fmt;
use std::time::Duration;

/// Ranks were lost, and the others have loaded their experts.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Why each of them was lost.
    pub why: Vec<String>,
    /// The number of replicas that are left, and with which the run began.
    pub left: [usize; 2],
    /// How long it took to load the model again.
    pub loading: Duration,
}

impl Loss {
    /// This loss and one that followed before the run had gone on.
    pub fn and(mut self, later: Self) -> Self {
        self.why.extend(later.why);
        Self { why: self.why, left: later.left, loading: self.loading + later.loading }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [left, all] = self.left;
        let seconds = self.loading.as_secs_f64();
        let why = self.why.join("; ");
        write!(
            f,
            "{why}. The run goes on with {left} of {all} replicas, which loaded the lost experts in {seconds:.1} s"
        )
    }
}
