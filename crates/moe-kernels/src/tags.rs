//! Enums that several crates share: formats of rows, activations, tags of routing methods.

use serde::Serialize;

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

/// Name of an activation without its parameters.
pub fn activation_kind(activation: Activation) -> &'static str {
    match activation {
        Activation::SwiGlu => "swiglu",
        Activation::SwiGluOai { .. } => "swiglu_oai",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

/// Name of an activation with its parameters.
pub fn activation_name(activation: Activation) -> String {
    let kind = activation_kind(activation);
    match activation {
        Activation::SwiGluOai { alpha, limit } => format!("{kind}(alpha = {alpha}, limit = {limit})"),
        _ => kind.to_string(),
    }
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

/// How logits become scores; the codes are those of the CUDA kernels.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateScoring {
    /// Over all experts.
    Softmax,
    /// One by one.
    Sigmoid,
    /// sqrt(softplus), one by one.
    SqrtSoftplus,
}
