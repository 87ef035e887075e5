//! An incremental policy in the style of ascend's SwiftBalance: few moves from the current placement.
//!
//! Only the experts in redundant slots are chosen anew. Then experts are exchanged between the most loaded device and
//! others as long as an exchange gains at least one percent. Each ordered pair of devices carries at most one transfer
//! per call. It needs few moves, and the balance is moderate.

use super::{Layout, Policy, Task};
use crate::error::{Error, Result};
use crate::loads::sum_steps;
use crate::matching::keep_slots;
use crate::score::Objective;

/// Keeps the current placement and improves it by few transfers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Swift {
    /// Exchanges per layer and call.
    pub max_swaps: usize,
    /// Least relative gain in the hotter device's load for an exchange: at least 0, below 1.
    pub min_gain: f64,
}

impl Default for Swift {
    fn default() -> Self {
        Self { max_swaps: 100, min_gain: 0.01 }
    }
}

impl Policy for Swift {
    fn name(&self) -> &'static str {
        "swift"
    }

    fn objective(&self) -> Objective {
        Objective::Aggregate
    }

    /// Starts from the usual initial layout if there is no valid current one.
    fn place(&self, task: &Task) -> Result<Layout> {
        task.check()?;
        if !(0.0..1.0).contains(&self.min_gain) {
            return Err(Error::Setting { what: "min_gain", must: "at least 0 and below 1" });
        }
        let topology = task.topology;
        let experts = topology.experts();
        let k = topology.slots_per_device();
        let valid = task.valid_current();
        let start = match valid {
            Some(current) => current.to_vec(),
            None => (0..topology.slots()).map(|s| (s % experts) as u32).collect(),
        };
        let mut swift = Incremental::new(sum_steps(task.loads, experts), start, topology.devices());
        swift.rechoose_redundant();
        swift.swap_from_hottest(self.max_swaps, self.min_gain);
        let slots = match valid {
            // An expert may have left a device and come back to another slot of it.
            Some(current) => keep_slots(current, &swift.slots, k),
            None => swift.slots,
        };
        Ok(Layout { slots, exhaustive: false, steps: swift.steps })
    }
}

struct Incremental {
    load: Vec<f64>,
    slots: Vec<u32>,
    copies: Vec<u32>,
    devices: usize,
    k: usize,
    /// Ordered device pairs that already carry a transfer.
    used: Vec<bool>,
    steps: u64,
}

impl Incremental {
    fn new(load: Vec<f64>, slots: Vec<u32>, devices: usize) -> Self {
        let mut copies = vec![0; load.len()];
        slots.iter().for_each(|&e| copies[e as usize] += 1);
        let k = slots.len() / devices;
        Self { load, copies, devices, k, used: vec![false; devices * devices], steps: 0, slots }
    }

    fn unit(&self, expert: u32) -> f64 {
        self.load[expert as usize] / f64::from(self.copies[expert as usize])
    }

    fn row(&self, device: usize) -> &[u32] {
        &self.slots[device * self.k..][..self.k]
    }

    fn device_load(&self, device: usize) -> f64 {
        self.row(device).iter().map(|&e| self.unit(e)).sum()
    }

    /// A device from which `expert` can be fetched to `to` over an unused pair.
    fn source(&self, expert: u32, to: usize) -> Option<usize> {
        (0..self.devices).find(|&from| {
            from != to && !self.used[from * self.devices + to] && self.row(from).contains(&expert)
        })
    }

    /// Gives each redundant slot, from the most loaded device on, to the expert that has the largest load per copy. The
    /// first copy of every expert stays.
    fn rechoose_redundant(&mut self) {
        let mut seen = vec![false; self.load.len()];
        let mut redundant: Vec<usize> = Vec::new();
        for index in 0..self.k {
            for device in 0..self.devices {
                let slot = device * self.k + index;
                let e = self.slots[slot] as usize;
                if std::mem::replace(&mut seen[e], true) {
                    redundant.push(slot);
                }
            }
        }
        for slot in redundant {
            let device = slot / self.k;
            let old = self.slots[slot];
            self.copies[old as usize] -= 1;
            self.steps += self.load.len() as u64;
            // The load per copy that each expert would have with one more copy.
            let value = |e: u32| self.load[e as usize] / f64::from(self.copies[e as usize] + 1);
            let allowed =
                |&e: &u32| e == old || (!self.row(device).contains(&e) && self.source(e, device).is_some());
            let mut best = old;
            for e in (0..self.load.len() as u32).filter(allowed) {
                best = if value(e) > value(best) { e } else { best };
            }
            if best != old
                && let Some(from) = self.source(best, device)
            {
                self.used[from * self.devices + device] = true;
            }
            self.copies[best as usize] += 1;
            self.slots[slot] = best;
        }
    }

    /// Exchanges experts between the hottest device and the partner that gains most.
    fn swap_from_hottest(&mut self, max_swaps: usize, min_gain: f64) {
        for _ in 0..max_swaps {
            let loads: Vec<f64> = (0..self.devices).map(|d| self.device_load(d)).collect();
            let hot = (0..self.devices).fold(0, |h, d| if loads[d] > loads[h] { d } else { h });
            let mut best = (loads[hot] * (1.0 - min_gain), None);
            for other in (0..self.devices).filter(|&d| d != hot) {
                let busy = self.used[hot * self.devices + other] || self.used[other * self.devices + hot];
                if busy {
                    continue;
                }
                self.steps += (self.k * self.k) as u64;
                for (i, &x) in self.row(hot).iter().enumerate() {
                    for (j, &y) in self.row(other).iter().enumerate() {
                        let shift = self.unit(x) - self.unit(y);
                        let peak = (loads[hot] - shift).max(loads[other] + shift);
                        let legal = !self.row(other).contains(&x) && !self.row(hot).contains(&y);
                        if peak < best.0 && legal {
                            best = (peak, Some((other, i, j)));
                        }
                    }
                }
            }
            let Some((other, i, j)) = best.1 else { return };
            self.slots.swap(hot * self.k + i, other * self.k + j);
            self.used[hot * self.devices + other] = true;
            self.used[other * self.devices + hot] = true;
        }
    }
}
