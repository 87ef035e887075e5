//! The collectives of in-process ranks, as reads of the posts of one round.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use candle_core::{Result, bail};
use moe_kernels::{Element, Exec, View, ViewMut};

use crate::call::{Call, Counts, Op};
use crate::check::Place;
use crate::communicator::{Communicator, ReduceOp};
use crate::dtype::{copy, with_element};
use crate::placement::partition;
use crate::reduce::reduce;
use crate::thread::board::{Board, Payload, Post};
use crate::thread::comm::ThreadComm;

/// From this many bytes on, an all-reduce is shared: each rank reduces one part, then all parts
/// are gathered. Below, a second meeting costs more than reducing everything everywhere (4 ranks
/// on 2 cores, f32: 31 against 37 us at 32 KiB, 72 against 130 us at 128 KiB; 2 ranks: equal).
/// Both give the same bits, because an element's order of addition is the same.
const SHARED_REDUCTION_BYTES: usize = 32 << 10;

/// The rows that a rank posted.
fn rows(post: &Post) -> Result<View<'_>> {
    match &post.payload {
        Payload::Rows(rows) => Ok(rows.view()),
        _ => bail!("a rank posted no rows"),
    }
}

/// Elements `range` of what a rank posted.
fn slice<T: Element>(post: &Post, range: Range<usize>) -> Result<&[T]> {
    let data = rows(post)?.cpu::<T>()?;
    match data.get(range.clone()) {
        Some(slice) => Ok(slice),
        None => bail!("a rank posted {} elements, expected at least {}", data.len(), range.end),
    }
}

/// Reduces elements `range` of all posts into `out`.
fn reduce_into(op: ReduceOp, posts: &[Arc<Post>], range: Range<usize>, mut out: ViewMut) -> Result<()> {
    with_element!(out.dtype(), T => {
        let parts: Vec<&[T]> = posts.iter().map(|post| slice(post, range.clone())).collect::<Result<_>>()?;
        reduce::<T>(op, &parts, out.cpu_mut::<T>()?);
        Ok(())
    })
}

/// Copies runs of rows, one per rank, to `out` one after the other.
fn concat<'a>(parts: impl Iterator<Item = Result<View<'a>>>, mut out: ViewMut) -> Result<()> {
    let mut start = 0;
    for part in parts {
        let part = part?;
        copy(part, out.reborrow().narrow(start, part.rows())?)?;
        start += part.rows();
    }
    Ok(())
}

/// The counts that a rank said it sends.
fn sent_counts(post: &Post) -> Result<&[usize]> {
    match &post.call.counts {
        Counts::Pairwise { send, .. } => Ok(send),
        _ => bail!("a rank posted no counts"),
    }
}

/// Rows of the ranks before `rank`.
fn before(counts: &[usize], rank: usize) -> usize {
    counts.iter().take(rank).sum()
}

impl ThreadComm {
    /// The rows of rank `r`: the caller's own where they are at hand, else what was posted.
    fn part<'a>(&self, own: View<'a>, r: usize, post: &'a Post) -> Result<View<'a>> {
        if r == self.place().rank { Ok(own) } else { rows(post) }
    }

    fn gather(&self, op: Op, call: Result<Call>, input: View, out: ViewMut, ex: &Exec) -> Result<()> {
        let pack = |_: &ViewMut| self.pack(input, ex);
        self.round(op, call, out, pack, |out, posts| {
            concat(posts.iter().enumerate().map(|(r, post)| self.part(input, r, post)), out)
        })
    }

    /// Leaves in `out` the rows of the reduction that begin at row `start`.
    fn scatter_reduced(
        &self,
        (op, reduce): (Op, ReduceOp),
        call: Result<Call>,
        input: View,
        start: usize,
        out: ViewMut,
        ex: &Exec,
    ) -> Result<()> {
        let pack = |_: &ViewMut| self.pack(input, ex);
        self.round(op, call, out, pack, |out, posts| {
            if posts.len() == 1 {
                return copy(input, out);
            }
            let row: usize = input.dims().iter().skip(1).product();
            let range = start * row..start * row + out.elem_count();
            reduce_into(reduce, posts, range, out)
        })
    }

    /// An all-reduce in two rounds: each rank reduces one part, then all parts are gathered.
    fn all_reduce_shared(&self, call: Call, data: ViewMut, op: ReduceOp, ex: &Exec) -> Result<()> {
        let Place { rank, size } = self.place();
        let (len, dtype) = (data.elem_count(), data.dtype());
        let pack = |data: &ViewMut| self.pack(data.as_view(), ex);
        let (data, part) = self.round(Op::AllReduce, Ok(call.clone()), data, pack, |data, posts| {
            let range = partition(len, size, rank);
            let mut part = ex.scratch(dtype, &[range.len()])?;
            reduce_into(op, posts, range, part.view_mut())?;
            Ok((data, part))
        })?;
        let pack = move |_: &ViewMut| Ok(Payload::Rows(part));
        self.round(Op::AllReduce, Ok(call), data.reshape(&[len])?, pack, |data, posts| {
            concat(posts.iter().map(|post| rows(post)), data)
        })
    }
}

impl Communicator for ThreadComm {
    fn rank(&self) -> usize {
        self.place().rank
    }

    fn world_size(&self) -> usize {
        self.place().size
    }

    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let ex: &Exec = ex;
        let (len, dtype) = (data.elem_count(), data.dtype());
        let call = self.place().all_reduce(&data, op);
        match call {
            Ok(call) if self.world_size() > 1 && len * dtype.size_in_bytes() >= SHARED_REDUCTION_BYTES => {
                self.all_reduce_shared(call, data, op, ex)
            }
            call => {
                let pack = |data: &ViewMut| self.pack(data.as_view(), ex);
                self.round(Op::AllReduce, call, data, pack, |data, posts| match posts.len() {
                    1 => Ok(()),
                    _ => reduce_into(op, posts, 0..len, data),
                })
            }
        }
    }

    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.gather(Op::AllGather, self.place().all_gather(&input, &out), input, out, ex)
    }

    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.gather(Op::AllGatherV, self.place().all_gather_v(&input, counts, &out), input, out, ex)
    }

    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let call = self.place().reduce_scatter(&input, &out, op);
        // Used only once the call has been checked, so the saturated value never is.
        let start = out.rows().saturating_mul(self.place().rank);
        self.scatter_reduced((Op::ReduceScatter, op), call, input, start, out, ex)
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
        let start = if call.is_ok() { before(counts, self.place().rank) } else { 0 };
        self.scatter_reduced((Op::ReduceScatterV, op), call, input, start, out, ex)
    }

    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let Place { rank, size } = self.place();
        let call = self.place().all_to_all(&input, &out);
        let pack = |_: &ViewMut| self.pack(input, ex);
        self.round(Op::AllToAll, call, out, pack, |out, posts| {
            let count = input.rows() / size;
            let sent = |(r, post)| self.part(input, r, post)?.narrow(rank * count, count);
            concat(posts.iter().map(Arc::as_ref).enumerate().map(sent), out)
        })
    }

    fn all_to_all_v(
        &self,
        input: View<'_>,
        send_counts: &[usize],
        out: ViewMut<'_>,
        recv_counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        let rank = self.place().rank;
        let call = self.place().all_to_all_v(&input, send_counts, &out, recv_counts);
        let pack = |_: &ViewMut| self.pack(input, ex);
        self.round(Op::AllToAllV, call, out, pack, |out, posts| {
            let sent = |(r, post)| {
                let send = sent_counts(post)?;
                let count = send.get(rank).copied().unwrap_or(0);
                self.part(input, r, post)?.narrow(before(send, rank), count)
            };
            concat(posts.iter().map(Arc::as_ref).enumerate().map(sent), out)
        })
    }

    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        let is_root = self.place().rank == root;
        let call = self.place().broadcast(&data, root);
        let pack = |data: &ViewMut| match is_root {
            true => self.pack(data.as_view(), ex),
            false => Ok(Payload::None),
        };
        self.round(Op::Broadcast, call, data, pack, |data, posts| match posts.get(root) {
            Some(post) if !is_root => copy(rows(post)?, data),
            _ => Ok(()),
        })
    }

    fn barrier(&self, _: &mut Exec) -> Result<()> {
        let call = Ok(Call::bare(Op::Barrier));
        self.round(Op::Barrier, call, (), |()| Ok(Payload::None), |(), _| Ok(()))
    }

    fn split(&self, color: usize, key: usize, _: &mut Exec) -> Result<Arc<dyn Communicator>> {
        let call = Ok(Call::bare(Op::Split));
        let pack = |_: &()| Ok(Payload::Split { color, key, board: OnceLock::new() });
        let child = self.round(Op::Split, call, (), pack, |(), posts| self.join(color, posts))?;
        Ok(Arc::new(child))
    }

    fn abort(&self, reason: &str) {
        self.board.world.fail(format!("{} aborted: {reason}", self.name()));
    }

    fn check(&self) -> Result<()> {
        match self.board.world.failure() {
            Some(_) => Err(self.failure("")),
            None => Ok(()),
        }
    }
}

impl ThreadComm {
    /// Joins the group of this rank's colour: its first member's post carries the board, which
    /// whoever gets there first makes; all would make the same.
    fn join(&self, color: usize, posts: &[Arc<Post>]) -> Result<ThreadComm> {
        let mut members: Vec<(usize, usize, &OnceLock<Arc<Board>>)> = Vec::new();
        for (rank, post) in posts.iter().enumerate() {
            match &post.payload {
                Payload::Split { color: c, key, board } if *c == color => members.push((*key, rank, board)),
                _ => {}
            }
        }
        members.sort_by_key(|&(key, rank, _)| (key, rank));
        let own = members.iter().position(|&(_, rank, _)| rank == self.place().rank);
        let (Some(&(_, _, cell)), Some(own)) = (members.first(), own) else {
            bail!("the split lost its own rank")
        };
        let world_ranks = || members.iter().map(|&(_, rank, _)| self.board.world_rank(rank)).collect();
        let board = cell.get_or_init(|| Board::new(&self.board.world, world_ranks()));
        Ok(self.child(own, board.clone()))
    }
}
