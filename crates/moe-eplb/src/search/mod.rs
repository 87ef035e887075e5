//! The joint search that the default policy uses.

pub(crate) mod best;
pub(crate) mod descent;
pub(crate) mod kick;
pub(crate) mod rng;
pub(crate) mod rows;
pub(crate) mod start;
pub(crate) mod state;

use best::Best;
use descent::Descent;
use state::State;

pub(crate) use best::Request;

/// How a descent approaches the peak.
struct Schedule {
    rounds: u64,
    /// Where `theta` is put between the floor and the peak, in the first and the last round.
    aim: (f32, f32),
    /// The price of moves starts this much higher and falls by `ease` every round.
    frugality: f32,
    ease: f32,
}

/// The aim rises from the floor, where the overload is a variance, towards the peak.
const FRESH: Schedule = Schedule { rounds: 16, aim: (0.0, 0.9), frugality: 1.0, ease: 1.0 };
/// With a price, only large overloads are worth a transfer, and the transfers that gain most come first: the price
/// falls tenfold over the rounds.
const PRICED: Schedule = Schedule { rounds: 48, aim: (0.5, 0.7), frugality: 10.0, ease: 0.952_184 };

/// Any constant will do; it must be the same on every rank.
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// Searches one layer; returns the expert of every slot and the steps used.
pub(crate) fn solve<const W: usize>(row: Vec<[f32; W]>, request: &Request) -> (Vec<u16>, u64) {
    // Moves have a price only if there is a current placement.
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
        // The derivative of the overload (load - theta)^2 is 2 (load - theta). So if a peak falls by d, its overload
        // falls by about 2 d times the part of the peak above theta.
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
