//! One rank in a group of GPUs that gather and add up arrays in each other's memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{OwnedRows, PeerBuffers};
use moe_kernels::{Exec, PreNorm, SlotRows, View, ViewMut};

use super::join::{Shared, share};
use super::memory::{Owned, Status, group};
use crate::collective::{AddNorm, RowNeeds};
use crate::communicator::Communicator;

/// Small all-reduces, and all-gathers and reduce-scatters of any size, for the ranks of one host. The kernels write to
/// each other's memory.
///
/// - **When.** An NCCL call takes some 15 us, however little data it moves. These kernels take only the time of a
///   launch and of a store over NVLink. A sum may include the addition to the residual stream and the norm that follow
///   in a decoder layer. For few rows every rank computes all of them; for thousands of rows each rank computes its
///   share.
/// - **Sums** are f32 additions in rank order, rounded once. The bits are the same on every rank and in every run, with
///   and without graphs. Only [`share_add_norm_into`](Self::share_add_norm_into) rounds the parts to bf16 before the
///   ranks send them.
/// - **Order.** All ranks launch the same calls in the same order, on the stream of the context that the group was made
///   with. A call returns when its work is on the stream. It can be recorded into a
///   [`Graph`](moe_kernels::cuda::Graph), which must be dropped before this object.
/// - **Failures.** A kernel that waits longer than the limit for a rank ends. Its results and all later ones are
///   garbage, and [`check`](Self::check) names the rank. The group does not recover. Arguments are not compared: ranks
///   that pass different sizes get wrong data or reach the limit.
pub struct PeerAllReduce {
    buffers: PeerBuffers,
    rank: usize,
    ranks: usize,
    status: Arc<Status>,
    stream: Arc<CudaStream>,
    _shared: Shared,
}

impl PeerAllReduce {
    /// Bytes of the largest sum that every rank computes completely: 256 tokens of H = 2,048 in f32.
    pub const CAPACITY: usize = 2 << 20;

    /// Makes the group of the ranks of `comm`, with the buffers on the device of `ex`. The inner error says why these
    /// ranks cannot share memory; it is the same on all of them. All ranks of `comm` must call it. `comm` exchanges
    /// host memory in the context `wire`: the CPU's context for a [`SocketComm`](crate::SocketComm), `ex` for an
    /// [`NcclComm`](crate::NcclComm). `limit` is how long a kernel waits for another rank.
    ///
    /// Ranks can share memory under these conditions: there are 2 to 8 of them on one host, each has its own GPU that
    /// the others may access, and `NCCL_P2P_DISABLE` is not set. `NCCL_HOSTID` tells hosts apart, as it does for NCCL.
    ///
    /// # Errors
    /// A context on the CPU; any error of a collective of `comm`.
    pub fn new(
        comm: &dyn Communicator,
        wire: &mut Exec,
        limit: Duration,
        ex: &Exec,
    ) -> Result<std::result::Result<Self, String>> {
        let rank = comm.rank();
        let ranks = comm.world_size();
        let stream = ex.stream()?.clone();
        let make = || {
            let own = Owned::new(ranks, Self::CAPACITY, ex)?;
            Ok((own, Arc::new(Status::new(stream.context())?)))
        };
        let (shared, status) = match share(comm, wire, ex, make)? {
            Ok(shared) => shared,
            Err(reason) => return Ok(Err(reason)),
        };
        let buffers = group(rank, &shared.addresses, Self::CAPACITY, &status, limit)?;
        Ok(Ok(Self { buffers, rank, ranks, status, stream, _shared: shared }))
    }

    /// Whether `rows` rows of H elements in f32 are few enough for every rank to add all of them.
    pub fn is_small(rows: usize, hidden: usize) -> bool {
        rows.saturating_mul(hidden).saturating_mul(size_of::<f32>()) <= Self::CAPACITY
    }

    /// Whether [`all_reduce_into`](Self::all_reduce_into) takes `count` elements of this dtype. All ranks get the same
    /// answer.
    pub fn fits(&self, dtype: DType, count: usize) -> bool {
        self.buffers.fits(dtype, count)
    }

    /// Whether [`all_reduce_add_norm_into`](Self::all_reduce_add_norm_into) takes `rows` rows of H elements.
    pub fn fits_norm(&self, rows: usize, hidden: usize) -> bool {
        self.buffers.fits_norm(rows, hidden)
    }

    /// Replaces `data` (f32 or bf16, any dims) on every rank by the sum of all ranks' `data`.
    ///
    /// # Errors
    /// A context on a stream that is not the group's; what [`fits`](Self::fits) refuses; the group has failed.
    pub fn all_reduce_into(&self, data: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.ready(ex)?;
        self.buffers.all_reduce_into(data, ex)
    }

    /// `residual` += the sum of all ranks' `partial`. If `norm` is given, its `out` = RMS norm of `residual`.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `partial` | [T, H] f32 |
    /// | `residual` | [T, H] f32, the same on all ranks before and after |
    /// | `norm` | weight \[H\] bf16 and `out` [T, H] bf16 |
    ///
    /// # Errors
    /// Wrong dims or dtypes; views whose address is not a multiple of 16 bytes; a context on a stream that is not the
    /// group's; what [`fits_norm`](Self::fits_norm) refuses; the group has failed.
    pub fn all_reduce_add_norm_into(
        &self,
        partial: View<'_>,
        residual: ViewMut<'_>,
        norm: Option<(&PreNorm<'_>, ViewMut<'_>)>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        self.buffers.all_reduce_add_rms_norm_into(partial, residual, norm, ex)
    }

    /// Whether [`share_add_norm_into`](Self::share_add_norm_into) takes `rows` rows of H elements.
    pub fn fits_share(&self, rows: usize, hidden: usize) -> bool {
        self.buffers.fits_share(rows, hidden)
    }

    /// For the rows that this rank keeps: `residual` += the sum of all ranks' `partial`, which are sent in bf16. For
    /// all rows: `out` = RMS norm of `residual`. T, H and the number of ranks decide which rows a rank keeps.
    ///
    /// | argument | shape, dtype |
    /// |---|---|
    /// | `partial` | [T, H] f32 |
    /// | `residual` | [T, H] f32; rows of other ranks are neither read nor written |
    /// | `norm` | weight \[H\] bf16 |
    /// | `out` | [T, H] bf16, the same bits on all ranks |
    ///
    /// # Errors
    /// The errors of [`all_reduce_add_norm_into`](Self::all_reduce_add_norm_into), and what
    /// [`fits_share`](Self::fits_share) refuses.
    pub fn share_add_norm_into(
        &self,
        partial: View<'_>,
        residual: ViewMut<'_>,
        norm: &PreNorm<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        self.buffers.share_add_rms_norm_into(partial, residual, norm, out, ex)
    }

    /// Whether [`all_gather_into`](Self::all_gather_into) takes arrays with these numbers of elements of each rank. All
    /// ranks get the same answer.
    pub fn fits_gather<'p>(&self, arrays: impl Iterator<Item = (DType, &'p [usize])>) -> bool {
        self.buffers.fits_gather(arrays)
    }

    /// For each pair: concatenates every rank's `input` [counts\[rank\], ..] in rank order into `out`
    /// [sum(counts), ..]. One call gathers all pairs. With `needs` there must be one pair, of floats, and a rank gets
    /// only the rows that it needs.
    ///
    /// # Errors
    /// A context on a stream that is not the group's; different dtypes in a pair or a wrong number of rows; what
    /// [`fits_gather`](Self::fits_gather) refuses; the group has failed.
    pub fn all_gather_into(
        &self,
        arrays: Vec<(View<'_>, ViewMut<'_>)>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        let needs = needs.map(|needs| (needs.ids, needs.owners));
        self.buffers.all_gather_into(arrays, counts, needs, ex)
    }

    /// Whether [`reduce_scatter_into`](Self::reduce_scatter_into) takes parts with these numbers of elements of each
    /// rank, of this dtype. All ranks get the same answer.
    pub fn fits_scatter(&self, dtype: DType, parts: &[usize]) -> bool {
        self.buffers.fits_scatter(dtype, parts)
    }

    /// `out` [counts\[rank\], ..] f32 = this rank's part of the sum over the ranks of `input` [sum(counts), ..] f32 or
    /// bf16, added in f32. With `needs`, the sum is over the ranks that need the row.
    ///
    /// # Errors
    /// A context on a stream that is not the group's; wrong dtypes or numbers of elements; what
    /// [`fits_scatter`](Self::fits_scatter) refuses; the group has failed.
    pub fn reduce_scatter_into(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        let needs = needs.map(|needs| (needs.ids, needs.owners));
        self.buffers.reduce_scatter_into(input, counts, needs, out, ex)
    }

    /// Whether [`combine_add_norm_into`](Self::combine_add_norm_into) takes K slots of H elements for `counts` rows of
    /// each rank. All ranks get the same answer.
    pub fn fits_combine(&self, counts: &[usize], top_k: usize, hidden: usize) -> bool {
        self.buffers.fits_combine(counts, top_k, hidden)
    }

    /// Each rank adds up the slots that it computed. `end.residual` [counts\[rank\], H] f32 += the sum of these results
    /// over the ranks; then `end.out` bf16 = RMS norm of the residual stream. With `needs`, the sum is over the ranks
    /// that need the row. See [`CombineAddNorm`](crate::FusedCollective::CombineAddNorm).
    ///
    /// # Errors
    /// The errors of [`all_reduce_add_norm_into`](Self::all_reduce_add_norm_into), and what
    /// [`fits_combine`](Self::fits_combine) refuses.
    pub fn combine_add_norm_into(
        &self,
        slots: &SlotRows<'_>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        end: AddNorm<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        let rows = OwnedRows { counts, needs: needs.map(|needs| (needs.ids, needs.owners)) };
        let AddNorm { residual, norm, out } = end;
        self.buffers.combine_add_rms_norm_into(slots, rows, residual, &norm, out, ex)
    }

    /// Whether [`dispatch_into`](Self::dispatch_into) takes rows of H elements with K experts, in these numbers from
    /// each rank. All ranks get the same answer.
    pub fn fits_dispatch(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        self.buffers.fits_dispatch(counts, top_k, hidden, dtype)
    }

    /// Sends rows to the ranks that own an expert of the row, and ids and weights to all; each argument is this rank's
    /// part and the place of all ranks' parts. See [`Dispatch`](crate::FusedCollective::Dispatch).
    ///
    /// # Errors
    /// A context on a stream that is not the group's; wrong dims or dtypes; what
    /// [`fits_dispatch`](Self::fits_dispatch) refuses; the group has failed.
    pub fn dispatch_into(
        &self,
        rows: (View<'_>, ViewMut<'_>),
        ids: (View<'_>, ViewMut<'_>),
        weights: (View<'_>, ViewMut<'_>),
        counts: &[usize],
        owners: View<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.ready(ex)?;
        self.buffers.dispatch_into(rows, ids, weights, counts, owners, ex)
    }

    /// Returns an error if a kernel has given up waiting or [`stop`](Self::stop) was called. Call it after the work
    /// whose results you want to use has ended.
    pub fn check(&self) -> Result<()> {
        match self.status.failure() {
            Some(cause) => bail!("{self:?}: {cause}"),
            None => Ok(()),
        }
    }

    /// Makes this rank's kernels stop waiting within some 10 ms, now and in the future. Any thread may call it.
    pub fn stop(&self) {
        self.status.stop();
    }

    /// The object that ends the waiting, for callers that must not hold the group.
    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.status
    }

    fn ready(&self, ex: &Exec) -> Result<()> {
        self.check()?;
        if ex.stream()?.cu_stream() != self.stream.cu_stream() {
            bail!("{self:?}: expected the context that the group was made with, got one on another stream")
        }
        Ok(())
    }
}

impl fmt::Debug for PeerAllReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerAllReduce(rank {} of {})", self.rank, self.ranks)
    }
}

impl Drop for PeerAllReduce {
    fn drop(&mut self) {
        // Kernels of this rank use every buffer. They end by themselves. A failure here cannot be reported to anyone.
        let _ = self.stream.synchronize();
    }
}
