//! Why an expert backend does not run a given specification: typed, printable, machine-readable.

use moe_kernels::{Activation, ActivationFormat, QuantScheme, RoutingMethod};
use serde::ser::{Serialize, SerializeStruct, Serializer};

/// Why a backend was not chosen. The text completes the sentence "backend X: ...".
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The rank computes on another kind of device.
    #[error("runs on {needs}, but this rank computes on {got}")]
    Device {
        /// What the backend runs on.
        needs: String,
        /// What the rank has.
        got: String,
    },
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
    #[error("does not read weights of quantisation scheme {got:?}")]
    Quant {
        /// The pack's scheme.
        got: QuantScheme,
    },
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
    /// The router inside a monolithic kernel does not know the routing method.
    #[error("its built-in router has no routing method {got:?}; it has {accepted:?}")]
    Routing {
        /// The model's routing method.
        got: RoutingMethod,
        /// Methods that the kernel has.
        accepted: Vec<RoutingMethod>,
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
            Self::Device { .. } => "device",
            Self::Activation { .. } => "activation",
            Self::Bias => "bias",
            Self::Quant { .. } => "quant",
            Self::Dtype { .. } => "dtype",
            Self::TensorParallel { .. } => "tensor_parallel",
            Self::Routing { .. } => "routing",
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

/// Name of an activation without its parameters.
pub(crate) fn activation_kind(activation: Activation) -> &'static str {
    match activation {
        Activation::SwiGlu => "swiglu",
        Activation::SwiGluOai { .. } => "swiglu_oai",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

/// Name of an activation with its parameters.
pub(crate) fn activation_name(activation: Activation) -> String {
    let kind = activation_kind(activation);
    match activation {
        Activation::SwiGluOai { alpha, limit } => format!("{kind}(alpha = {alpha}, limit = {limit})"),
        _ => kind.to_string(),
    }
}
