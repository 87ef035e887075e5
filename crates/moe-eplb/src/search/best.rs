//! The request to a search, and the best placement that the search has seen.

use super::state::State;

/// The request to a search.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) devices: usize,
    pub(crate) slots: usize,
    /// Number of candidate moves to evaluate.
    pub(crate) steps: u64,
    /// Lower bound of the PAR.
    pub(crate) floor: f32,
    /// The current placement, if there is one.
    pub(crate) current: Option<&'a [u32]>,
    /// PAR that transferring every slot would have to gain.
    pub(crate) move_price: f32,
}

/// Kicks stop when the peak is this close to the floor, relative to the floor: a smaller difference cannot be measured.
pub(crate) const CLOSE_ENOUGH: f32 = 1e-4;

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
fn mean_peak<const W: usize>(state: &State<W>) -> f32 {
    let peaks = state.peaks();
    let used = peaks.iter().filter(|&&p| p > 0.0).count().max(1);
    peaks.iter().sum::<f32>() / used as f32
}
