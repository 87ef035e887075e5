//! Descent on a smoothed peak.
//!
//! The peak device load alone is a poor guide: most moves leave it unchanged. The search instead
//! lowers the overload `sum over lanes and devices of max(0, load - theta)^2`, which every move on
//! a loaded device changes and which only the touched devices enter. `theta` starts at the lower
//! bound and rises towards the current peak round by round, so the sum turns from a variance into
//! the peak. Two moves: exchange two experts between devices, and give a slot to another expert
//! (which changes two copy counts).

use super::rng::Rng;
use super::state::State;

/// `sum over lanes of max(0, load - theta)^2` of one device.
#[inline]
pub(crate) fn overload<const W: usize>(load: &[f32; W], theta: &[f32; W]) -> f32 {
    let mut lanes = [0f32; W];
    for t in 0..W {
        let over = load[t] - theta[t];
        let over = if over > 0.0 { over } else { 0.0 };
        lanes[t] = over * over;
    }
    lane_sum(lanes)
}

/// Sums lanes by halves: a fixed order that vectorises.
#[inline]
fn lane_sum<const W: usize>(mut lanes: [f32; W]) -> f32 {
    let mut half = W / 2;
    while half > 0 {
        for t in 0..half {
            lanes[t] += lanes[t + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Candidate slot changes per 1024 samples.
const REPLACE_SHARE: u32 = 64;
/// Samples between two looks at which devices are overloaded.
const RANK_EVERY: u32 = 64;

/// The search's working memory for one layer.
pub(crate) struct Descent<const W: usize> {
    pub(crate) theta: [f32; W],
    /// Overload of every device at the current `theta`.
    over: Vec<f32>,
    /// Devices that were overloaded at the last refresh.
    hot: Vec<u32>,
    rng: Rng,
    /// The overload that each transferred expert must save: the price of a move.
    pub(crate) move_price: f32,
    /// Steps spent: one per candidate move looked at.
    pub(crate) steps: u64,
    touched: Vec<(usize, f32, [f32; W])>,
}

impl<const W: usize> Descent<W> {
    pub(crate) fn new(devices: usize, seed: u64) -> Self {
        Self {
            theta: [0.0; W],
            over: vec![0.0; devices],
            hot: Vec::with_capacity(devices),
            rng: Rng::new(seed),
            move_price: 0.0,
            steps: 0,
            touched: Vec::new(),
        }
    }

    pub(crate) fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// Puts `theta` at share `aim` of the way from the floor to each lane's peak. Returns the sum
    /// over lanes of what is left above it.
    pub(crate) fn aim(&mut self, state: &State<W>, floor: f32, aim: f32) -> f32 {
        let peaks = state.peaks();
        let mut left = 0.0;
        for (theta, peak) in self.theta.iter_mut().zip(peaks) {
            // Lanes without load are left out, and a peak may be below a mean of bounds.
            let low = if floor < peak { floor } else { peak };
            *theta = low + (peak - low) * aim;
            left += peak - *theta;
        }
        left
    }

    /// Recomputes loads and overloads; returns the total overload.
    pub(crate) fn refresh(&mut self, state: &mut State<W>) -> f32 {
        state.refresh_loads();
        let mut total = 0.0;
        for (over, load) in self.over.iter_mut().zip(&state.load) {
            *over = overload(load, &self.theta);
            total += *over;
        }
        self.rank();
        total
    }

    /// Lists the devices that are overloaded now.
    fn rank(&mut self) {
        self.hot.clear();
        for (d, &over) in self.over.iter().enumerate() {
            if over > 0.0 {
                self.hot.push(d as u32);
            }
        }
    }

    pub(crate) fn total(&self) -> f32 {
        self.over.iter().sum()
    }

    pub(crate) fn hot(&self) -> &[u32] {
        &self.hot
    }

    /// Any overloaded device; there must be one.
    pub(crate) fn pick_hot(&mut self) -> usize {
        self.hot[self.rng.below(self.hot.len())] as usize
    }

    /// A device to exchange with. With one lane, it is the lightest of three samples, which has most room. With several
    /// lanes, a device that is light in sum need not be light in each lane, so any device is as good.
    fn partner(&mut self, state: &State<W>) -> usize {
        let mut b = self.rng.below(state.devices);
        if W == 1 {
            for _ in 0..2 {
                let c = self.rng.below(state.devices);
                b = if state.load[c][0] < state.load[b][0] { c } else { b };
            }
        }
        b
    }

    /// Looks at `budget` candidate moves and takes those that lower the overload.
    pub(crate) fn run(&mut self, state: &mut State<W>, budget: u64) {
        let end = self.steps + budget;
        let k = state.slots_per_device;
        let mut samples = 0u32;
        while self.steps < end && !self.hot.is_empty() {
            samples += 1;
            if samples.is_multiple_of(RANK_EVERY) {
                self.rank();
                continue;
            }
            let sample = self.rng.next();
            // Usually `a` is an overloaded device. Sometimes it is any device, to make room elsewhere.
            let a = if sample & 7 != 0 { self.pick_hot() } else { self.rng.below(state.devices) };
            let pa = a * k + self.rng.below(k);
            if sample >> 22 < REPLACE_SHARE {
                self.try_replace(state, pa, sample & 8 == 0);
            } else {
                let b = self.partner(state);
                self.try_swap(state, pa, b);
            }
        }
    }

    /// Exchanges slot `pa` with the best slot of device `b`, if that helps.
    fn try_swap(&mut self, state: &mut State<W>, pa: usize, b: usize) {
        let k = state.slots_per_device;
        let a = pa / k;
        let x = state.expert(pa);
        self.steps += 1;
        if a == b || state.on(x, b) {
            return;
        }
        let unit_x = state.unit[x];
        let mut base_a = state.load[a];
        let mut base_b = state.load[b];
        for t in 0..W {
            base_a[t] -= unit_x[t];
            base_b[t] += unit_x[t];
        }
        let before = self.over[a] + self.over[b];
        // The margin is relative, so that rounding does not count as progress.
        let mut best = before * -1e-5;
        let mut best_slot = None;
        self.steps += k as u64;
        for pb in b * k..(b + 1) * k {
            let y = state.expert(pb);
            if state.on(y, a) {
                continue;
            }
            let mut gain = swapped_overload(&base_a, &base_b, &state.unit[y], &self.theta) - before;
            if self.move_price > 0.0 {
                let fresh = state.is_fresh(x, b) + state.is_fresh(y, a);
                gain += self.move_price * (fresh - state.is_fresh(x, a) - state.is_fresh(y, b)) as f32;
            }
            if gain < best {
                best = gain;
                best_slot = Some(pb);
            }
        }
        let Some(pb) = best_slot else { return };
        let unit_y = state.unit[state.expert(pb)];
        for t in 0..W {
            base_a[t] += unit_y[t];
            base_b[t] -= unit_y[t];
        }
        self.over[a] = overload(&base_a, &self.theta);
        self.over[b] = overload(&base_b, &self.theta);
        state.swap(pa, pb, base_a, base_b);
    }

    /// Lets the expert in `pa` gain a copy elsewhere (`grow`), or lose this one to another expert.
    fn try_replace(&mut self, state: &mut State<W>, pa: usize, grow: bool) {
        let pb = self.rng.below(state.slot.len());
        let (p, x) = if grow { (pb, state.expert(pa)) } else { (pa, state.expert(pb)) };
        self.steps += 1;
        if let Some(gain) = self.weigh_replace(state, p, x)
            && gain < self.total() * -1e-5
        {
            self.apply_replace(state, p, x);
        }
    }

    /// Overload change (with the price of moves) if slot `p` went to expert `x`.
    pub(crate) fn weigh_replace(&mut self, state: &State<W>, p: usize, x: usize) -> Option<f32> {
        let d0 = p / state.slots_per_device;
        let y = state.expert(p);
        if x == y || state.copies[y] < 2 || state.on(x, d0) {
            return None;
        }
        let new_x = state.unit_at(x, state.copies[x] + 1);
        let new_y = state.unit_at(y, state.copies[y] - 1);
        let mut gain = 0.0;
        self.touched.clear();
        let mut look = |d: usize| {
            let load = state.replaced_load(d, p, x, &new_x, y, &new_y);
            let over = overload(&load, &self.theta);
            gain += over - self.over[d];
            self.touched.push((d, over, load));
        };
        // `d0` holds y, so it is among the hosts of either.
        state.for_hosts(x, y, &mut look);
        self.steps += self.touched.len() as u64;
        if self.move_price > 0.0 {
            gain += self.move_price * (state.is_fresh(x, d0) - state.is_fresh(y, d0)) as f32;
        }
        Some(gain)
    }

    /// Carries out the slot change that `weigh_replace` looked at last.
    pub(crate) fn apply_replace(&mut self, state: &mut State<W>, p: usize, x: usize) {
        for &(d, over, load) in &self.touched {
            self.over[d] = over;
            state.load[d] = load;
        }
        state.replace(p, x);
    }
}

/// Overload of two devices after `unit_y` moves from the second base to the first.
#[inline]
fn swapped_overload<const W: usize>(a: &[f32; W], b: &[f32; W], unit_y: &[f32; W], theta: &[f32; W]) -> f32 {
    let mut lanes = [0f32; W];
    for t in 0..W {
        let over_a = a[t] + unit_y[t] - theta[t];
        let over_b = b[t] - unit_y[t] - theta[t];
        let over_a = if over_a > 0.0 { over_a } else { 0.0 };
        let over_b = if over_b > 0.0 { over_b } else { 0.0 };
        lanes[t] = over_a * over_a + over_b * over_b;
    }
    lane_sum(lanes)
}
