//! FlashLB's tree search: joint allotment and placement with look-ahead.
//!
//! Experts are sorted by risk (mean plus `z` standard deviations over the episodes) and cut into
//! `depth` bands. Band by band the search tries `width` budgets of extra copies on either side of
//! the one a plain allotment suggests; each trial is completed by plain allotment of the rest and a
//! full greedy placement, and scored by the mean peak over the episodes. Unlike the published code,
//! copies are capped at the device count, and a copy without a legal device displaces another.

use super::{Layout, Policy, Task};
use crate::error::{Error, Result, expect_share};
use crate::loads::sum_steps;
use crate::matching::keep_in_place;
use crate::pack::Table;
use crate::score::Objective;

/// The tree search of FlashLB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashLb {
    /// Whether to see the episodes or only their sum.
    pub objective: Objective,
    /// Bands of experts, decided one after another; 1 is plain allotment and placement.
    pub depth: usize,
    /// Budgets tried on either side of the first guess.
    pub width: usize,
    /// Standard deviations added to a mean, finite and at least 0 (0.674: the load stays below it three times in four).
    pub z_score: f64,
}

impl Default for FlashLb {
    fn default() -> Self {
        Self { objective: Objective::Episode, depth: 4, width: 8, z_score: 0.674 }
    }
}

/// Longer windows are summed in buckets to about this many stages.
const MAX_STAGES: usize = 64;

impl Policy for FlashLb {
    fn name(&self) -> &'static str {
        "flashlb"
    }

    fn objective(&self) -> Objective {
        self.objective
    }

    fn place(&self, task: &Task) -> Result<Layout> {
        task.check()?;
        expect_share("z_score", self.z_score)?;
        if self.depth == 0 {
            return Err(Error::Setting { what: "depth", must: "at least 1" });
        }
        let topology = task.topology;
        let experts = topology.experts();
        let k = topology.slots_per_device();
        let stages = match self.objective {
            Objective::Aggregate => sum_steps(task.loads, experts),
            Objective::Episode => {
                let bucket = (task.loads.len() / experts).div_ceil(MAX_STAGES) * experts;
                task.loads.chunks(bucket).flat_map(|b| sum_steps(b, experts)).collect()
            }
        };
        let mut tree = Tree::new(stages, experts, topology.devices(), k, self.z_score);
        let copies = tree.allot(topology.redundant(), self.depth, self.width);
        let mut slots: Vec<u32> = tree.place(&copies).into_iter().map(u32::from).collect();
        if let Some(current) = task.valid_current() {
            slots = keep_in_place(current, &slots, experts, k);
        }
        Ok(Layout { slots, exhaustive: false, steps: tree.steps })
    }
}

/// Statistics of one layer and the search over it.
struct Tree {
    /// `[stages, experts]`.
    loads: Vec<f64>,
    experts: usize,
    devices: usize,
    k: usize,
    z_score: f64,
    mean: Vec<f64>,
    /// Mean plus `z_score` standard deviations.
    risk: Vec<f64>,
    /// Deviations from the mean `[experts, stages]`, scaled so that a sum of squares is a variance.
    deviation: Vec<f64>,
    steps: u64,
}

impl Tree {
    fn new(loads: Vec<f64>, experts: usize, devices: usize, k: usize, z_score: f64) -> Self {
        let stages = loads.len() / experts;
        let scale = if stages > 1 { 1.0 / ((stages - 1) as f64).sqrt() } else { 0.0 };
        let mut mean = sum_steps(&loads, experts);
        mean.iter_mut().for_each(|m| *m /= stages as f64);
        let mut deviation = Vec::with_capacity(loads.len());
        let mut risk = Vec::with_capacity(experts);
        for e in 0..experts {
            let of_expert = loads.iter().skip(e).step_by(experts);
            deviation.extend(of_expert.map(|v| (v - mean[e]) * scale));
            let variance: f64 = deviation[e * stages..].iter().map(|d| d * d).sum();
            risk.push(mean[e] + z_score * variance.sqrt());
        }
        Self { loads, experts, devices, k, z_score, mean, risk, deviation, steps: 0 }
    }

    /// The search: copies of every expert with `spare` slots beyond one each.
    fn allot(&mut self, spare: usize, depth: usize, width: usize) -> Vec<u16> {
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|&a, &b| self.risk[b].total_cmp(&self.risk[a]).then(a.cmp(&b)));
        let band = self.experts.div_ceil(depth);
        let mut copies = vec![1u16; self.experts];
        let mut spare = spare;
        let mut rest = &order[..];
        for _ in 1..depth {
            if rest.len() <= band || spare == 0 {
                break;
            }
            let (now, later) = rest.split_at(band);
            let grants_now = self.grants(now, spare);
            let grants_later = self.grants(later, spare);
            let joint = self.grants(rest, spare);
            let guess = joint.iter().filter(|e| now.contains(e)).count();
            // Each side must be able to use the copies that the other side leaves.
            let low = spare - grants_later.len().min(spare);
            let high = grants_now.len();
            let taken = search_around(guess.clamp(low, high), low, high, width, |budget| {
                let mut trial = copies.clone();
                grant(&mut trial, &grants_now[..budget]);
                grant(&mut trial, &grants_later[..spare - budget]);
                let slots = self.place(&trial);
                self.score(&trial, &slots)
            });
            grant(&mut copies, &grants_now[..taken]);
            spare -= taken;
            rest = later;
        }
        let last = self.grants(rest, spare);
        grant(&mut copies, &last);
        copies
    }

    /// The experts that get the 1st, 2nd, .. extra copy among `members`: always the one with the largest risk per copy,
    /// up to one copy per device. The list is shorter than `spare` if all members reach that limit.
    fn grants(&self, members: &[usize], spare: usize) -> Vec<usize> {
        let mut copies = vec![1usize; members.len()];
        let mut order = Vec::with_capacity(spare);
        for _ in 0..spare {
            let mut top: Option<(usize, f64)> = None;
            for (i, &e) in members.iter().enumerate() {
                let value = self.risk[e] / copies[i] as f64;
                if copies[i] < self.devices && top.is_none_or(|(_, best)| value > best) {
                    top = Some((i, value));
                }
            }
            let Some((i, _)) = top else { break };
            copies[i] += 1;
            order.push(members[i]);
        }
        order
    }

    /// Greedy placement: largest mean per copy first, onto the device of least risk.
    fn place(&mut self, copies: &[u16]) -> Vec<u16> {
        let stages = self.loads.len() / self.experts;
        let share: Vec<f64> = copies.iter().map(|&c| 1.0 / f64::from(c)).collect();
        let mut order: Vec<usize> = (0..self.experts).collect();
        let unit = |e: usize| self.mean[e] * share[e];
        order.sort_by(|&a, &b| unit(b).total_cmp(&unit(a)).then(a.cmp(&b)));
        let mut table = Table::new(self.devices, self.k);
        let mut mean = vec![0.0; self.devices];
        let mut deviation = vec![0.0; self.devices * stages];
        let deviation_of = |e: usize| &self.deviation[e * stages..][..stages];
        for e in order {
            for _ in 0..copies[e] {
                let mut best: Option<(usize, f64)> = None;
                for d in (0..table.devices()).filter(|&d| table.has_room(d)) {
                    let pairs = deviation[d * stages..][..stages].iter().zip(deviation_of(e));
                    let square = |v: f64| v * v;
                    let variance: f64 = pairs.map(|(a, b)| square(a + b * share[e])).sum();
                    let risk = mean[d] + unit(e) + self.z_score * variance.sqrt();
                    if best.is_none_or(|(_, least)| risk < least) && !table.holds(d, e) {
                        best = Some((d, risk));
                    }
                }
                self.steps += 1;
                let mut change = |d: usize, e: usize, sign: f64| {
                    mean[d] += sign * unit(e);
                    let pairs = deviation[d * stages..][..stages].iter_mut().zip(deviation_of(e));
                    pairs.for_each(|(a, b)| *a += sign * b * share[e]);
                };
                if let Some((d, _)) = best {
                    table.push(d, e);
                    change(d, e, 1.0);
                } else if let Some((room, full, passed)) = table.displace(e) {
                    change(full, passed, -1.0);
                    change(full, e, 1.0);
                    change(room, passed, 1.0);
                }
            }
        }
        table.into_slots()
    }

    /// Mean over stages of peak over mean. Both have a small constant added, so that empty stages count as 1.
    fn score(&self, copies: &[u16], slots: &[u16]) -> f64 {
        const HAIR: f64 = 1e-2;
        let stages = self.loads.len() / self.experts;
        let of_stage = |stage: &[f64]| {
            let unit = |&e: &u16| stage[usize::from(e)] / f64::from(copies[usize::from(e)]);
            let device_load = |row: &[u16]| row.iter().map(unit).sum::<f64>();
            let peak = slots.chunks_exact(self.k).map(device_load).fold(0.0, f64::max);
            (peak * self.devices as f64 + HAIR) / (stage.iter().sum::<f64>() + HAIR)
        };
        self.loads.chunks_exact(self.experts).map(of_stage).sum::<f64>() / stages as f64
    }
}

fn grant(copies: &mut [u16], experts: &[usize]) {
    experts.iter().for_each(|&e| copies[e] += 1);
}

/// The best budget within `width` of `guess` and inside `low..=high`; nearer ones win ties.
fn search_around(
    guess: usize,
    low: usize,
    high: usize,
    width: usize,
    mut score: impl FnMut(usize) -> f64,
) -> usize {
    let mut best = (guess, score(guess));
    let mut offer = |budget: usize| {
        let score = score(budget);
        if score < best.1 {
            best = (budget, score);
        }
    };
    // Budgets outside of the range are not tried, however wide the search is.
    for distance in 1..=width.min(high - low) {
        if guess >= low + distance {
            offer(guess - distance);
        }
        if guess + distance <= high {
            offer(guess + distance);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    /// The published example at three depths, as measured on the published code.
    #[test]
    fn published_example() {
        let loads = [600., 560., 120., 120., 20., 10., 10., 10.];
        let topology = Topology::new(8, 16, 8).unwrap();
        for (depth, copies, peak) in [
            (2, [3, 3, 1, 1, 3, 2, 2, 1], 205.0),
            (3, [4, 3, 1, 4, 1, 1, 1, 1], 590.0 / 3.0),
            (4, [4, 4, 2, 2, 1, 1, 1, 1], 200.0),
        ] {
            let policy = FlashLb { depth, ..FlashLb::default() };
            let task = Task::new(&topology, &loads, None, Objective::Episode);
            let layout = policy.place(&task).unwrap();
            let count = |e| layout.slots.iter().filter(|&&s| s == e).count();
            assert_eq!((0..8).map(count).collect::<Vec<_>>(), copies, "depth {depth}");
            let par = crate::score::known_par(&loads, &layout.slots, 8, 8, Objective::Episode);
            assert!((par * 181.25 - peak).abs() < 1e-9, "depth {depth}: {}", par * 181.25);
        }
    }

    /// Cases in which the published code reads out of bounds: a very hot expert, and equal loads.
    #[test]
    fn copies_are_capped_at_the_devices() {
        let mut hot = [1.0; 8];
        hot[0] = 1000.0;
        for (loads, experts, slots, devices) in [(&hot[..], 8, 12, 4), (&[50.0; 8][..], 8, 16, 4)] {
            let topology = Topology::new(experts, slots, devices).unwrap();
            for depth in 1..=4 {
                let policy = FlashLb { depth, ..FlashLb::default() };
                let task = Task::new(&topology, loads, None, Objective::Episode);
                let layout = policy.place(&task).unwrap();
                assert!(crate::placement::check_layer(0, &layout.slots, experts, slots / devices).is_ok());
            }
        }
    }
}
