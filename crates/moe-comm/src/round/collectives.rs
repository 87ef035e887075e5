//! The collectives, as reads of what one round gives.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use crate::call::{Call, Op};
use crate::check::Place;
use crate::communicator::{Communicator, ReduceOp};
use crate::dtype::{copy, with_element};
use crate::placement::partition;
use crate::reduce::reduce;
use crate::round::{Give, Parts, Posts, Rounds};

/// From this many bytes on, an all-reduce is shared: each rank reduces one part, then all parts
/// are gathered. Below, a second meeting costs more than reducing everything everywhere (4 ranks
/// on 2 cores, f32: 31 against 37 us at 32 KiB, 72 against 130 us at 128 KiB; 2 ranks: equal).
/// Both give the same bits, because an element's order of addition is the same.
const SHARED_REDUCTION_BYTES: usize = 32 << 10;

/// Reduces what all ranks gave into `out`.
fn reduce_into(op: ReduceOp, posts: &impl Posts, size: usize, mut out: ViewMut) -> Result<()> {
    with_element!(out.dtype(), T => {
        let len = out.elem_count();
        let part = |rank| match posts.rows(rank)?.cpu::<T>()? {
            part if part.len() == len => Ok(part),
            part => bail!("a rank gave {} elements to reduce, expected {len}", part.len()),
        };
        let parts: Vec<&[T]> = (0..size).map(part).collect::<Result<_>>()?;
        reduce::<T>(op, &parts, out.cpu_mut::<T>()?);
        Ok(())
    })
}

/// Copies what the ranks gave to `out`, one after the other.
fn concat(posts: &impl Posts, size: usize, mut out: ViewMut) -> Result<()> {
    let mut start = 0;
    for rank in 0..size {
        let part = posts.rows(rank)?;
        copy(part, out.reborrow().narrow(start, part.rows())?)?;
        start += part.rows();
    }
    Ok(())
}

/// Rows one after the other, one run for each count. Counts that overflow have been refused at
/// the door.
fn runs(counts: impl IntoIterator<Item = usize>) -> Parts {
    let run = |start: &mut usize, count: usize| -> Option<Range<usize>> {
        let end = start.saturating_add(count);
        Some(std::mem::replace(start, end)..end)
    };
    Parts::Each(counts.into_iter().scan(0, run).collect())
}

/// All-gathers: every rank needs all rows of the others.
fn gather<G: Rounds>(
    group: &G,
    op: Op,
    call: Result<Call>,
    input: View,
    out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let round = group.enter(op, call, Give::Rows(input, Parts::Whole), ex)?;
    round.read(|posts| concat(posts, group.place().size, out))
}

/// An all-reduce in two rounds: each rank reduces one part, then all parts are gathered.
fn all_reduce_shared<G: Rounds>(group: &G, call: Call, data: ViewMut, op: ReduceOp, ex: &Exec) -> Result<()> {
    let Place { rank, size } = group.place();
    let (len, dtype) = (data.elem_count(), data.dtype());
    let part = |rank| partition(len, size, rank);
    let give = Give::Rows(data.as_view().reshape(&[len])?, Parts::Each((0..size).map(part).collect()));
    let round = group.enter(Op::AllReduce, Ok(call.clone()), give, ex)?;
    let part = round.read(|posts| {
        let mut reduced = ex.scratch(dtype, &[part(rank).len()])?;
        reduce_into(op, posts, size, reduced.view_mut())?;
        Ok(reduced)
    })?;
    gather(group, Op::AllReduce, Ok(call), part.view(), data.reshape(&[len])?, ex)
}

impl<G: Rounds> Communicator for G {
    fn rank(&self) -> usize {
        self.place().rank
    }

    fn world_size(&self) -> usize {
        self.place().size
    }

    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let size = self.place().size;
        let call = self.place().all_reduce(&data, op);
        match call {
            Ok(call)
                if size > 1 && data.elem_count() * data.dtype().size_in_bytes() >= SHARED_REDUCTION_BYTES =>
            {
                all_reduce_shared(self, call, data, op, ex)
            }
            call => {
                let round = self.enter(Op::AllReduce, call, Give::Rows(data.as_view(), Parts::Whole), ex)?;
                round.read(|posts| reduce_into(op, posts, size, data))
            }
        }
    }

    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        gather(self, Op::AllGather, self.place().all_gather(&input, &out), input, out, ex)
    }

    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        gather(self, Op::AllGatherV, self.place().all_gather_v(&input, counts, &out), input, out, ex)
    }

    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let (size, call) = (self.place().size, self.place().reduce_scatter(&input, &out, op));
        let give = Give::Rows(input, runs(std::iter::repeat_n(out.rows(), size)));
        let round = self.enter(Op::ReduceScatter, call, give, ex)?;
        round.read(|posts| reduce_into(op, posts, size, out))
    }

    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        let call = self.place().reduce_scatter_v(&input, counts, &out, op);
        let give = Give::Rows(input, runs(counts.iter().copied()));
        let round = self.enter(Op::ReduceScatterV, call, give, ex)?;
        round.read(|posts| reduce_into(op, posts, self.place().size, out))
    }

    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let (size, call) = (self.place().size, self.place().all_to_all(&input, &out));
        let give = Give::Rows(input, runs(std::iter::repeat_n(input.rows() / size, size)));
        let round = self.enter(Op::AllToAll, call, give, ex)?;
        round.read(|posts| concat(posts, size, out))
    }

    fn all_to_all_v(
        &self,
        input: View<'_>,
        send_counts: &[usize],
        out: ViewMut<'_>,
        recv_counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        let call = self.place().all_to_all_v(&input, send_counts, &out, recv_counts);
        let give = Give::Rows(input, runs(send_counts.iter().copied()));
        let round = self.enter(Op::AllToAllV, call, give, ex)?;
        round.read(|posts| concat(posts, self.place().size, out))
    }

    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        let call = self.place().broadcast(&data, root);
        let is_root = self.place().rank == root;
        let give = if is_root { Give::Rows(data.as_view(), Parts::Whole) } else { Give::Nothing };
        let round = self.enter(Op::Broadcast, call, give, ex)?;
        round.read(|posts| if is_root { Ok(()) } else { copy(posts.rows(root)?, data) })
    }

    fn barrier(&self, ex: &mut Exec) -> Result<()> {
        self.enter(Op::Barrier, Ok(Call::bare(Op::Barrier)), Give::Nothing, ex)?.read(|_| Ok(()))
    }

    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
        let Place { rank, size } = self.place();
        let call = Ok(Call::bare(Op::Split));
        self.enter(Op::Split, call, Give::Split { color, key }, ex)?.read(|posts| {
            let mut members = Vec::new();
            for rank in 0..size {
                let (its_color, key) = posts.split(rank)?;
                if its_color == color {
                    members.push((key, rank));
                }
            }
            members.sort_unstable();
            let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
            match members.iter().position(|&member| member == rank) {
                Some(own) => self.join(posts, &members, own),
                None => bail!("the split lost its own rank"),
            }
        })
    }

    fn abort(&self, reason: &str) {
        self.fail(format!("{} aborted: {reason}", self.name()));
    }

    fn check(&self) -> Result<()> {
        match self.failure() {
            Some(_) => Err(self.error("")),
            None => Ok(()),
        }
    }
}
