//! The place where ops run: the properties on which the choice of kernels depends.

use super::features::Feature;
use super::fp8_activations::Fp8Activations;
use super::gpu::Gpu;
use super::reason::{Reason, Target};

/// The place where ops run: the properties on which the choice of kernels depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The GPU; `None`: the CPU.
    pub gpu: Option<Gpu>,
    /// Whether a row's bits must not depend on the other rows of its step.
    pub batch_invariant: bool,
    /// Whether activations may be quantised if the weights are FP8.
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

    /// Fails if the vendor's libraries may not be used.
    pub(crate) fn expect_library(&self) -> Result<(), Reason> {
        if self.expect_gpu()?.libraries { Ok(()) } else { Err(Reason::Library) }
    }

    /// Fails on a GPU.
    pub(crate) fn expect_cpu(&self) -> Result<(), Reason> {
        Target::Cpu.expect(self.gpu.as_ref())
    }

    /// Fails if a row's bits must not depend on the other rows of its step.
    pub(crate) fn expect_batch_variant(&self) -> Result<(), Reason> {
        if self.batch_invariant { Err(Reason::BatchInvariance) } else { Ok(()) }
    }
}
