//! The kernels of an op and the choice among them.

use super::machine::Machine;
use super::reason::Reason;
use super::stage::{Rejected, Stage};

/// The kernels of an op, in the order of trial.
pub trait Form: Copy + PartialEq + 'static {
    /// The data that determines the choice, in addition to the machine.
    type Call;

    /// All forms; the first one that fits runs.
    const ALL: &'static [Self];

    /// The name of the kernel.
    fn name(self) -> &'static str;

    /// The name in explanations. If a kernel has a form for quantised weights, it is the name of that form.
    fn kernel(self, call: &Self::Call) -> String {
        let _ = call;
        self.name().to_string()
    }

    /// Succeeds if this form can compute the call.
    ///
    /// # Errors
    /// The first reason why it cannot.
    fn fits(self, call: &Self::Call, machine: &Machine) -> Result<(), Reason>;

    /// The form that runs; `None` if none fits.
    fn choose(call: &Self::Call, machine: &Machine) -> Option<Self> {
        Self::ALL.iter().copied().find(|form| form.fits(call, machine).is_ok())
    }

    /// The form that runs, with every earlier form that does not fit and the reason.
    fn stage(computes: &'static [&'static str], call: &Self::Call, machine: &Machine) -> Stage {
        let mut rejected = Vec::new();
        for form in Self::ALL {
            match form.fits(call, machine) {
                Ok(()) => return Stage::new(computes, form.kernel(call)).after(rejected),
                // That floats are not quantised needs no explanation.
                Err(Reason::Floats) => {}
                Err(reason) => rejected.push(Rejected { kernel: form.kernel(call), reason }),
            }
        }
        Stage::new(computes, "none").after(rejected)
    }
}
