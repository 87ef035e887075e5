//! Lower bounds on the peak: no placement of these loads can be better balanced.
//!
//! Two facts bound one episode's peak `T` from below. First, `T` is at least the mean device load. Second, with peak
//! `T` an expert needs at least `load / (T - company)` copies, at most one per device, where `company` is the least
//! load that the other slots of a device can carry; all copies together must fit the slots. Bisection over `T` finds
//! the second bound. Each episode is bounded as if copies could be chosen for it alone, and the bounds are averaged.
//! This is still a bound, because the real choice must serve all episodes.

use crate::score::Objective;
use crate::topology::Topology;

/// Lower bound on the PAR of one layer with `loads` `[steps, experts]`. With `duplicates`, a device
/// may hold several copies of an expert, which weakens the bound.
pub fn layer_bound(loads: &[f64], topology: &Topology, objective: Objective, duplicates: bool) -> f64 {
    let experts = topology.experts();
    let loads = objective.episodes(loads, experts);
    let bound = |step| step_bound(step, topology, duplicates);
    loads.chunks_exact(experts).map(bound).sum::<f64>() / (loads.len() / experts) as f64
}

/// Bound on one episode's PAR.
fn step_bound(step: &[f64], topology: &Topology, duplicates: bool) -> f64 {
    let total: f64 = step.iter().sum();
    let mean = total / topology.devices() as f64;
    if mean <= 0.0 {
        return 1.0;
    }
    let (most, company) = if duplicates {
        (topology.slots(), vec![0.0; step.len()])
    } else {
        (topology.devices(), company_of(step, topology))
    };
    let fits = |peak: f64| copies_fit(step, &company, peak, most, topology.slots());
    if fits(mean) {
        return 1.0;
    }
    // A peak that equals the load of all experts on one device always fits, so the bracket is valid.
    let mut low = mean;
    let mut high = total;
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if fits(middle) { high = middle } else { low = middle }
    }
    // The low end is infeasible, so it is a bound, whatever the rounding of the high end.
    low / mean
}

/// Whether every expert can have the copies that peak `peak` forces on it.
fn copies_fit(step: &[f64], company: &[f64], peak: f64, most: usize, slots: usize) -> bool {
    let mut copies = 0.0;
    for (&load, &others) in step.iter().zip(company) {
        let room = peak - others;
        if load > 0.0 && room <= 0.0 {
            return false;
        }
        // A tiny slack: rounding must never turn a feasible peak into an infeasible one.
        let needed = if load > 0.0 { (load / room * (1.0 - 1e-12)).ceil().max(1.0) } else { 1.0 };
        if needed > most as f64 {
            return false;
        }
        copies += needed;
    }
    copies <= slots as f64
}

/// The least load that the other slots of a device carrying expert `e` can have: the lightest
/// `slots_per_device - 1` other experts, each split as often as devices and spare slots allow.
fn company_of(step: &[f64], topology: &Topology) -> Vec<f64> {
    let others = topology.slots_per_device() - 1;
    let split = topology.devices().min(topology.redundant() + 1) as f64;
    if others >= topology.experts() {
        return vec![0.0; step.len()];
    }
    let mut order: Vec<usize> = (0..step.len()).collect();
    order.select_nth_unstable_by(others, |&a, &b| step[a].total_cmp(&step[b]).then(a.cmp(&b)));
    // The sum is taken in ascending order of the experts, because the selection does not define their order.
    order[..others].sort_unstable();
    let light: f64 = order[..others].iter().map(|&e| step[e]).sum();
    let mut company = vec![light / split; step.len()];
    for &e in &order[..others] {
        company[e] = (light - step[e] + step[order[others]]) / split;
    }
    company
}
