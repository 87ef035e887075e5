//! The execution context of an op: device, threads, instruction set, workspace, step context.
//!
//! An [`Exec`] is what a CUDA stream is to CUDA code: ops that share it run in order. On the
//! CPU it carries a thread pool and the instruction-set path. Two runs on one path are
//! bit-identical whatever the number of threads; paths differ within a stated bound.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::buffer::{Scratch, Workspace};
use crate::routed::StepContext;

/// The instruction-set path of the CPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuIsa {
    /// Portable Rust: the readable specification.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL: the same arithmetic as AVX2, so the same bits, at twice the width.
    Avx512,
    /// AVX-512 with the BF16 dot product for bf16 weights; the rest as [`CpuIsa::Avx512`].
    Avx512Bf16,
    /// AMX matrix registers for products of bf16; the rest as [`CpuIsa::Avx512Bf16`].
    AmxBf16,
}

impl CpuIsa {
    /// Every path.
    pub const ALL: [CpuIsa; 5] =
        [CpuIsa::Scalar, CpuIsa::Avx2, CpuIsa::Avx512, CpuIsa::Avx512Bf16, CpuIsa::AmxBf16];

    /// The fastest path that this machine runs.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_supported()).unwrap_or(Self::Scalar)
    }

    /// Whether this machine runs the path.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => Self::Avx512Bf16.is_supported() && crate::cpu::amx::is_supported(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The command-line name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::AmxBf16 => "amx-bf16",
        }
    }

    /// The path of that name; an error lists the names, or says that this machine lacks it.
    pub fn from_name(name: &str) -> Result<Self> {
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            let names = Self::ALL.map(Self::name).join(", ");
            bail!("unknown CPU instruction set {name:?}; expected one of {names}")
        };
        if !isa.is_supported() {
            bail!(
                "this processor does not support the instruction set {name:?}; the fastest it supports is {:?}",
                Self::detect().name()
            )
        }
        Ok(isa)
    }
}

/// The context that every op runs in.
#[derive(Clone)]
pub struct Exec {
    device: Device,
    isa: CpuIsa,
    threads: Option<Arc<rayon::ThreadPool>>,
    workspace: Workspace,
    /// What this step carries beside its tensors.
    pub step: StepContext,
}

impl Exec {
    /// A CPU context on rayon's global pool, with the fastest instruction set and a workspace
    /// of its own.
    pub fn cpu() -> Self {
        Self {
            device: Device::Cpu,
            isa: CpuIsa::detect(),
            threads: None,
            workspace: Workspace::new(),
            step: StepContext::default(),
        }
    }

    /// The context of a tensor's device, with a module's workspace.
    pub fn for_tensor(tensor: &Tensor, workspace: &Workspace) -> Result<Self> {
        match tensor.device() {
            Device::Cpu => Ok(Self { workspace: workspace.clone(), ..Self::cpu() }),
            other => bail!("expected a tensor on the CPU, got one on {:?}", other.location()),
        }
    }

    /// Forces an instruction set; an error if this machine lacks it.
    pub fn with_isa(mut self, isa: CpuIsa) -> Result<Self> {
        self.isa = CpuIsa::from_name(isa.name())?;
        Ok(self)
    }

    /// Runs on a pool of `n` threads of its own.
    pub fn with_threads(mut self, n: usize) -> Result<Self> {
        if n == 0 {
            bail!("the number of threads must be at least 1")
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
        self.threads = Some(Arc::new(pool.map_err(candle_core::Error::wrap)?));
        Ok(self)
    }

    /// The device that ops run on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The instruction-set path of the CPU kernels.
    pub fn isa(&self) -> CpuIsa {
        self.isa
    }

    /// Number of threads that CPU kernels use.
    pub fn num_threads(&self) -> usize {
        self.threads.as_ref().map_or_else(rayon::current_num_threads, |p| p.current_num_threads())
    }

    /// Runs `f` inside the thread pool, where rayon's parallel iterators use its threads. A caller
    /// of many ops, such as a model's step, does well to enter the pool once: from outside, every
    /// parallel op pays two hand-overs between threads.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(pool) => pool.install(f),
            // The global pool has no handle; a scope runs inside it.
            None => rayon::scope(|_| f()),
        }
    }

    /// The same device, threads and workspace, with an empty step context.
    pub fn handle(&self) -> Self {
        Self {
            device: self.device.clone(),
            isa: self.isa,
            threads: self.threads.clone(),
            workspace: self.workspace.clone(),
            step: StepContext::default(),
        }
    }

    /// Scratch from the workspace, with unspecified contents.
    pub fn scratch(&self, dtype: DType, dims: &[usize]) -> Result<Scratch> {
        self.workspace.scratch(dtype, dims)
    }

    /// The workspace.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }
}
