//! The rules that a [`RouterConfig`] must keep, checked before anything is allocated.

use crate::config::{RouterConfig, Selection};
use crate::error::RouterError;

/// Expert maps hold local slots as i32, so ids stay below this.
const MAX_EXPERTS: usize = i32::MAX as usize;

impl RouterConfig {
    /// Checks the configuration.
    ///
    /// # Errors
    ///
    /// One [`RouterError`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), RouterError> {
        self.validate_counts()?;
        self.validate_numbers()?;
        self.validate_selection()?;
        if self.num_zero_experts > 0 && !(self.selection == Selection::TopK && self.correction_bias) {
            return Err(RouterError::ZeroExpertsNeedBias {
                num_zero_experts: self.num_zero_experts,
                selection: self.selection.name(),
                correction_bias: self.correction_bias,
            });
        }
        if self.apply_router_weight_on_input && self.num_slots() != 1 {
            return Err(RouterError::WeightOnInput {
                slots: self.num_slots(),
                top_k: self.top_k,
                num_fused_shared_experts: self.num_fused_shared_experts,
            });
        }
        Ok(())
    }

    fn validate_counts(&self) -> Result<(), RouterError> {
        for (name, value) in [("num_experts", self.num_experts), ("num_experts_per_tok", self.top_k)] {
            if value == 0 {
                return Err(RouterError::Zero { name });
            }
        }
        let total = self.num_experts.checked_add(self.num_zero_experts);
        let total = total.and_then(|n| n.checked_add(self.num_fused_shared_experts));
        if total.is_none_or(|n| n > MAX_EXPERTS) {
            return Err(RouterError::TooManyExperts {
                num_experts: self.num_experts,
                num_zero_experts: self.num_zero_experts,
                num_fused_shared_experts: self.num_fused_shared_experts,
                max: MAX_EXPERTS,
            });
        }
        if self.top_k > self.num_logits() {
            return Err(RouterError::TopKTooLarge { top_k: self.top_k, available: self.num_logits() });
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), RouterError> {
        let positive = |name, value: f32| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(RouterError::BadNumber { name, expected: "finite and above 0", value })
        };
        positive("routed_scaling_factor", self.routed_scaling_factor)?;
        if let Some(cap) = self.softcapping {
            positive("softcapping", cap)?;
        }
        if !self.fused_shared_weight.is_finite() {
            let (name, value) = ("fused_shared_weight", self.fused_shared_weight);
            return Err(RouterError::BadNumber { name, expected: "finite", value });
        }
        Ok(())
    }

    fn validate_selection(&self) -> Result<(), RouterError> {
        match self.selection {
            Selection::TopK => Ok(()),
            Selection::Grouped { num_expert_group, topk_group } => {
                self.validate_groups(num_expert_group, topk_group)
            }
            Selection::Hash { vocab_size: 0 } => Err(RouterError::Zero { name: "vocab_size" }),
            _ if self.correction_bias => {
                Err(RouterError::BiasWithoutEffect { selection: self.selection.name() })
            }
            _ => Ok(()),
        }
    }

    fn validate_groups(&self, num_expert_group: usize, topk_group: usize) -> Result<(), RouterError> {
        for (name, value) in [("num_expert_group", num_expert_group), ("topk_group", topk_group)] {
            if value == 0 {
                return Err(RouterError::Zero { name });
            }
        }
        if !self.num_experts.is_multiple_of(num_expert_group) {
            let num_experts = self.num_experts;
            return Err(RouterError::ExpertsNotDivisible { num_experts, num_expert_group });
        }
        if topk_group > num_expert_group {
            return Err(RouterError::TopkGroupTooLarge { topk_group, num_expert_group });
        }
        let experts_per_group = self.num_experts / num_expert_group;
        // Both factors are at most num_experts' own, so the product cannot overflow.
        let left = topk_group * experts_per_group;
        if self.top_k > left {
            let top_k = self.top_k;
            return Err(RouterError::TopKExceedsGroups { top_k, left, topk_group, experts_per_group });
        }
        if self.correction_bias && experts_per_group < 2 {
            return Err(RouterError::GroupTooSmall { num_expert_group, experts_per_group });
        }
        Ok(())
    }
}
