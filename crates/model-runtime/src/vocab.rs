//! A vocabulary cut over the ranks of a tensor-parallel group. Each rank holds a run of rows of the embedding and of
//! the projection.
//!
//! On the CPU rows and logits are gathered, not added up. So their bits are the same as on one rank, signs of zero
//! included, and each row is sent once. On devices the host reads nothing: rows are added to zeros, and logits are
//! gathered.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
#[cfg(feature = "cuda")]
use moe_comm::ReduceOp;
use moe_comm::{Collectives, Communicator, partition, shares};
use moe_kernels::{Exec, View, ViewMut, WeightView, embedding_into};

/// The ranks that hold a vocabulary.
#[derive(Clone, Debug)]
pub struct VocabParallel {
    comm: Arc<dyn Communicator>,
    vocab_size: usize,
}

impl VocabParallel {
    /// A vocabulary of `vocab_size` ids over the ranks of `comm`. The runs may have different lengths.
    pub fn new(vocab_size: usize, comm: Arc<dyn Communicator>) -> Self {
        Self { comm, vocab_size }
    }

    /// Ids of the whole vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Ids on this rank.
    pub fn num_local(&self) -> usize {
        partition(self.vocab_size, self.comm.world_size(), self.comm.rank()).len()
    }

    /// `out` [T, H] (dtype of the table or f32) = the rows of `ids` `[T]` of the whole table, of
    /// which `table` [V_local, H] is this rank's run.
    pub(crate) fn embed_into(
        &self,
        table: WeightView,
        ids: View,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if ex.is_cuda() {
            return self.embed_on_device(table.rows("embedding")?, ids, out, ex);
        }
        let ranks = self.comm.world_size();
        let rank = self.comm.rank();
        let ids = ids.cpu::<u32>()?;
        let starts: Vec<usize> = (0..ranks).map(|r| partition(self.vocab_size, ranks, r).start).collect();
        let mut rows = vec![Vec::new(); ranks];
        for (t, &id) in ids.iter().enumerate() {
            if id as usize >= self.vocab_size {
                bail!("embedding: id {id} at position {t} is out of range; expected 0..{}", self.vocab_size)
            }
            let owner = starts.partition_point(|&start| start <= id as usize) - 1;
            rows[owner].push(t);
        }
        let own: Vec<u32> =
            rows[rank].iter().filter_map(|&t| ids.get(t)).map(|&id| id - starts[rank] as u32).collect();
        let width = out.dims().get(1).copied().unwrap_or(0);
        let mut mine = ex.scratch(table.dtype(), &[own.len(), width])?;
        embedding_into(table, View::new(&own, &[own.len()])?, mine.view_mut(), ex)?;

        let counts: Vec<usize> = rows.iter().map(Vec::len).collect();
        let mut all = ex.scratch(table.dtype(), &[ids.len(), width])?;
        self.comm.all_gather_v(mine.view(), &counts, all.view_mut(), ex)?;
        let mut order = vec![0u32; ids.len()];
        for (row, t) in (0u32..).zip(rows.into_iter().flatten()) {
            order[t] = row;
        }
        embedding_into(all.view(), View::new(&order, &[order.len()])?, out.reborrow(), ex)
    }

    /// `logits` [R, V] from the ranks' `local` [R, V_local], f32.
    pub(crate) fn gather_logits(&self, local: View, logits: ViewMut, ex: &mut Exec) -> Result<()> {
        let rows = local.rows();
        let ranks = self.comm.world_size();
        let widths = shares(self.vocab_size, ranks);
        let counts: Vec<usize> = widths.iter().map(|width| rows * width).collect();
        let flat = local.reshape(&[local.elem_count()])?;
        let mut out = logits.reshape(&[rows * self.vocab_size])?;
        if rows == 1 {
            return self.comm.all_gather_v(flat, &counts, out, ex);
        }
        let mut all = ex.scratch(DType::F32, &[rows * self.vocab_size])?;
        self.comm.all_gather_v(flat, &counts, all.view_mut(), ex)?;
        #[cfg(feature = "cuda")]
        if ex.is_cuda() {
            let out = out.reshape(&[rows, self.vocab_size])?;
            return moe_kernels::cuda::join_columns_into(all.view(), ranks, out, ex);
        }
        let all = all.view();
        let out = out.cpu_mut::<f32>()?;
        let mut rest = all.cpu::<f32>()?;
        let mut column = 0;
        for width in widths {
            let (block, tail) = rest.split_at(rows * width);
            for (from, to) in block.chunks(width.max(1)).zip(out.chunks_mut(self.vocab_size.max(1))) {
                to[column..column + width].copy_from_slice(from);
            }
            (rest, column) = (tail, column + width);
        }
        Ok(())
    }

    /// `embed_into` if only the device knows the ids: each rank has the rows of its own run and zeros elsewhere, and
    /// their sum is exact.
    #[cfg(feature = "cuda")]
    fn embed_on_device(&self, table: View, ids: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let first = partition(self.vocab_size, self.comm.world_size(), self.comm.rank()).start;
        moe_kernels::cuda::embed_part_into(table, first, ids, out.reborrow(), ex)?;
        self.comm.all_reduce(out, ReduceOp::Sum, ex)
    }
}
