//! Gates of what rows have attended to: in the launches of attention, or in a launch after them.

use candle_core::Result;

use crate::cuda::{any, small};
use crate::exec::Exec;
use crate::rows_view::RowsViewMut;
use crate::view::View;

/// The floats from one row of gates to the next.
pub(super) fn gate_row(op: &str, gates: Option<View>) -> Result<i32> {
    gates.map_or(Ok(0), |gates| small(op, gates.dims()[1]))
}

/// Scales the rows of `out` from `first` on by their gates.
pub(super) fn scale_by_gates(op: &str, gates: View, out: RowsViewMut, first: usize, ex: &Exec) -> Result<()> {
    let out = out.floats(op)?;
    let rows = out.rows() - first;
    ex.launched(|| "sigmoid_gate");
    any::sigmoid_gate(ex.cuda("sigmoid_gate")?, op, gates.narrow(first, rows)?, out.narrow(first, rows)?)
}
