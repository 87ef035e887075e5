//! Exact solution of small layers by branch and bound.
//!
//! Two nested searches look for a placement with a peak below the best known one. The outer search enumerates copy
//! counts, each at least the count that the peak requires. The inner search fills one device after another and always
//! starts with the heaviest remaining copy, because that copy must be placed. A device may carry at most the peak `T`,
//! so each device must carry at least the load that the other devices cannot take. Near the optimum this window is
//! narrow and prunes almost everything. If the search ends before its step budget, the best placement is proven
//! optimal.

/// Sums are compared with this relative slack, so that rounding is not mistaken for an improvement.
const SLACK: f64 = 1e-11;

/// Layers up to these sizes are worth trying.
const MAX_EXPERTS: usize = 24;
const MAX_SLOTS: usize = 48;

/// Setting up the packing of one choice of copies costs about as much as this many steps.
const PACK_COST: u64 = 10;

/// Whether a layer is small enough for [`improve`].
pub(crate) fn is_small(experts: usize, slots: usize, k: usize) -> bool {
    experts <= MAX_EXPERTS && slots <= MAX_SLOTS && k <= experts
}

/// Tries to beat `slots` (peak `peak`). Returns whether the placement left in `slots` is optimal, and
/// the steps used.
pub(crate) fn improve(
    load: &[f64],
    devices: usize,
    slots: &mut [u32],
    peak: f64,
    budget: u64,
) -> (bool, u64) {
    let mut order: Vec<usize> = (0..load.len()).collect();
    order.sort_by(|&a, &b| load[b].total_cmp(&load[a]).then(a.cmp(&b)));
    let sorted: Vec<f64> = order.iter().map(|&e| load[e]).collect();
    let mut search = Search {
        total: sorted.iter().sum(),
        load: sorted,
        order,
        devices,
        k: slots.len() / devices,
        limit: peak * (1.0 - SLACK),
        steps: budget,
        copies: vec![0; load.len()],
        unit: vec![0.0; load.len()],
        rank: Vec::new(),
        left: Vec::new(),
        chosen: vec![0; slots.len()],
        best: None,
    };
    search.count(0, slots.len());
    if let Some(best) = search.best {
        slots.copy_from_slice(&best);
    }
    (search.steps > 0, budget - search.steps)
}

struct Search {
    /// The loads of the experts, largest first; all positions below refer to this order.
    load: Vec<f64>,
    order: Vec<usize>,
    total: f64,
    devices: usize,
    k: usize,
    /// The peak that a placement must not exceed. It shrinks with every placement found.
    limit: f64,
    steps: u64,
    copies: Vec<usize>,
    unit: Vec<f64>,
    /// Positions by falling load per copy, and the copies of each that are not placed yet.
    rank: Vec<usize>,
    left: Vec<usize>,
    /// Index into `rank` for every slot filled so far.
    chosen: Vec<usize>,
    best: Option<Vec<u32>>,
}

impl Search {
    /// Chooses the copies of expert `e` and all later ones out of `slots` slots.
    fn count(&mut self, e: usize, slots: usize) {
        if e == self.load.len() {
            if slots == 0 {
                self.pack();
            }
            return;
        }
        let forced: usize = (e + 1..self.load.len()).map(|f| self.least(f)).sum();
        // Equal experts are interchangeable: count them in falling order only.
        let twin = e > 0 && self.load[e - 1] == self.load[e];
        let most = if twin { self.copies[e - 1] } else { self.devices };
        let rest = (self.load.len() - e - 1) * self.devices;
        let from = self.least(e).max(slots.saturating_sub(rest));
        for copies in from..=most.min(slots.saturating_sub(forced)) {
            if self.steps == 0 {
                return;
            }
            self.steps -= 1;
            // The limit may have shrunk below what this count allows.
            if self.load[e] > self.limit * copies as f64 {
                continue;
            }
            self.copies[e] = copies;
            self.unit[e] = self.load[e] / copies as f64;
            self.count(e + 1, slots - copies);
        }
    }

    /// Copies that the limit forces on expert `e`.
    fn least(&self, e: usize) -> usize {
        ((self.load[e] / self.limit).ceil() as usize).max(1)
    }

    /// Looks for a placement of the chosen copies.
    fn pack(&mut self) {
        self.steps = self.steps.saturating_sub(PACK_COST);
        let mut rank: Vec<usize> = (0..self.load.len()).collect();
        rank.sort_by(|&a, &b| self.unit[b].total_cmp(&self.unit[a]).then(a.cmp(&b)));
        self.left = rank.iter().map(|&e| self.copies[e]).collect();
        self.rank = rank;
        // Each placement found lowers the limit, and these copies may allow an even lower one.
        while self.fill(0, self.total) {}
    }

    fn unit_at(&self, r: usize) -> f64 {
        self.unit[self.rank[r]]
    }

    /// Fills device `device`; `remaining` is the load of all copies not placed yet.
    /// Returns true once a placement within the limit is complete.
    fn fill(&mut self, device: usize, remaining: f64) -> bool {
        if device == self.devices {
            self.record();
            return true;
        }
        let after = self.devices - device - 1;
        if self.left.iter().any(|&c| c > after + 1) {
            return false;
        }
        let Some(first) = self.left.iter().position(|&c| c > 0) else { return false };
        // This device must take the load that the later devices cannot take.
        let floor = remaining - after as f64 * self.limit - self.total * SLACK;
        // If a device begins with the same expert as its predecessor, it must not be smaller in this order.
        let ordered = device > 0 && self.chosen[(device - 1) * self.k] == first;
        self.chosen[device * self.k] = first;
        self.left[first] -= 1;
        let found = self.extend(device, 1, self.unit_at(first), floor, remaining, ordered);
        self.left[first] += 1;
        found
    }

    /// Adds the `taken`-th copy to `device`, which carries `sum`.
    fn extend(
        &mut self,
        device: usize,
        taken: usize,
        sum: f64,
        floor: f64,
        remaining: f64,
        ordered: bool,
    ) -> bool {
        if self.steps == 0 || sum > self.limit {
            return false;
        }
        self.steps -= 1;
        if taken == self.k {
            return sum >= floor && self.fill(device + 1, remaining - sum);
        }
        let base = device * self.k + taken;
        let start = self.chosen[base - 1] + 1;
        let open = self.k - taken;
        let from = if ordered { start.max(self.chosen[base - self.k]) } else { start };
        for r in from..self.rank.len() {
            if self.left[r] == 0 {
                continue;
            }
            let unit = self.unit_at(r);
            // Later copies are no heavier: not even `open` of this weight would reach the floor.
            if sum + unit * (open as f64) < floor {
                return false;
            }
            self.chosen[base] = r;
            self.left[r] -= 1;
            let still = ordered && r == self.chosen[base - self.k];
            let found = self.extend(device, taken + 1, sum + unit, floor, remaining, still);
            self.left[r] += 1;
            if found {
                return true;
            }
        }
        false
    }

    /// Keeps the complete placement and demands a lower peak from now on.
    fn record(&mut self) {
        let slots: Vec<u32> = self.chosen.iter().map(|&r| self.order[self.rank[r]] as u32).collect();
        let device_load = |row: &[usize]| row.iter().map(|&r| self.unit_at(r)).sum::<f64>();
        let peak = self.chosen.chunks_exact(self.k).map(device_load).fold(0.0, f64::max);
        self.limit = peak * (1.0 - SLACK);
        self.best = Some(slots);
    }
}
