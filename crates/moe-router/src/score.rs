//! Logits to scores, and chosen scores to weights: the arithmetic of one token row.

use moe_kernels::NO_EXPERT;

use crate::config::{RouterConfig, Scoring, Selection};
use crate::math;

/// The smallest sum of scores by which weights are divided, so that scores that are all zero give zero weights.
/// DeepSeek's formula has sum + 1e-20, which is the same f32 for every sum above 1e-12.
const MIN_SUM: f32 = 1e-20;

impl Scoring {
    /// Replaces the row's logits by scores.
    ///
    /// Softmax sums in the fixed order of [`math::row_sum`], so a row's scores depend on nothing
    /// but its logits.
    pub(crate) fn apply(self, row: &mut [f32]) {
        match self {
            Self::Softmax => {
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if max == f32::NEG_INFINITY {
                    // Only forced ids can choose nothing but -inf.
                    return row.fill(0.0);
                }
                for x in row.iter_mut() {
                    *x = math::exp(*x - max);
                }
                let sum = math::row_sum(row);
                row.iter_mut().for_each(|x| *x /= sum);
            }
            Self::Sigmoid => row.iter_mut().for_each(|x| *x = math::sigmoid(*x)),
            Self::SqrtSoftplus => row.iter_mut().for_each(|x| *x = math::sqrt_softplus(*x)),
        }
    }
}

/// The first fault that makes a row of logits meaningless, if any: NaN, +infinity (its softmax
/// is NaN), or nothing above -infinity. Single -infinity logits are fine: they score 0, or what
/// -cap scores under soft-capping.
pub(crate) fn logits_fault(row: &[f32]) -> Option<String> {
    let mut largest = f32::NEG_INFINITY;
    for (expert, &x) in row.iter().enumerate() {
        if x.is_nan() || x == f32::INFINITY {
            return Some(format!("the logit of expert {expert} is {x}"));
        }
        largest = largest.max(x);
    }
    (largest == f32::NEG_INFINITY).then(|| "every logit is -inf".to_owned())
}

/// Fills `scores` with the values by which experts are chosen and weighed: the scores, or for [`Selection::RawLogits`]
/// the (capped) logits.
pub(crate) fn score_row(config: &RouterConfig, logits: &[f32], scores: &mut [f32]) {
    match config.softcapping {
        Some(cap) => {
            for (s, x) in scores.iter_mut().zip(logits) {
                *s = cap * math::tanh(x / cap);
            }
        }
        None => scores.copy_from_slice(logits),
    }
    if config.selection != Selection::RawLogits {
        config.scoring.apply(scores);
    }
}

/// The weights of the chosen ids: gather, score (raw logits only), renormalise, scale.
///
/// `scores` comes from [`score_row`]. A slot without an expert gets weight 0 and takes no part in
/// the sums, which run over k ascending.
pub(crate) fn weigh_row(config: &RouterConfig, scores: &[f32], topk_ids: &[u32], topk_weights: &mut [f32]) {
    let raw = config.selection == Selection::RawLogits;
    let absent = if raw { f32::NEG_INFINITY } else { 0.0 };
    for (w, &id) in topk_weights.iter_mut().zip(topk_ids) {
        *w = scores.get(id as usize).copied().unwrap_or(absent);
    }
    if raw {
        config.scoring.apply(topk_weights);
    }
    if config.renormalize {
        let sum = topk_weights.iter().sum::<f32>().max(MIN_SUM);
        topk_weights.iter_mut().for_each(|w| *w /= sum);
    }
    if config.routed_scaling_factor != 1.0 {
        topk_weights.iter_mut().for_each(|w| *w *= config.routed_scaling_factor);
    }
}

/// Returns the fault of a row of chosen ids, if it has one: an id at or above `limit`, or an id that occurs twice.
/// [`NO_EXPERT`] may repeat.
pub(crate) fn ids_fault(ids: &[u32], limit: usize) -> Option<String> {
    for (k, &id) in ids.iter().enumerate() {
        if id == NO_EXPERT {
            continue;
        }
        if id as usize >= limit {
            return Some(format!("expert id {id} is out of range, the router chooses among {limit} experts"));
        }
        if ids[..k].contains(&id) {
            return Some(format!("expert id {id} occurs twice"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_sums_to_one_and_keeps_masked_experts_at_zero() {
        let mut row = [1.5, f32::NEG_INFINITY, -0.25, 1.5, -300.0];
        Scoring::Softmax.apply(&mut row);
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{row:?}");
        assert_eq!((row[1], row[4]), (0.0, 0.0));
        assert_eq!(row[0], row[3]);
    }

    #[test]
    fn softmax_of_nothing_is_zero() {
        let config = RouterConfig { selection: Selection::RawLogits, ..RouterConfig::new(2, 1) };
        let mut weights = [f32::NAN];
        weigh_row(&config, &[f32::NEG_INFINITY, 1.0], &[0], &mut weights);
        assert_eq!(weights, [0.0]);
    }

    #[test]
    fn faults_name_the_expert() {
        let fault = |row: &[f32]| logits_fault(row).unwrap_or_default();
        assert_eq!(fault(&[0.0, f32::NAN]), "the logit of expert 1 is NaN");
        assert_eq!(fault(&[f32::INFINITY, 0.0]), "the logit of expert 0 is inf");
        assert_eq!(fault(&[f32::NEG_INFINITY; 3]), "every logit is -inf");
        assert_eq!(fault(&[f32::NEG_INFINITY, 0.0]), "");
        let fault = |ids: &[u32]| ids_fault(ids, 4).unwrap_or_default();
        assert_eq!(fault(&[1, 4]), "expert id 4 is out of range, the router chooses among 4 experts");
        assert_eq!(fault(&[3, 1, 3]), "expert id 3 occurs twice");
        assert_eq!(fault(&[NO_EXPERT, 1, NO_EXPERT]), "");
    }

    #[test]
    fn all_zero_scores_give_zero_weights() {
        let config = RouterConfig { renormalize: true, ..RouterConfig::new(4, 2) };
        let mut weights = [f32::NAN; 2];
        weigh_row(&config, &[0.0; 4], &[1, 2], &mut weights);
        assert_eq!(weights, [0.0, 0.0]);
    }

    #[test]
    fn softcapping_bounds_logits() {
        let config = RouterConfig { softcapping: Some(2.0), ..RouterConfig::new(2, 1) };
        let config = RouterConfig { selection: Selection::RawLogits, ..config };
        let mut scores = [0.0; 2];
        score_row(&config, &[1000.0, -1.0], &mut scores);
        assert_eq!(scores[0], 2.0);
        assert!((f64::from(scores[1]) + 2.0 * 0.5f64.tanh()).abs() < 1e-6);
    }
}
