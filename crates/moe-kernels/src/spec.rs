//! Enums and plain data that several crates share: formats, activations, routing tags, specs.

use candle_core::DType;
use serde::{Serialize, Serializer};

use crate::plan::{Gpu, activation_name};
use crate::scheme::QuantScheme;

/// The layout in which prepare hands rows to the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFormat {
    /// Rows [T, H] with topk_ids [T, K].
    Standard,
    /// Rows [E_local, max_tokens, H] with expert_num_tokens \[E_local\].
    BatchedExperts,
    /// Rows [T, H] with topk_ids [T, K], and beside them the slots of each expert: expert_slots [E_local, T * K] with
    /// expert_num_tokens \[E_local\].
    Listed,
}

/// How unweighted expert rows become token rows. Exactly one stage applies the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightAndReduce {
    /// Someone else must choose; calling it is an error.
    Delegate,
    /// The rows are already weighted and reduced: [T, H].
    NoOp,
    /// Slot rows [T, K, H]: weight and add k = 0..K-1.
    Contiguous,
    /// Batched rows [E_local, max_tokens, H]: add each expert's rows back to their tokens.
    NaiveBatched {
        /// The rank that owns the local experts.
        rank: usize,
    },
}

/// The gated activation between the two expert products. `g` is the gate row, `u` the up row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// silu(g) * u.
    SwiGlu,
    /// gpt-oss: g' = min(g, limit), u' = clamp(u, -limit, limit), g' * sigmoid(alpha * g') * (u' + 1).
    SwiGluOai {
        /// Slope inside the sigmoid (1.702 in gpt-oss).
        alpha: f32,
        /// Clamp bound (7 in gpt-oss).
        limit: f32,
    },
    /// gelu(g) * u with the exact error function.
    Gelu,
    /// gelu(g) * u with the tanh approximation.
    GeluTanh,
}

/// The routing method as kernels with built-in routing tag it (vLLM's `RoutingMethodType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[allow(missing_docs)] // The names are the tags; each is described in moe-router.
pub enum RoutingMethod {
    Default,
    Renormalize,
    DeepSeekV3,
    Llama4,
    RenormalizeNaive,
    TopK,
    SigmoidRenorm,
    MiniMax2,
    Sigmoid,
    DeepSeekV4,
    Custom,
    Simulated,
    Unspecified,
}

/// Everything the choice of an expert backend depends on, as plain data.
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
    /// The format that prepare hands over.
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
