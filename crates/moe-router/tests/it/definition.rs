//! The definition of every scored method in f64, with explicit formulas and full sorts.

use std::cmp::Ordering;

use moe_router::{RouterConfig, Scoring, Selection};

/// The order of keys that differ by less than this may be different in f32, unless they are sums of the same numbers.
const MARGIN: f64 = 1e-5;

/// A row that was routed by the definition.
pub struct Row {
    /// Chosen ids in order, zero experts included.
    pub ids: Vec<u32>,
    /// Their weights.
    pub weights: Vec<f64>,
    /// Whether every comparison that decided the choice was a tie in any arithmetic or had a clear gap.
    pub clear: bool,
}

/// An expert or a group, and by what it is ordered.
#[derive(Clone, Debug)]
struct Ranked {
    id: u32,
    key: f64,
    /// The logits and biases that the key is made of.
    parts: Vec<(f64, f64)>,
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

fn descending(a: &Ranked, b: &Ranked) -> Ordering {
    b.key.partial_cmp(&a.key).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Returns ids in descending order of key, with ties to the lower id, and whether the first `k` are clear.
fn sorted(mut keys: Vec<Ranked>, k: usize) -> (Vec<u32>, bool) {
    keys.sort_by(descending);
    // The difference of equal infinities is no number, and they are a tie in any arithmetic.
    let is_near = |a: &Ranked, b: &Ranked| a.key - b.key < MARGIN;
    let is_clear = |i: usize| {
        let mut near = keys[i + 1..].iter().take_while(|other| is_near(&keys[i], other));
        near.all(|other| other.parts == keys[i].parts)
    };
    let clear = (0..keys.len().min(k)).all(is_clear);
    (keys.into_iter().map(|ranked| ranked.id).collect(), clear)
}

/// Routes one row of logits.
pub fn route(config: &RouterConfig, bias: Option<&[f32]>, logits: &[f32]) -> Row {
    let capped = |x: f64| config.softcapping.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh());
    let logits: Vec<f64> = logits.iter().map(|&x| capped(f64::from(x))).collect();
    let raw = config.selection == Selection::RawLogits;
    let scores = if raw { logits.clone() } else { score(config.scoring, &logits) };
    let bias = |i: usize| bias.map_or(0.0, |b| f64::from(b[i]));
    let expert =
        |i: usize| Ranked { id: i as u32, key: scores[i] + bias(i), parts: vec![(logits[i], bias(i))] };

    let mut clear = true;
    let mut candidates: Vec<Ranked> = (0..scores.len()).map(expert).collect();
    if let Selection::Grouped { num_expert_group, topk_group } = config.selection {
        let size = scores.len() / num_expert_group;
        let group = |g: usize| {
            let mut members: Vec<Ranked> = (g * size..(g + 1) * size).map(expert).collect();
            members.sort_by(descending);
            members.truncate(if config.correction_bias { 2 } else { 1 });
            let key = members.iter().map(|member| member.key).sum();
            Ranked { id: g as u32, key, parts: members.into_iter().flat_map(|member| member.parts).collect() }
        };
        let (order, groups_clear) = sorted((0..num_expert_group).map(group).collect(), topk_group);
        clear &= groups_clear;
        candidates.retain(|expert| order[..topk_group].contains(&(expert.id / size as u32)));
    }
    let (mut ids, ids_clear) = sorted(candidates, config.top_k);
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
