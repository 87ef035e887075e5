//! Argument checks of the collectives: the errors that one rank can find before it communicates.
//!
//! Every communicator runs these first; they return the [`Call`] that the other ranks compare.

use candle_core::{Error, Result, bail};
use moe_kernels::arguments::expect_dtype;
use moe_kernels::{Dims, View, ViewMut};

use crate::call::{Call, Counts, Op};
use crate::collective::Collective;

/// The caller's place: its rank and the number of ranks.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub rank: usize,
    pub size: usize,
}

impl Place {
    /// The [`Call`] of a collective, after its arguments were found to be right.
    pub(crate) fn check(self, collective: &Collective) -> Result<Call> {
        let bare = Call::bare(collective.op());
        let whole = |data: &ViewMut| Ok::<_, Error>((Some(data.dtype()), Some(Dims::new(data.dims())?)));
        Ok(match collective {
            Collective::AllReduce { data, op } => {
                let (dtype, dims) = whole(data)?;
                Call { reduce: Some(*op), dtype, dims, ..bare }
            }
            Collective::Broadcast { root, .. } if *root >= self.size => {
                bail!("broadcast: the root {root} is outside of a group of {} ranks", self.size)
            }
            Collective::Broadcast { data, root } => {
                let (dtype, dims) = whole(data)?;
                Call { root: Some(*root), dtype, dims, ..bare }
            }
            Collective::AllGather { input, counts, out } => {
                let total = self.total(bare.op, "counts", counts)?;
                Call {
                    counts: Counts::PerRank(counts.to_vec()),
                    ..moved(bare, (input, self.own(counts)), (out, total))?
                }
            }
            Collective::ReduceScatter { input, counts, out, op } => {
                let total = self.total(bare.op, "counts", counts)?;
                let counts_call = Counts::PerRank(counts.to_vec());
                Call {
                    reduce: Some(*op),
                    counts: counts_call,
                    ..moved(bare, (input, total), (out, self.own(counts)))?
                }
            }
            Collective::AllToAll { input, send, out, recv } => {
                let sent = self.total(bare.op, "send_counts", send)?;
                let received = self.total(bare.op, "recv_counts", recv)?;
                let counts = Counts::Pairwise { send: send.to_vec(), recv: recv.to_vec() };
                Call { counts, ..moved(bare, (input, sent), (out, received))? }
            }
            Collective::Barrier => bare,
        })
    }

    fn own(self, counts: &[usize]) -> usize {
        counts.get(self.rank).copied().unwrap_or(0)
    }

    fn total(self, op: Op, name: &str, counts: &[usize]) -> Result<usize> {
        if counts.len() != self.size {
            bail!("{op}: expected {name} of {} ranks, got {counts:?}", self.size)
        }
        match counts.iter().try_fold(0usize, |n, &c| n.checked_add(c)) {
            Some(n) => Ok(n),
            None => bail!("{op}: {name} {counts:?} overflow"),
        }
    }
}

/// The call of a collective that moves rows: `input` and `out` with the numbers of rows that they must have.
fn moved(call: Call, (input, sent): (&View, usize), (out, received): (&ViewMut, usize)) -> Result<Call> {
    let row = row_dims(call.op, input, out)?;
    expect_rows(call.op, "input", input.dims(), sent, row)?;
    expect_rows(call.op, "out", out.dims(), received, row)?;
    Ok(Call { dtype: Some(input.dtype()), dims: Some(Dims::new(row)?), ..call })
}

/// The dims of a row of `input`; fails unless `out` has rows of the same dims and dtype.
fn row_dims<'a>(op: Op, input: &'a View, out: &ViewMut) -> Result<&'a [usize]> {
    expect_dtype(op.name(), "out", out, input.dtype())?;
    match (input.dims().split_first(), out.dims().split_first()) {
        (Some((_, row)), Some((_, out_row))) if row == out_row => Ok(row),
        (Some(_), Some(_)) => {
            bail!(
                "{op}: expected input and out with equal dims after the first, got {:?} and {:?}",
                input.dims(),
                out.dims()
            )
        }
        _ => {
            bail!("{op}: expected input and out with rows, got dims {:?} and {:?}", input.dims(), out.dims())
        }
    }
}

fn expect_rows(op: Op, name: &str, dims: &[usize], rows: usize, row: &[usize]) -> Result<()> {
    if dims.first() != Some(&rows) {
        bail!("{op}: expected {name} with {rows} rows of dims {row:?}, got dims {dims:?}")
    }
    Ok(())
}
