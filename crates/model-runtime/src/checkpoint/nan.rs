//! Looking for NaN and infinite weights, on request.

use std::fmt;

use super::decode;
use super::files::TensorFiles;

/// Tensors with NaN or infinite elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NanReport {
    /// The affected tensors, in the order of names.
    pub tensors: Vec<NonFinite>,
    /// Number of float tensors that were read.
    pub checked: usize,
}

/// A tensor with NaN or infinite elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// Full name.
    pub name: String,
    /// Elements that are NaN.
    pub nan: usize,
    /// Elements that are +inf or -inf.
    pub inf: usize,
}

impl NanReport {
    /// Whether every weight is finite.
    pub fn is_clean(&self) -> bool {
        self.tensors.is_empty()
    }
}

impl fmt::Display for NanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_clean() {
            return write!(f, "all weights of {} tensors are finite", self.checked);
        }
        write!(f, "{} of {} tensors hold weights that are not finite:", self.tensors.len(), self.checked)?;
        for t in &self.tensors {
            write!(f, "\n  {}: {} NaN, {} infinite", t.name, t.nan, t.inf)?;
        }
        Ok(())
    }
}

impl TensorFiles {
    /// Reads every float tensor and reports those with NaN or infinite elements.
    pub fn nan_report(&self) -> NanReport {
        let mut report = NanReport::default();
        self.visit(|name, dtype, bytes| {
            let Some((nan, inf)) = decode::count_non_finite(bytes, dtype) else { return };
            report.checked += 1;
            if nan + inf > 0 {
                report.tensors.push(NonFinite { name: name.to_string(), nan, inf });
            }
        });
        report
    }
}
