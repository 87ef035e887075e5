//! The rules for a [`RouterConfig`], which are checked before anything is allocated.

use crate::config::{RouterConfig, Selection};
use crate::error::{RouterError, refuse};

/// Expert maps hold local slots as i32, so ids stay below this.
const MAX_EXPERTS: usize = i32::MAX as usize;

/// What messages call the counts of experts: the fields of [`RouterConfig`], or the keys that gave them.
pub(crate) struct CountNames {
    pub num_experts: &'static str,
    pub top_k: String,
}

impl RouterConfig {
    /// Checks the configuration.
    ///
    /// # Errors
    ///
    /// A [`RouterError`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), RouterError> {
        self.validate_as(&CountNames { num_experts: "num_experts", top_k: "top_k".to_string() })
    }

    /// [`validate`](Self::validate) with names for messages.
    pub(crate) fn validate_as(&self, names: &CountNames) -> Result<(), RouterError> {
        self.validate_counts(names)?;
        self.validate_numbers()?;
        self.validate_selection(names)?;
        if self.num_zero_experts > 0 && !(self.selection == Selection::TopK && self.correction_bias) {
            refuse!(
                Contradiction,
                "{} zero experts need plain top-k selection with a correction bias, got {} selection with \
                 correction_bias = {}",
                self.num_zero_experts,
                self.selection.name(),
                self.correction_bias
            )
        }
        if self.apply_router_weight_on_input && self.num_slots() != 1 {
            refuse!(
                Contradiction,
                "apply_router_weight_on_input is only implemented for top_k = 1, got {} slots per token ({} routed, {} \
                 fused shared)",
                self.num_slots(),
                self.top_k,
                self.num_fused_shared_experts
            )
        }
        Ok(())
    }

    fn validate_counts(&self, names: &CountNames) -> Result<(), RouterError> {
        not_zero(names.num_experts, self.num_experts)?;
        not_zero("top_k", self.top_k)?;
        let total = self.num_experts.checked_add(self.num_zero_experts);
        let total = total.and_then(|n| n.checked_add(self.num_fused_shared_experts));
        if total.is_none_or(|n| n > MAX_EXPERTS) {
            refuse!(
                Unsupported,
                "{} experts, {} zero experts and {} fused shared experts are more than the {MAX_EXPERTS} that expert \
                 ids can name",
                self.num_experts,
                self.num_zero_experts,
                self.num_fused_shared_experts
            )
        }
        if self.top_k > self.num_logits() {
            refuse!(
                Contradiction,
                "{} = {} exceeds the {} experts of the router",
                names.top_k,
                self.top_k,
                self.num_logits()
            )
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), RouterError> {
        let scale = Some(self.routed_scaling_factor);
        for (name, value) in [("routed_scaling_factor", scale), ("softcapping", self.softcapping)] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(range(name, "finite and above 0", value));
            }
        }
        if !self.fused_shared_weight.is_finite() {
            return Err(range("fused_shared_weight", "finite", self.fused_shared_weight));
        }
        Ok(())
    }

    fn validate_selection(&self, names: &CountNames) -> Result<(), RouterError> {
        match self.selection {
            Selection::TopK => Ok(()),
            Selection::Grouped { num_expert_group, topk_group } => {
                self.validate_groups(num_expert_group, topk_group, names)
            }
            Selection::Hash { vocab_size: 0 } => not_zero("vocab_size", 0),
            _ if self.correction_bias => refuse!(
                Contradiction,
                "a correction bias has no effect on {} selection; remove one of the two",
                self.selection.name()
            ),
            _ => Ok(()),
        }
    }

    fn validate_groups(
        &self,
        num_expert_group: usize,
        topk_group: usize,
        names: &CountNames,
    ) -> Result<(), RouterError> {
        not_zero("num_expert_group", num_expert_group)?;
        not_zero("topk_group", topk_group)?;
        if !self.num_experts.is_multiple_of(num_expert_group) {
            refuse!(
                Contradiction,
                "{} experts do not divide into {num_expert_group} groups",
                self.num_experts
            )
        }
        if topk_group > num_expert_group {
            refuse!(Contradiction, "topk_group = {topk_group} exceeds num_expert_group = {num_expert_group}")
        }
        let experts_per_group = self.num_experts / num_expert_group;
        // The product is at most num_expert_group * experts_per_group, which is at most num_experts.
        let left = topk_group * experts_per_group;
        if self.top_k > left {
            refuse!(
                Contradiction,
                "{} = {} exceeds the {left} experts that {topk_group} groups of {experts_per_group} leave",
                names.top_k,
                self.top_k
            )
        }
        if self.correction_bias && experts_per_group < 2 {
            refuse!(
                Contradiction,
                "with a correction bias a group is scored by its two best experts, so each of the {num_expert_group} \
                 groups needs at least 2 experts, got {experts_per_group}"
            )
        }
        Ok(())
    }
}

pub(crate) fn not_zero(name: &'static str, value: usize) -> Result<(), RouterError> {
    if value == 0 {
        return Err(range(name, "at least 1", value));
    }
    Ok(())
}

fn range(setting: &'static str, expected: &'static str, got: impl ToString) -> RouterError {
    RouterError::Range { setting, expected, got: got.to_string() }
}
