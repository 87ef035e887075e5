//! The joint search behind the default policy.

pub(crate) mod descent;
pub(crate) mod kick;
pub(crate) mod rng;
pub(crate) mod rows;
pub(crate) mod start;
pub(crate) mod state;

use descent::Descent;
use state::State;

/// What a search is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) devices: usize,
    pub(crate) slots: usize,
    /// Candidate moves to look at.
    pub(crate) steps: u64,
    /// Lower bound of the PAR.
    pub(crate) floor: f32,
    /// Placement in force, if any.
    pub(crate) current: Option<&'a [u32]>,
    /// PAR that transferring every slot would have to gain.
    pub(crate) move_price: f32,
}

/// How a descent approaches the peak.
struct Schedule {
    rounds: u64,
    /// Where `theta` is put between the floor and the peak, in the first and the last round.
    aim: (f32, f32),
    /// The price of moves starts this much higher and falls by `ease` every round.
    frugality: f32,
    ease: f32,
}

/// From variance to peak.
const FRESH: Schedule = Schedule { rounds: 16, aim: (0.0, 0.9), frugality: 1.0, ease: 1.0 };
/// Only what stands out is worth a transfer, and what gains most per transfer comes first: the
/// price falls tenfold over the rounds.
const PRICED: Schedule = Schedule { rounds: 48, aim: (0.5, 0.7), frugality: 10.0, ease: 0.952_184 };

/// Kicks stop this close to the floor, relatively: nobody can measure the rest.
pub(crate) const CLOSE_ENOUGH: f32 = 1e-4;
/// Any constant will do; it must be the same on every rank.
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// The best placement seen, by PAR plus the price of its moves.
pub(crate) struct Best {
    pub(crate) score: f32,
    pub(crate) slot: Vec<u16>,
}

impl Best {
    pub(crate) fn offer<const W: usize>(&mut self, state: &State<W>, request: &Request) -> bool {
        let mut score = mean_peak(state);
        if request.move_price > 0.0 {
            score += request.move_price * state.moves() as f32 / request.slots as f32;
        }
        let better = score < self.score;
        if better {
            self.score = score;
            self.slot.copy_from_slice(&state.slot);
        }
        better
    }
}

/// Mean over the lanes in use of each lane's peak.
pub(crate) fn mean_peak<const W: usize>(state: &State<W>) -> f32 {
    let peaks = state.peaks();
    let used = peaks.iter().filter(|&&p| p > 0.0).count().max(1);
    peaks.iter().sum::<f32>() / used as f32
}

/// Searches one layer; returns the expert of every slot and the steps used.
pub(crate) fn solve<const W: usize>(row: Vec<[f32; W]>, request: &Request) -> (Vec<u16>, u64) {
    // Without a placement to start from there is nothing to be priced.
    let priced = request.current.filter(|_| request.move_price > 0.0);
    let request =
        &Request { move_price: if priced.is_some() { request.move_price } else { 0.0 }, ..*request };
    let k = request.slots / request.devices;
    let weight: Vec<f32> = row.iter().map(start::risk).collect();
    let copies = start::allot(&weight, request.slots, request.devices);
    let slot = match priced {
        Some(current) => start::transplant(&row, &copies, current, k),
        None => start::pack(&row, &copies, request.devices, k),
    };
    let mut state = State::new(row, request.devices, slot);
    if let Some(current) = priced {
        state.count_moves_from(current);
    }
    let mut best = Best { score: f32::INFINITY, slot: state.slot.clone() };
    let mut descent = Descent::new(request.devices, SEED);
    // A single lane converges early and then needs kicks; many lanes profit from longer descent.
    let kicks = W == 1 && priced.is_none();
    let budget = if kicks { request.steps / 4 } else { request.steps };
    let schedule = if priced.is_some() { PRICED } else { FRESH };
    let mut price = request.move_price * schedule.frugality / request.slots as f32;
    for round in 0..schedule.rounds {
        best.offer(&state, request);
        let (first, last) = schedule.aim;
        let aim = first + (last - first) * round as f32 / (schedule.rounds - 1) as f32;
        let left = descent.aim(&state, request.floor, aim);
        // Lowering a peak by d lowers its overload by twice the rest above theta times d.
        descent.move_price = 2.0 * left * price;
        price *= schedule.ease;
        descent.refresh(&mut state);
        descent.run(&mut state, budget / schedule.rounds);
        state.refresh_loads();
    }
    best.offer(&state, request);
    if kicks {
        state.set_slots(&best.slot);
        kick::run(&mut state, &mut descent, request, &mut best);
    }
    (best.slot, descent.steps)
}
