//! What the ops over recurrent states check of the sequences of a step.

use std::ops::Range;

use candle_core::{DType, Result, bail};

use crate::arguments::expect;
use crate::operands::StateRows;

/// A sequence of a step.
pub(super) struct StateSequence {
    /// Its rows.
    pub rows: Range<usize>,
    /// Where its state is.
    pub state: usize,
    /// Whether its state is empty before these rows.
    pub begins: bool,
}

/// Checks dims and dtypes for a step of `t` rows, and returns the number of sequences.
///
/// # Errors
/// A wrong dtype or wrong dims.
pub(super) fn check_rows(op: &str, rows: &StateRows, t: usize) -> Result<usize> {
    let s = rows.states.elem_count();
    expect(op, "numbers of states", &rows.states, DType::U32, &[s])?;
    expect(op, "query_start_loc", &rows.query_start_loc, DType::U32, &[s + 1])?;
    expect(op, "positions", &rows.positions, DType::U32, &[t])?;
    Ok(s)
}

/// The sequences of a step of `t` rows that have any, over `num_states` states.
///
/// # Errors
/// A wrong dtype or wrong dims; row ranges that do not ascend within the rows; a sequence whose state does not exist
/// or is another one's, too.
pub(super) fn check_sequences(
    op: &str,
    rows: &StateRows,
    t: usize,
    num_states: usize,
) -> Result<Vec<StateSequence>> {
    let s = check_rows(op, rows, t)?;
    let starts = rows.query_start_loc.cpu::<u32>()?;
    let states = rows.states.cpu::<u32>()?;
    let positions = rows.positions.cpu::<u32>()?;
    if starts.first() != Some(&0) || !starts.is_sorted() || starts[s] as usize > t {
        bail!("{op}: expected query_start_loc that ascends from 0 to at most {t} rows, got {starts:?}")
    }
    let mut owners = vec![None; num_states];
    let mut sequences = Vec::with_capacity(s);
    for number in 0..s {
        let rows = starts[number] as usize..starts[number + 1] as usize;
        if rows.is_empty() {
            continue;
        }
        let state = states[number] as usize;
        let Some(owner) = owners.get_mut(state) else {
            bail!("{op}: sequence {number} has state {state}, expected one below {num_states}")
        };
        if let Some(other) = owner.replace(number) {
            bail!("{op}: sequences {other} and {number} have the same state {state}")
        }
        let begins = positions[rows.start] == 0;
        sequences.push(StateSequence { rows, state, begins });
    }
    Ok(sequences)
}
