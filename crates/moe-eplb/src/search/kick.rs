//! Kicks: changes of copy counts against the gradient, followed by a repair.
//!
//! With one lane the descent ends when no single exchange helps, although the copy counts may be wrong. For example, a
//! heavily loaded expert could have one copy less if its devices had lighter neighbours, but taking the copy away first
//! overloads all devices that hold it. A kick makes that change, lets the descent repair the placement, and keeps the
//! outcome if it is not worse.

use super::best::{Best, CLOSE_ENOUGH, Request};
use super::descent::Descent;
use super::state::State;

/// Count changes weighed for each kick; the least harmful is taken.
const CANDIDATES: usize = 12;
/// Repair steps per slot, in `STAGES` parts.
const PATIENCE: u64 = 120;
const STAGES: u64 = 8;
/// A repair is abandoned while its overload exceeds the best by `GIVE_UP / stage^2`.
const GIVE_UP: f32 = 20.0;
/// `theta` between the floor and the best peak.
const AIM: f32 = 0.5;

/// Kicks until the request's steps are spent or the floor is reached.
pub(crate) fn run<const W: usize>(
    state: &mut State<W>,
    descent: &mut Descent<W>,
    request: &Request,
    best: &mut Best,
) {
    let good_enough = request.floor * (1.0 + CLOSE_ENOUGH);
    descent.aim(state, request.floor, AIM);
    let mut current = descent.refresh(state);
    let mut saved = state.clone();
    while descent.steps < request.steps && best.score > good_enough && !descent.hot().is_empty() {
        if !kick(state, descent) {
            continue;
        }
        let now = repair(state, descent, current);
        if now > current {
            state.clone_from(&saved);
            descent.refresh(state);
            continue;
        }
        current = now;
        if best.offer(state, request) {
            descent.aim(state, request.floor, AIM);
            current = descent.refresh(state);
        }
        saved.clone_from(state);
    }
}

/// Applies the least harmful of a few random count changes around an overloaded device.
fn kick<const W: usize>(state: &mut State<W>, descent: &mut Descent<W>) -> bool {
    let k = state.slots_per_device;
    let mut choice: Option<(f32, usize, usize)> = None;
    for _ in 0..CANDIDATES {
        let hot = descent.pick_hot();
        let rng = descent.rng();
        let pa = hot * k + rng.below(k);
        let pb = rng.below(state.slot.len());
        let grow = rng.next() & 1 == 0;
        let (p, x) = if grow { (pb, state.expert(pa)) } else { (pa, state.expert(pb)) };
        descent.steps += 1;
        if let Some(harm) = descent.weigh_replace(state, p, x)
            && choice.is_none_or(|(least, ..)| harm < least)
        {
            choice = Some((harm, p, x));
        }
    }
    let Some((_, p, x)) = choice else { return false };
    descent.weigh_replace(state, p, x);
    descent.apply_replace(state, p, x);
    true
}

/// Descends until the overload is no worse than `current` or the repair looks hopeless.
fn repair<const W: usize>(state: &mut State<W>, descent: &mut Descent<W>, current: f32) -> f32 {
    let mut now = f32::INFINITY;
    for stage in 1..=STAGES {
        descent.run(state, PATIENCE * state.slot.len() as u64 / STAGES);
        now = descent.refresh(state);
        if now <= current || now > current * (1.0 + GIVE_UP / (stage * stage) as f32) {
            break;
        }
    }
    now
}
