//! Door checks of the collectives: what one rank can know to be wrong before it communicates.
//!
//! Every communicator runs these first; they return the [`Call`] that the other ranks compare.

use candle_core::{Result, bail};
use moe_kernels::door::expect_dtype;
use moe_kernels::{Dims, View, ViewMut};

use crate::call::{Call, Counts, Op};
use crate::communicator::ReduceOp;

/// The caller's place: its rank and the number of ranks.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub rank: usize,
    pub size: usize,
}

impl Place {
    pub(crate) fn all_reduce(self, data: &ViewMut, op: ReduceOp) -> Result<Call> {
        let dims = Some(Dims::new(data.dims())?);
        Ok(Call { reduce: Some(op), dtype: Some(data.dtype()), dims, ..Call::bare(Op::AllReduce) })
    }

    pub(crate) fn broadcast(self, data: &ViewMut, root: usize) -> Result<Call> {
        if root >= self.size {
            bail!("broadcast: the root {root} is outside of a group of {} ranks", self.size)
        }
        let dims = Some(Dims::new(data.dims())?);
        Ok(Call { root: Some(root), dtype: Some(data.dtype()), dims, ..Call::bare(Op::Broadcast) })
    }

    pub(crate) fn all_gather(self, input: &View, out: &ViewMut) -> Result<Call> {
        let row = row_dims(Op::AllGather, input, out)?;
        let rows = input.rows();
        expect_rows(Op::AllGather, "out", out.dims(), self.times(Op::AllGather, rows)?, row)?;
        self.moved(Op::AllGather, input, input.dims())
    }

    pub(crate) fn all_gather_v(self, input: &View, counts: &[usize], out: &ViewMut) -> Result<Call> {
        let op = Op::AllGatherV;
        let row = row_dims(op, input, out)?;
        let total = self.total(op, "counts", counts)?;
        expect_rows(op, "input", input.dims(), self.own(counts), row)?;
        expect_rows(op, "out", out.dims(), total, row)?;
        Ok(Call { counts: Counts::PerRank(counts.to_vec()), ..self.moved(op, input, row)? })
    }

    pub(crate) fn reduce_scatter(self, input: &View, out: &ViewMut, reduce: ReduceOp) -> Result<Call> {
        let op = Op::ReduceScatter;
        let row = row_dims(op, input, out)?;
        expect_rows(op, "input", input.dims(), self.times(op, out.rows())?, row)?;
        Ok(Call { reduce: Some(reduce), ..self.moved(op, input, input.dims())? })
    }

    pub(crate) fn reduce_scatter_v(
        self,
        input: &View,
        counts: &[usize],
        out: &ViewMut,
        reduce: ReduceOp,
    ) -> Result<Call> {
        let op = Op::ReduceScatterV;
        let row = row_dims(op, input, out)?;
        let total = self.total(op, "counts", counts)?;
        expect_rows(op, "input", input.dims(), total, row)?;
        expect_rows(op, "out", out.dims(), self.own(counts), row)?;
        let counts = Counts::PerRank(counts.to_vec());
        Ok(Call { reduce: Some(reduce), counts, ..self.moved(op, input, row)? })
    }

    pub(crate) fn all_to_all(self, input: &View, out: &ViewMut) -> Result<Call> {
        let op = Op::AllToAll;
        let row = row_dims(op, input, out)?;
        if !input.rows().is_multiple_of(self.size) {
            bail!("{op}: expected input with a multiple of {} rows, got dims {:?}", self.size, input.dims())
        }
        expect_rows(op, "out", out.dims(), input.rows(), row)?;
        self.moved(op, input, input.dims())
    }

    pub(crate) fn all_to_all_v(
        self,
        input: &View,
        send: &[usize],
        out: &ViewMut,
        recv: &[usize],
    ) -> Result<Call> {
        let op = Op::AllToAllV;
        let row = row_dims(op, input, out)?;
        expect_rows(op, "input", input.dims(), self.total(op, "send_counts", send)?, row)?;
        expect_rows(op, "out", out.dims(), self.total(op, "recv_counts", recv)?, row)?;
        let counts = Counts::Pairwise { send: send.to_vec(), recv: recv.to_vec() };
        Ok(Call { counts, ..self.moved(op, input, row)? })
    }

    fn moved(self, op: Op, input: &View, dims: &[usize]) -> Result<Call> {
        Ok(Call { dtype: Some(input.dtype()), dims: Some(Dims::new(dims)?), ..Call::bare(op) })
    }

    fn own(self, counts: &[usize]) -> usize {
        counts.get(self.rank).copied().unwrap_or(0)
    }

    fn times(self, op: Op, rows: usize) -> Result<usize> {
        match rows.checked_mul(self.size) {
            Some(n) => Ok(n),
            None => bail!("{op}: {rows} rows of {} ranks overflow", self.size),
        }
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
