//! The definition of every scored method in f64, with explicit formulas and full sorts.

use std::cmp::Ordering;

use moe_router::{RouterConfig, Scoring, Selection};

/// The order of keys that differ by less than this, but are not equal, may be different in f32.
const MARGIN: f64 = 1e-5;

/// A row that was routed by the definition.
pub struct Row {
    /// Chosen ids in order, zero experts included.
    pub ids: Vec<u32>,
    /// Their weights.
    pub weights: Vec<f64>,
    /// Whether every comparison that decided the choice was an exact tie or had a clear gap.
    pub clear: bool,
}

fn score(scoring: Scoring, row: &[f64]) -> Vec<f64> {
    match scoring {
        Scoring::Softmax => {
            let total: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / total).collect()
        }
        Scoring::Sigmoid => row.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scoring::SqrtSoftplus => row.iter().map(|x| x.exp().ln_1p().sqrt()).collect(),
        other => panic!("no definition of {other:?} here"),
    }
}

/// Returns ids in descending order of key, with ties to the lower id, and whether the first `k` are clear.
fn sorted(keys: &[(u32, f64)], k: usize) -> (Vec<u32>, bool) {
    let mut keys = keys.to_vec();
    keys.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0)));
    let near = |pair: &[(u32, f64)]| pair[0].1 != pair[1].1 && pair[0].1 - pair[1].1 < MARGIN;
    let clear = !keys[..keys.len().min(k + 1)].windows(2).any(near);
    (keys.into_iter().map(|(id, _)| id).collect(), clear)
}

/// Routes one row of logits.
pub fn route(config: &RouterConfig, bias: Option<&[f32]>, logits: &[f32]) -> Row {
    let capped = |x: f64| config.softcapping.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh());
    let logits: Vec<f64> = logits.iter().map(|&x| capped(f64::from(x))).collect();
    let raw = config.selection == Selection::RawLogits;
    let scores = if raw { logits } else { score(config.scoring, &logits) };
    let key = |i: usize| scores[i] + bias.map_or(0.0, |b| f64::from(b[i]));

    let mut clear = true;
    let mut candidates: Vec<(u32, f64)> = (0..scores.len()).map(|i| (i as u32, key(i))).collect();
    if let Selection::Grouped { num_expert_group, topk_group } = config.selection {
        let size = scores.len() / num_expert_group;
        let group_score = |g: usize| {
            let mut members: Vec<f64> = (g * size..(g + 1) * size).map(key).collect();
            members.sort_by(|a, b| b.total_cmp(a));
            if bias.is_some() { members[0] + members[1] } else { members[0] }
        };
        let groups: Vec<(u32, f64)> = (0..num_expert_group).map(|g| (g as u32, group_score(g))).collect();
        let (order, groups_clear) = sorted(&groups, topk_group);
        clear &= groups_clear;
        candidates.retain(|(id, _)| order[..topk_group].contains(&(id / size as u32)));
    }
    let (mut ids, ids_clear) = sorted(&candidates, config.top_k);
    ids.truncate(config.top_k);
    let weights = weigh(config, &scores, &ids);
    Row { ids, weights, clear: clear && ids_clear }
}

/// Returns the weights of given ids. For raw-logit selection `scores` are the logits.
fn weigh(config: &RouterConfig, scores: &[f64], ids: &[u32]) -> Vec<f64> {
    let mut weights: Vec<f64> = ids.iter().map(|&i| scores[i as usize]).collect();
    if config.selection == Selection::RawLogits {
        weights = score(config.scoring, &weights);
    }
    if config.renormalize {
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w = if sum > 0.0 { *w / sum } else { 0.0 });
    }
    weights.into_iter().map(|w| w * f64::from(config.routed_scaling_factor)).collect()
}

/// The weights that the method gives to forced ids.
pub fn weights_at(config: &RouterConfig, logits: &[f32], ids: &[u32]) -> Vec<f64> {
    let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let raw = config.selection == Selection::RawLogits;
    let scores = if raw { logits } else { score(config.scoring, &logits) };
    weigh(config, &scores, ids)
}

/// Fails unless f32 weights agree with the definition.
pub fn assert_weights(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (k, (&g, &w)) in got.iter().zip(want).enumerate() {
        let bound = 4e-6 * w.abs() + 1e-12;
        assert!((f64::from(g) - w).abs() <= bound, "slot {k}: got {g}, want {w} of {want:?}");
    }
}
