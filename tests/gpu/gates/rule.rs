//! The rules by which routers make weights of logits, defined in f64.

use moe_kernels::GateScoring;

/// How logits become weights.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    pub(super) scoring: GateScoring,
    pub(super) raw: bool,
    pub(super) renormalize: bool,
    /// With a bias of the gate, and one of the choice.
    pub(super) biased: bool,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

impl Rule {
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for scoring in [GateScoring::Softmax, GateScoring::Sigmoid, GateScoring::SqrtSoftplus] {
            let usual =
                Self { scoring, raw: false, renormalize: true, biased: false, scale: 1.0, softcap: None };
            all.push(usual);
            all.push(Self { renormalize: false, biased: true, scale: 2.5, ..usual });
            all.push(Self { raw: true, ..usual });
            all.push(Self { softcap: Some(1.5), ..usual });
        }
        all
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

    /// What is compared for the choice, before its bias.
    pub fn values(&self, logits: &[f64]) -> Vec<f64> {
        let cap = |x: &f64| self.softcap.map_or(*x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
        let capped: Vec<f64> = logits.iter().map(cap).collect();
        if self.raw { capped } else { self.score(&capped) }
    }

    /// The weights of chosen experts, 0 for none.
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
