//! The data that determines the choice of an expert backend.

use candle_core::DType;
use serde::{Serialize, Serializer};

use crate::plan::Gpu;
use crate::scheme::QuantScheme;
use crate::tags::{Activation, ActivationFormat, RoutingMethod, activation_name};

/// All data that determines the choice of an expert backend, as plain values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertsSpec {
    /// Logical experts E.
    pub num_experts: usize,
    /// Experts on this rank.
    pub num_local_experts: usize,
    /// Slots per token K.
    pub top_k: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Intermediate size I on this rank.
    pub intermediate_size: usize,
    /// Dtype of activations.
    #[serde(serialize_with = "dtype_name")]
    pub dtype: DType,
    /// Quantisation of the weights.
    pub quant: QuantScheme,
    /// The gated activation.
    #[serde(serialize_with = "activation_text")]
    pub activation: Activation,
    /// Whether the packs carry `w13_bias` and `w2_bias`.
    pub has_bias: bool,
    /// The format of the rows that prepare returns.
    pub activation_format: ActivationFormat,
    /// Tag of the routing method.
    pub routing: RoutingMethod,
    /// Router weights are applied to the input rows, so experts and combine must not.
    pub apply_router_weight_on_input: bool,
    /// Tensor-parallel size of the experts.
    pub tp_size: usize,
    /// Expert-parallel size.
    pub ep_size: usize,
    /// A token's bits must not depend on its batch.
    pub batch_invariant: bool,
    /// The GPU; `None`: the CPU. As text its compute capability.
    #[serde(rename = "compute_capability", serialize_with = "capability_text")]
    pub gpu: Option<Gpu>,
}

fn dtype_name<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(dtype.as_str())
}

fn activation_text<S: Serializer>(activation: &Activation, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&activation_name(*activation))
}

fn capability_text<S: Serializer>(gpu: &Option<Gpu>, to: S) -> Result<S::Ok, S::Error> {
    let capability = gpu.map(|gpu| gpu.compute_capability);
    capability.map(|(major, minor)| format!("{major}.{minor}")).serialize(to)
}
