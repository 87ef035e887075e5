//! The rules by which routers compute weights from logits, defined in f64.

use moe_kernels::{GateGroups, GateScoring};

/// How logits become weights.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    pub(super) scoring: GateScoring,
    pub(super) raw: bool,
    pub(super) renormalize: bool,
    /// Whether the gate has a bias.
    pub(super) has_gate_bias: bool,
    /// Whether the choice has a bias.
    pub(super) biased: bool,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// The groups of experts, for rules with groups.
    groups: Option<GateGroups>,
}

impl Rule {
    /// A softmax over all experts, with weights that add up to 1.
    const USUAL: Self = Self {
        scoring: GateScoring::Softmax,
        raw: false,
        renormalize: true,
        has_gate_bias: false,
        biased: false,
        scale: 1.0,
        softcap: None,
        groups: None,
    };

    /// A softmax over the chosen experts alone, whose gate has a bias.
    pub fn gpt_oss() -> Self {
        Self { raw: true, has_gate_bias: true, ..Self::USUAL }
    }

    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for scoring in [GateScoring::Softmax, GateScoring::Sigmoid, GateScoring::SqrtSoftplus] {
            let usual = Self { scoring, ..Self::USUAL };
            all.push(usual);
            all.push(Self { renormalize: false, has_gate_bias: true, biased: true, scale: 2.5, ..usual });
            all.push(Self { raw: true, ..usual });
            all.push(Self { softcap: Some(1.5), ..usual });
        }
        all.push(Self::gpt_oss());
        // DeepSeek-V2, DeepSeek-V3, and groups whose bounds are no multiples of a warp.
        let usual = all[0];
        let scoring = GateScoring::Sigmoid;
        let sigmoid = Self { scoring, has_gate_bias: true, biased: true, scale: 2.5, ..usual };
        let groups = |count, kept| Some(GateGroups { count, kept });
        all.push(Self { renormalize: false, scale: 16.0, groups: groups(8, 3), ..usual });
        all.push(Self { groups: groups(8, 4), ..sigmoid });
        all.push(Self { groups: groups(20, 7), ..sigmoid });
        all
    }

    /// The groups of `experts` experts; `None` if the rule has none, they do not divide the experts, or leave too few.
    pub fn groups_of(&self, experts: usize, top_k: usize) -> Option<GateGroups> {
        let divides = |groups: &GateGroups| {
            let size = experts / groups.count;
            experts.is_multiple_of(groups.count) && size >= 2 && groups.kept * size >= top_k
        };
        self.groups.filter(divides)
    }

    /// The keys of groups of `size` experts.
    pub fn group_keys(&self, keys: &[f64], size: usize) -> Vec<f64> {
        let of = |group: &[f64]| {
            let mut best = group.to_vec();
            best.sort_by(|a, b| b.total_cmp(a));
            if self.biased { best[0] + best[1] } else { best[0] }
        };
        keys.chunks(size).map(of).collect()
    }

    pub(super) fn score(&self, logits: &[f64]) -> Vec<f64> {
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - most).exp()).sum();
        let of = |x: &f64| match self.scoring {
            GateScoring::Softmax => (x - most).exp() / sum,
            GateScoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            GateScoring::SqrtSoftplus => x.exp().ln_1p().sqrt(),
        };
        logits.iter().map(of).collect()
    }

    /// The values that are compared for the choice, without its bias.
    pub fn values(&self, logits: &[f64]) -> Vec<f64> {
        let cap = |x: &f64| self.softcap.map_or(*x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
        let capped: Vec<f64> = logits.iter().map(cap).collect();
        if self.raw { capped } else { self.score(&capped) }
    }

    /// The weights of the chosen experts; 0 for no expert.
    pub fn weights(&self, values: &[f64], ids: &[u32]) -> Vec<f64> {
        let chosen: Vec<f64> = ids.iter().filter_map(|id| values.get(*id as usize)).copied().collect();
        let mut chosen = if self.raw { self.score(&chosen) } else { chosen };
        let sum = if self.renormalize { chosen.iter().sum::<f64>().max(1e-20) } else { 1.0 };
        chosen.iter_mut().for_each(|w| *w = *w / sum * f64::from(self.scale));
        let mut chosen = chosen.into_iter();
        let known = |id: &u32| (*id as usize) < values.len();
        ids.iter().map(|id| if known(id) { chosen.next().unwrap() } else { 0.0 }).collect()
    }
}
