//! The configuration of a router: plain data that names one routing method.
//!
//! A method is a scoring function, a selection rule, and what happens to the chosen scores. They
//! are separate fields because they combine freely: DeepSeek-V3 is sigmoid scores, grouped
//! selection with a bias, renormalised and scaled; Qwen3-MoE is softmax scores, plain top-k,
//! optionally renormalised. What does not combine is refused by
//! [`validate`](RouterConfig::validate).

use std::str::FromStr;

use moe_kernels::RoutingMethod;
use serde::{Deserialize, Serialize};

use crate::error::RouterError;

/// How logits become scores. All in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Scoring {
    /// Softmax over all experts (over the chosen ones with [`Selection::RawLogits`]).
    #[default]
    Softmax,
    /// 1 / (1 + e^-x) of each logit (DeepSeek-V3).
    Sigmoid,
    /// sqrt(ln(1 + e^x)) of each logit (DeepSeek-V4).
    SqrtSoftplus,
}

impl Scoring {
    /// The name in model configurations: `softmax`, `sigmoid` or `sqrtsoftplus`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
            Self::SqrtSoftplus => "sqrtsoftplus",
        }
    }
}

impl FromStr for Scoring {
    type Err = RouterError;

    fn from_str(name: &str) -> Result<Self, RouterError> {
        match name {
            "softmax" => Ok(Self::Softmax),
            "sigmoid" => Ok(Self::Sigmoid),
            "sqrtsoftplus" => Ok(Self::SqrtSoftplus),
            _ => Err(RouterError::unknown("scoring_func", name, "softmax, sigmoid, sqrtsoftplus")),
        }
    }
}

/// How experts are chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Selection {
    /// The `top_k` best scores (plus bias, if the router has one).
    #[default]
    TopK,
    /// The best experts of the best groups. A group's score is the maximum of its scores, or,
    /// with a correction bias, the sum of its two best biased scores (DeepSeek-V2 and V3).
    Grouped {
        /// Number of equal groups of consecutive experts.
        num_expert_group: usize,
        /// Groups kept per token.
        topk_group: usize,
    },
    /// The `top_k` largest logits; only the chosen ones are scored. With sigmoid this is Llama-4,
    /// with softmax gpt-oss.
    RawLogits,
    /// The ids come from a table indexed by token id (the first layers of DeepSeek-V4).
    Hash {
        /// Rows of the table.
        vocab_size: usize,
    },
    /// A function of the caller chooses and weighs ([`RoutingFunction`](crate::RoutingFunction)).
    Custom,
    /// A named strategy ignores the logits; for performance tests only.
    Simulated {
        /// Name of the strategy ([`Strategies`](crate::Strategies)).
        strategy: String,
        /// Seed of its random numbers.
        seed: u64,
    },
}

impl Selection {
    /// A name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::TopK => "top-k",
            Self::Grouped { .. } => "grouped",
            Self::RawLogits => "raw-logit",
            Self::Hash { .. } => "hash",
            Self::Custom => "custom",
            Self::Simulated { .. } => "simulated",
        }
    }
}

/// A routing method and its sizes.
///
/// ```
/// use moe_router::{RouterConfig, Scoring, Selection};
/// let deepseek_v3 = RouterConfig {
///     scoring: Scoring::Sigmoid,
///     selection: Selection::Grouped { num_expert_group: 8, topk_group: 4 },
///     correction_bias: true,
///     renormalize: true,
///     routed_scaling_factor: 2.5,
///     ..RouterConfig::new(256, 8)
/// };
/// assert!(deepseek_v3.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Routed experts E: the logical experts that have weights.
    pub num_experts: usize,
    /// Routed experts per token, without fused shared slots.
    pub top_k: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// How experts are chosen.
    pub selection: Selection,
    /// Select on score + bias. Weights still come from the unbiased scores.
    pub correction_bias: bool,
    /// The gate adds a bias to its logits (gpt-oss). It is held by the code that computes the logits, not by the
    /// router.
    pub gate_bias: bool,
    /// The gate's weight keeps its digits in f32, and the logits are computed from it in f32, whatever the dtype of the
    /// model (DeepSeek, GLM-4.5, ERNIE 4.5). As with `gate_bias`, the code that computes the logits does so.
    pub f32_gate: bool,
    /// Divide the chosen scores by their sum.
    pub renormalize: bool,
    /// Multiplies the weights of routed experts, after renormalising.
    pub routed_scaling_factor: f32,
    /// Replaces each logit x by cap * tanh(x / cap) before anything else.
    pub softcapping: Option<f32>,
    /// Identity experts: the router has `num_experts + num_zero_experts` logits, and a token that
    /// chooses one of the last ones adds `weight * hidden` to its output.
    pub num_zero_experts: usize,
    /// The number of shared experts that are packed after the routed ones: each token gets their ids `num_experts..` as
    /// its last slots, with a constant weight.
    pub num_fused_shared_experts: usize,
    /// The weight of the fused shared slots. Neither renormalised nor scaled.
    pub fused_shared_weight: f32,
    /// The hidden state is multiplied by the weight before dispatch, and combine uses weight 1.
    /// Only for one slot per token.
    pub apply_router_weight_on_input: bool,
}

impl RouterConfig {
    /// Plain top-k on softmax scores, not renormalised: change fields from there.
    pub fn new(num_experts: usize, top_k: usize) -> Self {
        Self {
            num_experts,
            top_k,
            scoring: Scoring::Softmax,
            selection: Selection::TopK,
            correction_bias: false,
            gate_bias: false,
            f32_gate: false,
            renormalize: false,
            routed_scaling_factor: 1.0,
            softcapping: None,
            num_zero_experts: 0,
            num_fused_shared_experts: 0,
            fused_shared_weight: 1.0,
            apply_router_weight_on_input: false,
        }
    }

    /// Width of the gate: routed and zero experts. 0 if the sum overflows.
    pub fn num_logits(&self) -> usize {
        self.num_experts.checked_add(self.num_zero_experts).unwrap_or(0)
    }

    /// Slots per token K: routed and fused shared. 0 if the sum overflows.
    pub fn num_slots(&self) -> usize {
        self.top_k.checked_add(self.num_fused_shared_experts).unwrap_or(0)
    }

    /// The groups of experts that limit a choice: how many there are, and how many of them a token keeps. `None` if
    /// every expert may be chosen, which is also the case if all groups are kept (Kimi K2 and GLM-4.5 have one group).
    pub fn limiting_groups(&self) -> Option<(usize, usize)> {
        match self.selection {
            Selection::Grouped { num_expert_group, topk_group } if topk_group < num_expert_group => {
                Some((num_expert_group, topk_group))
            }
            _ => None,
        }
    }

    /// The tag by which kernels with a built-in router know this method;
    /// [`RoutingMethod::Unspecified`] where no such kernel computes the same.
    ///
    /// Stricter than vLLM's `get_routing_method_type`, which ignores scale, groups without bias
    /// and shared slots: a kernel that is chosen by tag must not drop them.
    pub fn routing_method(&self) -> RoutingMethod {
        use RoutingMethod as M;
        let scaled = self.routed_scaling_factor != 1.0;
        match self.selection {
            Selection::Custom => return M::Custom,
            Selection::Simulated { .. } => return M::Simulated,
            Selection::Hash { .. } => return M::Unspecified,
            _ if self.softcapping.is_some()
                || self.num_zero_experts > 0
                || self.num_fused_shared_experts > 0 =>
            {
                return M::Unspecified;
            }
            Selection::RawLogits => {
                return match self.scoring {
                    Scoring::Sigmoid if self.top_k == 1 && !self.renormalize && !scaled => M::Llama4,
                    Scoring::Softmax if !scaled => M::Renormalize,
                    _ => M::Unspecified,
                };
            }
            Selection::TopK | Selection::Grouped { .. } => {}
        }
        let grouped = match self.selection {
            Selection::Grouped { num_expert_group, .. } => num_expert_group > 1,
            _ => false,
        };
        let by_groups = matches!(self.selection, Selection::Grouped { .. });
        match (self.scoring, self.correction_bias, self.renormalize) {
            (Scoring::Sigmoid, true, true) if by_groups => M::DeepSeekV3,
            _ if grouped => M::Unspecified,
            (Scoring::SqrtSoftplus, _, true) => M::DeepSeekV4,
            _ if scaled => M::Unspecified,
            (Scoring::Sigmoid, true, true) => M::MiniMax2,
            (Scoring::Sigmoid, false, true) => M::SigmoidRenorm,
            (Scoring::Sigmoid, false, false) => M::Sigmoid,
            (Scoring::Softmax, false, true) => M::RenormalizeNaive,
            (Scoring::Softmax, false, false) => M::Default,
            _ => M::Unspecified,
        }
    }
}
