//! The collectives, each as reads of the data that one round provides.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use moe_kernels::{Exec, ViewMut, with_element};

use crate::call::{Call, Op};
use crate::check::Place;
use crate::collective::{Collective, ReduceOp};
use crate::communicator::Communicator;
use crate::placement::partition;
use crate::reduce::reduce;
use crate::round::{Give, Parts, Posts, Rounds};

/// From this number of bytes on, an all-reduce is shared: each rank reduces one part, then all parts are gathered. For
/// fewer bytes a second round costs more time than reducing everything on every rank (4 ranks on 2 cores, f32: 31
/// against 37 us at 32 KiB, 72 against 130 us at 128 KiB; 2 ranks: equal). Both ways give the same bits, because an
/// element's order of addition is the same.
const SHARED_REDUCTION_BYTES: usize = 32 << 10;

/// Reduces the data of all ranks into `out`.
fn reduce_into(op: ReduceOp, posts: &impl Posts, size: usize, mut out: ViewMut) -> Result<()> {
    with_element!(out.dtype(), op, T => {
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

/// Copies the data of all ranks to `out`, one after the other.
fn concat(posts: &impl Posts, size: usize, mut out: ViewMut) -> Result<()> {
    let mut start = 0;
    for rank in 0..size {
        let part = posts.rows(rank)?;
        out.reborrow().narrow(start, part.rows())?.copy_from(part)?;
        start += part.rows();
    }
    Ok(())
}

/// Consecutive ranges of rows, one for each count. The argument checks have refused counts whose sum overflows.
fn runs(counts: &[usize]) -> Parts {
    let run = |start: &mut usize, &count: &usize| -> Option<Range<usize>> {
        let end = start.saturating_add(count);
        Some(std::mem::replace(start, end)..end)
    };
    Parts::Each(counts.iter().scan(0, run).collect())
}

/// An all-reduce in two rounds: each rank reduces one part, then all parts are gathered.
fn all_reduce_shared<G: Rounds>(group: &G, call: Call, data: ViewMut, op: ReduceOp, ex: &Exec) -> Result<()> {
    let Place { rank, size } = group.place();
    let len = data.elem_count();
    let dtype = data.dtype();
    let part = |rank| partition(len, size, rank);
    let give = Give::Rows(data.as_view().reshape(&[len])?, Parts::Each((0..size).map(part).collect()));
    let round = group.enter(Op::AllReduce, Ok(call.clone()), give, ex)?;
    let part = round.read(|posts| {
        let mut reduced = ex.scratch(dtype, &[part(rank).len()])?;
        reduce_into(op, posts, size, reduced.view_mut())?;
        Ok(reduced)
    })?;
    let round = group.enter(Op::AllReduce, Ok(call), Give::Rows(part.view(), Parts::Whole), ex)?;
    round.read(|posts| concat(posts, size, data.reshape(&[len])?))
}

impl<G: Rounds> Communicator for G {
    fn rank(&self) -> usize {
        self.place().rank
    }

    fn world_size(&self) -> usize {
        self.place().size
    }

    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        let Place { rank, size } = self.place();
        let name = collective.op();
        let call = self.place().check(&collective);
        match collective {
            Collective::AllReduce { data, op } => match call {
                Ok(call)
                    if size > 1
                        && data.elem_count() * data.dtype().size_in_bytes() >= SHARED_REDUCTION_BYTES =>
                {
                    all_reduce_shared(self, call, data, op, ex)
                }
                call => {
                    let round = self.enter(name, call, Give::Rows(data.as_view(), Parts::Whole), ex)?;
                    round.read(|posts| reduce_into(op, posts, size, data))
                }
            },
            // Every rank needs all rows of the other ranks.
            Collective::AllGather { input, out, .. } => {
                let round = self.enter(name, call, Give::Rows(input, Parts::Whole), ex)?;
                round.read(|posts| concat(posts, size, out))
            }
            Collective::ReduceScatter { input, counts, out, op } => {
                let round = self.enter(name, call, Give::Rows(input, runs(counts)), ex)?;
                round.read(|posts| reduce_into(op, posts, size, out))
            }
            Collective::AllToAll { input, send, out, .. } => {
                let round = self.enter(name, call, Give::Rows(input, runs(send)), ex)?;
                round.read(|posts| concat(posts, size, out))
            }
            Collective::Broadcast { mut data, root } => {
                let give =
                    if rank == root { Give::Rows(data.as_view(), Parts::Whole) } else { Give::Nothing };
                let round = self.enter(name, call, give, ex)?;
                round.read(|posts| if rank == root { Ok(()) } else { data.copy_from(posts.rows(root)?) })
            }
            Collective::Barrier => self.enter(name, call, Give::Nothing, ex)?.read(|_| Ok(())),
        }
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
