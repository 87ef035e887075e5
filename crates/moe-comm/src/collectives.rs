//! The collectives as callers write them. The names are the names of MPI and NCCL.

use candle_core::Result;
use moe_kernels::{Exec, View, ViewMut};

use crate::collective::{Collective, ReduceOp};
use crate::communicator::Communicator;

/// The collectives of every [`Communicator`], with its conventions and errors. A method without counts is the method
/// with counts (`_v`) where all counts are equal.
pub trait Collectives: Communicator {
    /// Replaces `data` on every rank by the reduction of all ranks' `data`, element by element.
    /// Any dims, the same on all ranks.
    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        self.run(Collective::AllReduce { data, op }, ex)
    }

    /// Concatenates `input` [R, ..], of the same R on all ranks, in rank order into `out`
    /// [world_size * R, ..].
    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.all_gather_v(input, &vec![input.rows(); self.world_size()], out, ex)
    }

    /// Concatenates `input` [counts\[rank\], ..] in rank order into `out` [sum(counts), ..].
    /// `counts` has one entry per rank and is the same on all ranks.
    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.run(Collective::AllGather { input, counts, out }, ex)
    }

    /// Reduces all ranks' `input` [world_size * R, ..] and leaves the rank-th R rows of the
    /// result in `out` [R, ..].
    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let counts = vec![out.rows(); self.world_size()];
        self.reduce_scatter_v(input, &counts, out, op, ex)
    }

    /// Reduces all ranks' `input` [sum(counts), ..] and leaves this rank's rows of the result in
    /// `out` [counts\[rank\], ..]. `counts` has one entry per rank and is the same on all ranks.
    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        self.run(Collective::ReduceScatter { input, counts, out, op }, ex)
    }

    /// Sends the s-th R rows of `input` [world_size * R, ..] to rank s, and receives the same
    /// from every rank, in rank order, into `out` [world_size * R, ..].
    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let size = self.world_size();
        let counts = vec![input.rows() / size; size];
        self.all_to_all_v(input, &counts, out, &counts, ex)
    }

    /// Sends `send[s]` rows of `input` [sum(send), ..] to each rank s, in rank order, and receives
    /// `recv[s]` rows from each rank s, in rank order, into `out` [sum(recv), ..]. What a rank
    /// sends must be what the other expects.
    fn all_to_all_v(
        &self,
        input: View<'_>,
        send: &[usize],
        out: ViewMut<'_>,
        recv: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        self.run(Collective::AllToAll { input, send, out, recv }, ex)
    }

    /// Replaces `data` on every rank by rank `root`'s. Any dims, the same on all ranks.
    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        self.run(Collective::Broadcast { data, root }, ex)
    }

    /// Returns once every rank has called it.
    fn barrier(&self, ex: &mut Exec) -> Result<()> {
        self.run(Collective::Barrier, ex)
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}
