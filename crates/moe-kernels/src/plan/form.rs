//! The kernels of an op and the choice among them.

use super::machine::Machine;
use super::reason::Reason;
use super::stage::{Rejected, Stage};

/// The kernels of an op, in the order of trial.
pub trait Form: Copy + PartialEq + 'static {
    /// What the choice depends on, beside the machine.
    type Call;

    /// All forms; the first that fits runs.
    const ALL: &'static [Self];

    /// The name of the kernel.
    fn name(self) -> &'static str;

    /// The name in explanations: the name of the form for quantised weights where a kernel has one.
    fn kernel(self, call: &Self::Call) -> String {
        let _ = call;
        self.name().to_string()
    }

    /// Whether this form computes the call, or the first reason why not.
    ///
    /// # Errors
    /// The first reason why not.
    fn fits(self, call: &Self::Call, machine: &Machine) -> Result<(), Reason>;

    /// The form that runs; `None` where none fits.
    fn choose(call: &Self::Call, machine: &Machine) -> Option<Self> {
        Self::ALL.iter().copied().find(|form| form.fits(call, machine).is_ok())
    }

    /// The form that runs, with every form before it that does not fit, and why.
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
