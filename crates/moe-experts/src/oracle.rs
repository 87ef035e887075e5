//! The oracle chooses the backend that runs a specification, and says why it did not choose the others.
//!
//! Its input and output are plain data, and nothing here uses a device. So the choice for any machine can be computed,
//! printed and tested on any other machine.

use std::fmt;

use candle_core::DType;
use moe_kernels::{Activation, ActivationFormat, ExpertsSpec, QuantScheme};
use serde::Serialize;

use crate::capability::Capability;
use moe_kernels::plan::{Reason, TENSOR_CORES, Target, WARPGROUPS};

/// An implementation of the fused experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Backend {
    /// Either streams the weights once for all tokens, or computes grouped products on tensor cores. The weighted sum
    /// is a part of the same call (CUDA, Standard format).
    CudaFused,
    /// The same as `CudaFused` for rows that arrive with their slots listed by expert (Listed format).
    CudaFusedListed,
    /// Grouped products on a CUDA device over token rows, of any dtype, scheme and size (Standard and Listed formats).
    Cuda,
    /// The same as `Cuda`, over one row block per expert (BatchedExperts format).
    CudaBatched,
    /// Grouped products on the CPU over token rows (Standard and Listed formats).
    Cpu,
    /// The same as `Cpu`, over one row block per expert (BatchedExperts format).
    CpuBatched,
    /// Converts quantised weights to floats when they are loaded, and uses the best backend for floats. It is chosen if
    /// no other backend reads the scheme.
    Emulation,
}

/// The common abilities of both CPU backends.
const CPU: Capability = Capability {
    target: Target::Cpu,
    activations: &["swiglu", "swiglu_oai", "clamped_swiglu", "relu", "gelu", "gelu_tanh"],
    bias: true,
    quantised: true,
    dtypes: &[DType::F32, DType::BF16, DType::F16],
    tensor_parallel: false,
    hidden_multiple_of: 1,
    intermediate_multiple_of: 1,
    format: ActivationFormat::Standard,
    listed: true,
    batch_invariant: true,
};

/// CUDA runs everything that the CPU backends run, except two activations. Which kernel computes a row depends on the
/// number of rows, unless the context requires batch invariance.
const CUDA: Capability =
    Capability { target: Target::Gpu, activations: &["swiglu", "swiglu_oai", "gelu", "gelu_tanh"], ..CPU };

/// The kernels load weights and rows in stages of 64 elements, 128 bytes, so H and I must be multiples of 64.
pub(crate) const CUDA_FUSED: Capability = Capability {
    target: Target::Tuned(TENSOR_CORES),
    activations: &["swiglu", "swiglu_oai"],
    dtypes: &[DType::BF16],
    hidden_multiple_of: 64,
    intermediate_multiple_of: 64,
    listed: false,
    ..CUDA
};

impl Backend {
    /// Every backend, in the order in which the oracle tries them.
    pub const ALL: [Backend; 7] = [
        Self::CudaFused,
        Self::CudaFusedListed,
        Self::Cuda,
        Self::CudaBatched,
        Self::Cpu,
        Self::CpuBatched,
        Self::Emulation,
    ];

    /// The name that a user gives (`--moe-backend`).
    pub fn name(self) -> &'static str {
        match self {
            Self::CudaFused => "cuda_fused",
            Self::CudaFusedListed => "cuda_fused_listed",
            Self::Cuda => "cuda",
            Self::CudaBatched => "cuda_batched",
            Self::Cpu => "cpu",
            Self::CpuBatched => "cpu_batched",
            Self::Emulation => "emulation",
        }
    }

    /// Whether this backend runs the specification, or the first reason why not.
    pub fn supports(self, spec: &ExpertsSpec) -> Result<(), Reason> {
        let Some(capability) = self.capability() else { return emulates(spec) };
        capability.check(spec)?;
        if !matches!(self, Self::CudaFused | Self::CudaFusedListed) {
            return Ok(());
        }
        if spec.apply_router_weight_on_input {
            return Err(Reason::RouterWeightOnInput);
        }
        // The kernels for many rows before Hopper compute the plain SwiGLU alone.
        let plain = !spec.has_bias && spec.activation == Activation::SwiGlu;
        if plain || spec.quant != QuantScheme::NONE {
            return Ok(());
        }
        Target::Tuned(WARPGROUPS).expect(spec.gpu.as_ref())
    }

    /// The abilities of this backend. Emulation has those that other backends have.
    fn capability(self) -> Option<Capability> {
        Some(match self {
            // Ranks with cut experts add up whole sums on a device, and separate sums of segments on the CPU.
            Self::CudaFused => Capability { tensor_parallel: true, ..CUDA_FUSED },
            Self::CudaFusedListed => Capability { format: ActivationFormat::Listed, ..CUDA_FUSED },
            Self::Cuda => Capability { tensor_parallel: true, ..CUDA },
            Self::CudaBatched => {
                Capability { format: ActivationFormat::BatchedExperts, listed: false, ..CUDA }
            }
            Self::Cpu => Capability { tensor_parallel: true, ..CPU },
            Self::CpuBatched => Capability { format: ActivationFormat::BatchedExperts, listed: false, ..CPU },
            Self::Emulation => return None,
        })
    }
}

/// Whether some backend runs the specification in floats. If none does, the error is the reason of the last one.
fn emulates(spec: &ExpertsSpec) -> Result<(), Reason> {
    if spec.quant == QuantScheme::NONE {
        return Err(Reason::NotQuantised);
    }
    let floats = ExpertsSpec { quant: QuantScheme::NONE, ..spec.clone() };
    let mut answer = Err(Reason::NotQuantised);
    for backend in Backend::ALL.into_iter().filter(|backend| *backend != Backend::Emulation) {
        answer = backend.supports(&floats);
        if answer.is_ok() {
            break;
        }
    }
    answer
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Backend {
    type Err = OracleError;

    /// Returns the backend with this name. The error lists the valid names.
    fn from_str(name: &str) -> Result<Self, OracleError> {
        let found = Self::ALL.into_iter().find(|b| b.name() == name);
        found.ok_or_else(|| OracleError::UnknownBackend { name: name.to_string() })
    }
}

/// A backend that was not chosen, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Rejection {
    /// The backend.
    pub backend: Backend,
    /// The first check that it failed.
    pub reason: Reason,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.backend, self.reason)
    }
}

/// The oracle's answer. Serialises to JSON for people and scripts that ask why a backend runs:
/// `{"chosen": "cpu", "rejected": [{"backend", "reason": {"check", "text"}}], "spec": {..}}`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Selection {
    /// The backend to run.
    pub chosen: Backend,
    /// Every other backend with the reason why it was not chosen, in the order of trial.
    pub rejected: Vec<Rejection>,
    /// The specification for which the choice was made.
    pub spec: ExpertsSpec,
}

impl Selection {
    /// Returns the specification for the kernels. It is in floats if quantised weights are emulated.
    pub fn computed(&self) -> ExpertsSpec {
        match self.chosen {
            Backend::Emulation => ExpertsSpec { quant: QuantScheme::NONE, ..self.spec.clone() },
            _ => self.spec.clone(),
        }
    }
}

/// Why no backend was chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// The specification contradicts itself.
    #[error("invalid experts specification: {0}")]
    InvalidSpec(String),
    /// The user named a backend that does not exist.
    #[error("unknown MoE backend {name:?}; expected auto or one of {}", Backend::ALL.map(Backend::name).join(", "))]
    UnknownBackend {
        /// What the user gave.
        name: String,
    },
    /// The user named a backend that does not support the specification.
    #[error(
        "the MoE backend that was asked for does not fit: {}; use auto or another backend\nall backends:{}",
        .asked, list(.rejected, .fitting)
    )]
    Unsupported {
        /// The named backend and its reason.
        asked: Rejection,
        /// Every backend that does not support the specification, including the named one.
        rejected: Vec<Rejection>,
        /// The backends that support it.
        fitting: Vec<Backend>,
    },
    /// No backend supports the specification.
    #[error("no MoE backend runs this configuration:{}", list(.rejected, &[]))]
    NoBackend {
        /// Every backend with its reason.
        rejected: Vec<Rejection>,
    },
}

impl From<OracleError> for candle_core::Error {
    fn from(error: OracleError) -> Self {
        moe_kernels::into_candle(error)
    }
}

fn list(rejected: &[Rejection], fitting: &[Backend]) -> String {
    let rejected = rejected.iter().map(|r| format!("\n  {r}"));
    rejected.chain(fitting.iter().map(|b| format!("\n  {b}: fits"))).collect()
}

/// Chooses the backend for a specification: the first of [`Backend::ALL`] that supports it, or
/// the one that the user named (`None` or `auto`: no preference).
///
/// ```
/// use moe_experts::{Activation, ActivationFormat, Backend, ExpertWeights, build, select};
/// # use candle_core::{DType, Device, Tensor};
/// # let w13 = Tensor::zeros((4, 12, 8), DType::BF16, &Device::Cpu)?;
/// # let w2 = Tensor::zeros((4, 8, 6), DType::BF16, &Device::Cpu)?;
/// let weights = ExpertWeights::new(w13, w2, None, None)?;
/// let mut spec = weights.spec(Activation::SwiGlu, 2);
/// spec.activation_format = ActivationFormat::BatchedExperts;
/// let selection = select(&spec, None)?;
/// assert_eq!(selection.chosen, Backend::CpuBatched);
/// assert_eq!(
///     selection.rejected[4].to_string(),
///     "cpu: takes rows in the Standard format, but prepare hands over BatchedExperts"
/// );
/// let experts = build(&selection, weights)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A specification that contradicts itself; an unknown name (the error lists the valid ones); a named backend that does
/// not support the specification (no other one is chosen instead); a specification that no backend supports. The last
/// two errors list every rejected backend with its reason.
pub fn select(spec: &ExpertsSpec, choice: Option<&str>) -> Result<Selection, OracleError> {
    let asked = match choice {
        None | Some("auto") => None,
        Some(name) => Some(name.parse::<Backend>()?),
    };
    validate(spec)?;
    let trials = Backend::ALL.map(|backend| (backend, backend.supports(spec)));
    let (chosen, rejected) = decide(&trials, asked)?;
    Ok(Selection { chosen, rejected, spec: spec.clone() })
}

/// Makes the choice from the outcomes of all trials.
fn decide(
    trials: &[(Backend, Result<(), Reason>)],
    asked: Option<Backend>,
) -> Result<(Backend, Vec<Rejection>), OracleError> {
    let fits = |backend| trials.iter().any(|(b, trial)| *b == backend && trial.is_ok());
    let fitting: Vec<Backend> = trials.iter().map(|(b, _)| *b).filter(|b| fits(*b)).collect();
    let chosen = match asked {
        Some(asked) => Some(asked).filter(|b| fits(*b)),
        None => fitting.first().copied(),
    };
    let mut rejected = Vec::new();
    for (backend, trial) in trials {
        let reason = match (trial, asked, chosen) {
            (Err(reason), ..) => reason.clone(),
            (Ok(()), _, Some(chosen)) if chosen == *backend => continue,
            (Ok(()), Some(asked), Some(_)) => Reason::NotRequested { requested: asked.name() },
            (Ok(()), None, Some(chosen)) => Reason::LowerPriority { chosen: chosen.name() },
            (Ok(()), _, None) => continue,
        };
        rejected.push(Rejection { backend: *backend, reason });
    }
    match (chosen, rejected.iter().find(|r| Some(r.backend) == asked).cloned()) {
        (Some(chosen), _) => Ok((chosen, rejected)),
        (None, Some(asked)) => Err(OracleError::Unsupported { asked, rejected, fitting }),
        (None, None) => Err(OracleError::NoBackend { rejected }),
    }
}

/// Refuses specifications that make no sense for any backend.
fn validate(spec: &ExpertsSpec) -> Result<(), OracleError> {
    let sizes = [
        ("num_experts", spec.num_experts),
        ("top_k", spec.top_k),
        ("hidden_size", spec.hidden_size),
        ("intermediate_size", spec.intermediate_size),
        ("tp_size", spec.tp_size),
        ("ep_size", spec.ep_size),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(OracleError::InvalidSpec(format!("{name} must be at least 1, got 0")));
    }
    if spec.apply_router_weight_on_input && spec.top_k != 1 {
        return Err(OracleError::InvalidSpec(format!(
            "apply_router_weight_on_input needs top_k = 1, got {}",
            spec.top_k
        )));
    }
    spec.activation.check().map_err(|e| OracleError::InvalidSpec(e.to_string()))
}

#[cfg(test)]
#[path = "oracle_tests.rs"]
pub(crate) mod tests;
