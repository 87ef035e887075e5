//! Which kernel runs an op, and why not another: pure functions of sizes and a machine.
//!
//! Each op that has several kernels has an enum of [`Form`]s here. The op itself and the code that explains it ask the same
//! function. Nothing here touches a device: the choice for any machine
//! can be computed, printed and tested on any other.

mod attention;
mod copies;
mod dequantise;
mod experts;
mod features;
mod fp8;
mod fusion;
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

use std::ops::Range;

#[cfg(feature = "cuda")]
pub(crate) use attention::MAX_ROWS;
pub use attention::{AttentionCall, AttentionForm};
pub use copies::{CopiesCall, CopiesForm};
pub use dequantise::{DequantiseCall, DequantiseForm};
pub use experts::{EXPERTS_FROM_HOST, ExpertsCall, ExpertsForm};
pub use features::{Feature, Features};
pub use fp8::Fp8Activations;
pub use fusion::Fusion;
pub use gpu::{Gpu, Rates};
pub use images::{check_kernel_image, is_portable_only};
#[cfg(feature = "cuda")]
pub(crate) use linear::BLAS_FP8_ROWS;
pub use linear::{FusedLinearForm, LinearCall, LinearForm};
pub use mixed::{MixedCall, MixedForm};
pub use monolithic::{MonolithicCall, MonolithicForm};
pub use per_head::{PerHeadCall, PerHeadForm, QUERY_WITH_PRODUCT};
pub use prompt::{PromptCall, PromptForm};
pub use quant::{ColumnOrder, QuantWeights, expect_codec};
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
                Ok(()) => return Stage::new(computes, form.kernel(call)).after(rejected),
                // That floats are not quantised needs no explanation.
                Err(Reason::Floats) => {}
                Err(reason) => rejected.push(Rejected { kernel: form.kernel(call), reason }),
            }
        }
        Stage::new(computes, "none").after(rejected)
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
    /// The kernel's name, by which a context [notes](crate::Exec::launched) its launch.
    pub kernel: String,
    /// What else there is to say of it, in words: where it runs, and for whom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Where rows are computed in parts: the parts that it is launched for. The next stages with the same parts belong to it: all of
    /// them run for one part, then all for the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parts: Option<Range<usize>>,
    /// The faster forms that were tried first, and why they do not run.
    pub rejected: Vec<Rejected>,
}

impl Stage {
    /// A kernel for which no other one was tried.
    pub fn new(computes: &'static [&'static str], kernel: impl Into<String>) -> Self {
        Self { computes, kernel: kernel.into(), note: None, parts: None, rejected: Vec::new() }
    }

    /// The same stage with these kernels as the first that were tried.
    pub fn after(mut self, rejected: impl IntoIterator<Item = Rejected>) -> Self {
        self.rejected.splice(0..0, rejected);
        self
    }
}

/// The stages of rows that are computed in parts, each of the given number of rows.
pub fn in_parts(sizes: &[usize], stages: impl Fn(usize) -> Vec<Stage>) -> Vec<Stage> {
    let mut all = Vec::new();
    let mut first = 0;
    for run in sizes.chunk_by(|a, b| a == b) {
        let parts = (sizes.len() > 1).then_some(first..first + run.len());
        first += run.len();
        all.extend(stages(run[0]).into_iter().map(|stage| Stage { parts: parts.clone(), ..stage }));
    }
    all
}

/// The names of what a step launches by such a plan, in their order.
pub fn launches(stages: &[Stage]) -> Vec<&str> {
    let groups = stages.chunk_by(|a, b| a.parts.is_some() && a.parts == b.parts);
    let repeated = groups.flat_map(|group| {
        let times = group[0].parts.as_ref().map_or(1, ExactSizeIterator::len);
        std::iter::repeat_n(group, times)
    });
    repeated.flatten().map(|stage| stage.kernel.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_equal_size_are_listed_once_and_launched_each() {
        let of = |rows: usize| ["a", "b"].map(|name| Stage::new(&[], format!("{name}{rows}"))).to_vec();
        let stages = in_parts(&[3, 3, 2], of);
        let listed: Vec<_> =
            stages.iter().map(|stage| (stage.kernel.as_str(), stage.parts.clone())).collect();
        assert_eq!(listed, [("a3", Some(0..2)), ("b3", Some(0..2)), ("a2", Some(2..3)), ("b2", Some(2..3))]);
        assert_eq!(launches(&stages), ["a3", "b3", "a3", "b3", "a2", "b2"]);
        let whole = in_parts(&[5], of);
        assert_eq!((launches(&whole), &whole[0].parts), (vec!["a5", "b5"], &None));
    }
}
