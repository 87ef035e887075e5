//! Why a kernel or an expert backend does not run what was asked: typed, printable, machine-readable.

use std::fmt;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::columns::ColumnOrder;
use super::features::Feature;
use super::fp8_activations::Fp8Activations;
use crate::scheme::QuantScheme;
use crate::tags::{Activation, ActivationFormat, activation_name};

/// The device that a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// Host memory.
    Cpu,
    /// A GPU that this build has kernels for.
    Gpu,
    /// A GPU that this build has tuned kernels for, whose code uses these features.
    Tuned(&'static [Feature]),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "the CPU",
            Self::Gpu | Self::Tuned(_) => "CUDA",
        })
    }
}

fn device_name(capability: Option<(u32, u32)>) -> String {
    match capability {
        None => "the CPU".to_string(),
        Some((major, minor)) => format!("CUDA with compute capability {major}.{minor}"),
    }
}

/// Why a kernel or backend was not chosen. The text completes the sentence "X: ...".
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The rank computes on another kind of device.
    #[error("runs on {needs}, but this rank computes on {}", device_name(*.got))]
    Device {
        /// What it runs on.
        needs: Target,
        /// Compute capability of the rank's GPU; `None`: the CPU.
        got: Option<(u32, u32)>,
    },
    /// It is a tuned kernel, and these were not built for the rank's GPU.
    #[error("is not built for compute capability {}.{}", .got.0, .got.1)]
    NoCode {
        /// Compute capability of the rank's GPU.
        got: (u32, u32),
    },
    /// Its code for the rank's GPU lacks what it uses.
    #[error("uses {needs}, which its code for compute capability {}.{} does not have", .got.0, .got.1)]
    Feature {
        /// What it uses.
        needs: Feature,
        /// Compute capability of the rank's GPU.
        got: (u32, u32),
    },
    /// The vendor's libraries are left aside.
    #[error("is a library of the vendor, of which none runs where only PTX of this program may")]
    Library,
    /// Another number of rows.
    #[error("computes {} at once, got {got}", rows_range(*.least, *.most))]
    Rows {
        /// Fewest rows.
        least: usize,
        /// Most rows, if there is a limit.
        most: Option<usize>,
        /// Rows of the step.
        got: usize,
    },
    /// A size beyond the kernel's limit.
    #[error("takes a {dimension} of at most {most}, got {got}")]
    TooLarge {
        /// Which size.
        dimension: &'static str,
        /// The limit of that size.
        most: usize,
        /// The layer's value.
        got: usize,
    },
    /// A size that the kernel is not compiled for.
    #[error("is compiled for a {dimension} of {accepted:?}, got {got}")]
    OneOf {
        /// Which size.
        dimension: &'static str,
        /// The values that it is compiled for.
        accepted: &'static [usize],
        /// The layer's value.
        got: usize,
    },
    /// Blocks of the KV cache that do not divide the kernel's tiles.
    #[error("reads KV blocks of 8, 16, 32, 64 or a multiple of 128 slots, got {got}")]
    BlockSize {
        /// Slots of a block.
        got: usize,
    },
    /// What a block keeps on chip does not fit.
    #[error("needs {needs} bytes of shared memory, but a block has {has}")]
    SharedMemory {
        /// Bytes that it needs.
        needs: usize,
        /// Bytes that a block may ask for.
        has: usize,
    },
    /// The arrays between its launches would need too much memory.
    #[error("needs {needs} bytes between its launches, more than {has}")]
    Memory {
        /// Bytes that it needs.
        needs: usize,
        /// Bytes that it may take.
        has: usize,
    },
    /// Data that vector loads cannot read.
    #[error("reads 16 bytes at once, but a view does not begin at a multiple of 16 bytes")]
    Alignment,
    /// The step has rows of prompts.
    #[error("computes one new row of each sequence, but the step has several rows of one")]
    OneRowEach,
    /// The step wants to see or to force what happens inside the launch.
    #[error("keeps routing inside the launch, but {asked} is asked for")]
    Routed {
        /// What is asked for.
        asked: &'static str,
    },
    /// The layer has a part that the launch does not know.
    #[error("does not compute {part}, which this layer has")]
    Part {
        /// The part.
        part: &'static str,
    },
    /// The device has slots for a part of the experts that a step may need.
    #[error("computes all experts of a step at once, but these come to the device in {passes} passes")]
    Passes {
        /// How many passes.
        passes: usize,
    },
    /// More ranks than experts.
    #[error("needs an expert on this rank, but it has none")]
    NoLocalExperts,
    /// The launch brings nothing here.
    #[error("saves nothing here: {0}")]
    NoGain(&'static str),
    /// The kernel has no such activation.
    #[error("has no activation {}; it has {}", activation_name(*.got), .accepted.join(", "))]
    Activation {
        /// The model's activation.
        got: Activation,
        /// Names of the activations that the kernel has.
        accepted: Vec<&'static str>,
    },
    /// The kernel adds no expert biases.
    #[error("adds no biases, but the experts carry w13_bias or w2_bias")]
    Bias,
    /// The kernel does not read weights quantised like this.
    #[error("does not read weights of quantisation scheme {got}")]
    Quant {
        /// The pack's scheme.
        got: QuantScheme,
    },
    /// The kernel does not read columns in this order.
    #[error("does not read columns that are {got}")]
    Columns {
        /// The pack's order.
        got: ColumnOrder,
    },
    /// The kernel quantises what is to keep its dtype.
    #[error(
        "quantises activations to 8 bits, which `fp8_activations` {setting} does not allow for these weights"
    )]
    Activations {
        /// What is allowed.
        setting: Fp8Activations,
    },
    /// The kernel does not read scales of this dtype.
    #[error("reads scales in {}, but they are {got}", .accepted.join(", "))]
    Scales {
        /// Dtype of the scales.
        got: &'static str,
        /// Dtypes that the kernel reads.
        accepted: Vec<&'static str>,
    },
    /// The kernel reads quantised weights only.
    #[error("reads quantised weights, and these are floats")]
    Floats,
    /// The backend turns quantised weights into floats.
    #[error("turns quantised weights into floats, and these are floats")]
    NotQuantised,
    /// The kernel does not compute in this dtype.
    #[error("computes in {}, but the activations are {got}", .accepted.join(", "))]
    Dtype {
        /// Dtype of the activations.
        got: &'static str,
        /// Dtypes that the kernel computes in.
        accepted: Vec<&'static str>,
    },
    /// The backend cannot split experts along the intermediate size.
    #[error(
        "computes whole experts, but tp_size = {tp_size} splits each along its intermediate size; \
         use expert parallelism or tp_size = 1"
    )]
    TensorParallel {
        /// Tensor-parallel size of the experts.
        tp_size: usize,
    },
    /// The backend weights rows by itself, so weighted input would be weighted twice.
    #[error(
        "applies router weights to its output, but apply_router_weight_on_input applies them to the input"
    )]
    RouterWeightOnInput,
    /// A size does not fit the kernel's tiles.
    #[error("needs a {dimension} that is a multiple of {multiple_of}, got {got}")]
    Shape {
        /// Which size.
        dimension: &'static str,
        /// What it must be a multiple of.
        multiple_of: usize,
        /// The rank's value.
        got: usize,
    },
    /// Prepare hands over rows in the other activation format.
    #[error("takes rows in the {needs:?} format, but prepare hands over {got:?}")]
    ActivationFormat {
        /// The backend's format.
        needs: ActivationFormat,
        /// Prepare's format.
        got: ActivationFormat,
    },
    /// Batch invariance was asked for.
    #[error("a token's bits depend on its batch, but batch invariance is on")]
    BatchInvariance,
    /// It fits, but the user asked for another.
    #[error("fits, but {requested} was asked for")]
    NotRequested {
        /// The backend that the user named.
        requested: &'static str,
    },
    /// It fits, but another that fits comes first.
    #[error("fits, but {chosen} comes first")]
    LowerPriority {
        /// The chosen backend.
        chosen: &'static str,
    },
    /// A reason of a backend from outside of this crate.
    #[error("{0}")]
    Other(String),
}

impl Reason {
    /// The check that failed, as a stable identifier.
    pub fn check(&self) -> &'static str {
        match self {
            Self::Device { .. } | Self::NoCode { .. } | Self::Feature { .. } | Self::Library => "device",
            Self::Rows { .. } => "rows",
            Self::TooLarge { .. } | Self::OneOf { .. } | Self::BlockSize { .. } => "shape",
            Self::SharedMemory { .. } => "shared_memory",
            Self::Memory { .. } => "memory",
            Self::Alignment => "alignment",
            Self::OneRowEach => "one_row_each",
            Self::Routed { .. } => "routing_context",
            Self::Part { .. } => "layer_part",
            Self::Passes { .. } => "passes",
            Self::NoLocalExperts => "no_local_experts",
            Self::NoGain(_) => "no_gain",
            Self::Activation { .. } => "activation",
            Self::Bias => "bias",
            Self::Activations { .. } => "fp8_activations",
            Self::Quant { .. } | Self::Scales { .. } | Self::Columns { .. } => "quant",
            Self::NotQuantised | Self::Floats => "not_quantised",
            Self::Dtype { .. } => "dtype",
            Self::TensorParallel { .. } => "tensor_parallel",
            Self::RouterWeightOnInput => "router_weight_on_input",
            Self::Shape { .. } => "shape",
            Self::ActivationFormat { .. } => "activation_format",
            Self::BatchInvariance => "batch_invariance",
            Self::NotRequested { .. } => "not_requested",
            Self::LowerPriority { .. } => "lower_priority",
            Self::Other(_) => "other",
        }
    }
}

/// `{"check": "activation_format", "text": "takes rows in ..."}`.
impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("Reason", 2)?;
        s.serialize_field("check", self.check())?;
        s.serialize_field("text", &self.to_string())?;
        s.end()
    }
}

fn rows_range(least: usize, most: Option<usize>) -> String {
    match (least, most) {
        (0, Some(most)) => format!("at most {most} rows"),
        (least, Some(most)) => format!("{least} to {most} rows"),
        (least, None) => format!("at least {least} rows"),
    }
}
