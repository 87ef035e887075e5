//! Which kernel runs an op, and why not another: pure functions of sizes and a machine.
//!
//! Each op that has several kernels has an enum of [`Form`]s here. The op itself and the code that explains it ask the same
//! function, so an explanation cannot differ from what runs. Nothing here touches a device: the choice for any machine
//! can be computed, printed and tested on any other.

mod attention;
mod copies;
mod dequantise;
mod experts;
mod features;
mod fp8;
mod gpu;
mod images;
mod linear;
mod mixed;
mod monolithic;
mod one_launch;
mod per_head;
#[cfg(test)]
mod pins;
mod prompt;
mod quant;
mod reason;
mod router;

#[cfg(feature = "cuda")]
pub(crate) use attention::MAX_ROWS;
pub use attention::{AttentionCall, AttentionForm};
pub use copies::{CopiesCall, CopiesForm};
pub use dequantise::{DequantiseCall, DequantiseForm};
pub use experts::{ExpertsCall, ExpertsForm};
pub use features::{Feature, Features};
pub use fp8::Fp8Activations;
pub use gpu::{Gpu, Rates};
pub use images::{check_kernel_image, is_portable_only};
#[cfg(feature = "cuda")]
pub(crate) use linear::BLAS_FP8_ROWS;
pub use linear::{FusedLinearForm, LinearCall, LinearForm};
pub use mixed::{MixedCall, MixedForm};
pub use monolithic::{Fusion, MonolithicCall, MonolithicForm};
pub use per_head::{PerHeadCall, PerHeadForm};
pub use prompt::{PromptCall, PromptForm};
pub use quant::{ColumnOrder, QuantWeights};
pub use reason::{Reason, Target, activation_kind, activation_name};
pub use router::{RouterCall, RouterForm};

/// What the kernels for tensor cores of any card use.
pub const TENSOR_CORES: &[Feature] = &[Feature::AsyncCopies, Feature::Bf16Mma];
/// Features of streaming kernels that were only measured on cards with bulk copies.
pub const BULK_COPIES: &[Feature] = &[Feature::AsyncCopies, Feature::Bf16Mma, Feature::TensorMaps];
/// What the kernels on warpgroup products use.
pub const WARPGROUPS: &[Feature] = &[Feature::TensorMaps, Feature::Clusters, Feature::Wgmma];

/// Where ops run, as far as the choice of kernels depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The GPU; `None`: the CPU.
    pub gpu: Option<Gpu>,
    /// Whether a row's bits must not depend on the rows beside it.
    pub batch_invariant: bool,
    /// Whether activations beside FP8 weights may be quantised, too.
    pub fp8_activations: Fp8Activations,
}

impl Machine {
    /// Fails on the CPU: for the portable kernels, which every GPU runs.
    pub(crate) fn expect_gpu(&self) -> Result<Gpu, Reason> {
        self.gpu.ok_or(Reason::Device { needs: Target::Gpu, got: None })
    }

    /// Fails unless tuned kernels that use these features run here.
    pub(crate) fn expect_tuned(&self, features: &'static [Feature]) -> Result<Gpu, Reason> {
        let gpu = self.expect_gpu()?;
        gpu.expect_tuned(features)?;
        Ok(gpu)
    }

    /// Fails where the vendor's libraries do not compute.
    pub(crate) fn expect_library(&self) -> Result<(), Reason> {
        if self.expect_gpu()?.libraries { Ok(()) } else { Err(Reason::Library) }
    }

    /// Fails on a GPU.
    pub(crate) fn expect_cpu(&self) -> Result<(), Reason> {
        Target::Cpu.expect(self.gpu.as_ref())
    }

    /// Fails where a row's bits must not depend on the rows beside it.
    pub(crate) fn expect_batch_variant(&self) -> Result<(), Reason> {
        if self.batch_invariant { Err(Reason::BatchInvariance) } else { Ok(()) }
    }
}

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
                Ok(()) => return Stage { computes, kernel: form.kernel(call), rejected },
                // That floats are not quantised needs no explanation.
                Err(Reason::Floats) => {}
                Err(reason) => rejected.push(Rejected { kernel: form.kernel(call), reason }),
            }
        }
        Stage { computes, kernel: "none".into(), rejected }
    }
}

/// A kernel that does not run, and why.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Rejected {
    /// The kernel's name.
    pub kernel: String,
    /// The first check that it failed.
    pub reason: Reason,
}

/// One kernel of a layer, or a few that always run together.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Stage {
    /// The parts of the layer that it computes: more than one where they are fused.
    pub computes: &'static [&'static str],
    /// The kernel's name.
    pub kernel: String,
    /// The faster forms that were tried first, and why they do not run.
    pub rejected: Vec<Rejected>,
}
