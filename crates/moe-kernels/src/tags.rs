//! Enums that several crates share: formats of rows, activations, tags of routing methods.

use serde::Serialize;

use crate::error::ArgumentError;

/// The layout of the rows that prepare passes to the experts.
// This enum is exhaustive: prepare, experts and combine must each say what a new format means to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFormat {
    /// Rows [T, H] with topk_ids [T, K].
    Standard,
    /// Rows [E_local, max_tokens, H] with expert_num_tokens \[E_local\].
    BatchedExperts,
    /// Rows [T, H] with topk_ids [T, K], and in addition the slots of each expert: expert_slots [E_local, T * K] with
    /// expert_num_tokens \[E_local\].
    Listed,
}

/// How unweighted expert rows become token rows. Exactly one stage applies the weights.
// This enum is exhaustive: a combine that does not know a strategy would return wrong sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightAndReduce {
    /// The backend must choose another value; computing with this one is an error.
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
#[non_exhaustive]
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
    /// DeepSeek-V4: silu(min(g, limit)) * clamp(u, -limit, limit). On the CPU.
    ClampedSwiGlu {
        /// Clamp bound (10 in DeepSeek-V4).
        limit: f32,
    },
    /// relu(g) * u. On the CPU.
    Relu,
    /// gelu(g) * u with the exact error function.
    Gelu,
    /// gelu(g) * u with the tanh approximation.
    GeluTanh,
}

impl Activation {
    /// Fails unless the activation is defined: slopes are finite, and limits are above 0.
    ///
    /// # Errors
    /// The first parameter for which this is not so.
    pub fn check(self) -> Result<(), ArgumentError> {
        let refused = |name: &str, expected: &str, got: f32| {
            let op = activation_kind(self).to_string();
            let expected = expected.to_string();
            Err(ArgumentError::Value { op, name: name.to_string(), expected, got: got.to_string() })
        };
        match self {
            Self::SwiGluOai { alpha, .. } if !alpha.is_finite() => refused("alpha", "finite", alpha),
            Self::SwiGluOai { limit, .. } | Self::ClampedSwiGlu { limit }
                if limit.is_nan() || limit <= 0.0 =>
            {
                refused("limit", "above 0", limit)
            }
            _ => Ok(()),
        }
    }
}

/// Name of an activation without its parameters.
pub fn activation_kind(activation: Activation) -> &'static str {
    match activation {
        Activation::SwiGlu => "swiglu",
        Activation::SwiGluOai { .. } => "swiglu_oai",
        Activation::ClampedSwiGlu { .. } => "clamped_swiglu",
        Activation::Relu => "relu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

/// Name of an activation with its parameters.
pub fn activation_name(activation: Activation) -> String {
    let kind = activation_kind(activation);
    match activation {
        Activation::SwiGluOai { alpha, limit } => format!("{kind}(alpha = {alpha}, limit = {limit})"),
        Activation::ClampedSwiGlu { limit } => format!("{kind}(limit = {limit})"),
        _ => kind.to_string(),
    }
}

/// The routing method, as kernels with a built-in router encode it (vLLM's `RoutingMethodType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[allow(missing_docs)] // The names are the tags; each is described in moe-router.
#[non_exhaustive]
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

/// How logits become scores. The numbers are the ones in the CUDA kernels.
// This enum is exhaustive: kernels that route compute these scores and no others.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateScoring {
    /// Over all experts.
    Softmax,
    /// Each logit by itself.
    Sigmoid,
    /// sqrt(softplus) of each logit.
    SqrtSoftplus,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_with_which_an_activation_is_not_defined_are_named() {
        let said = |activation: Activation| activation.check().unwrap_err().to_string();
        let oai = |alpha, limit| Activation::SwiGluOai { alpha, limit };
        let clamped = |limit| Activation::ClampedSwiGlu { limit };
        assert_eq!(said(oai(f32::NAN, 7.0)), "swiglu_oai: expected alpha to be finite, got NaN");
        assert_eq!(said(oai(1.702, 0.0)), "swiglu_oai: expected limit to be above 0, got 0");
        assert_eq!(said(clamped(-1.0)), "clamped_swiglu: expected limit to be above 0, got -1");
        assert_eq!(said(clamped(f32::NAN)), "clamped_swiglu: expected limit to be above 0, got NaN");
        for fine in [Activation::Gelu, oai(-1.0, 7.0), clamped(10.0), clamped(f32::INFINITY)] {
            assert_eq!(fine.check(), Ok(()));
        }
    }
}
