//! Where ops run, as far as the choice of kernels depends on it.

use super::features::Feature;
use super::fp8_activations::Fp8Activations;
use super::gpu::Gpu;
use super::reason::{Reason, Target};

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
