//! Rows by rank: which rows go to which rank, and the copies that pack them.

use std::ops::Range;

use candle_core::{DType, Result};
use moe_kernels::{
    Exec, NO_EXPERT, RowBatches, Scratch, View, ViewMut, batch_rows_into, embedding_into, group_slots_into,
};

use crate::local_experts::LocalExperts;

/// Row numbers for each rank, one rank after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowLists {
    pub rows: Vec<u32>,
    pub counts: Vec<usize>,
}

impl RowLists {
    /// Collects the pairs (rank, row) that `fill` pushes. The rows of a rank keep their order.
    pub fn collect(
        ranks: usize,
        fill: impl FnOnce(&mut dyn FnMut(usize, usize)) -> Result<()>,
    ) -> Result<Self> {
        let mut lists = vec![Vec::new(); ranks];
        fill(&mut |rank, row| {
            if let Some(list) = lists.get_mut(rank) {
                list.push(row as u32);
            }
        })?;
        Ok(Self { counts: lists.iter().map(Vec::len).collect(), rows: lists.concat() })
    }

    /// The rows of each rank.
    pub fn by_rank(&self) -> impl Iterator<Item = &[u32]> {
        Layout::Exact.blocks(&self.counts).into_iter().map(|block| self.rows.get(block).unwrap_or(&[]))
    }
}

/// Where blocks of rows begin: directly one after the other, or each at a multiple of a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Exact,
    Fixed(usize),
}

impl Layout {
    /// The rows of each block, as counts for a collective.
    pub fn counts(self, counts: &[usize]) -> Vec<usize> {
        match self {
            Self::Exact => counts.to_vec(),
            Self::Fixed(size) => vec![size; counts.len()],
        }
    }

    /// The range of used rows in each block.
    pub fn blocks(self, counts: &[usize]) -> Vec<Range<usize>> {
        let starts = self.counts(counts).into_iter().scan(0, |end, count| {
            *end += count;
            Some(*end - count)
        });
        starts.zip(counts).map(|(start, count)| start..start + count).collect()
    }
}

/// Rows of a table, in one block per rank.
pub(crate) struct Packing<'a> {
    lists: &'a RowLists,
    layout: Layout,
    /// The lists, in memory of the context's device.
    placed: Scratch,
}

impl<'a> Packing<'a> {
    pub fn new(lists: &'a RowLists, layout: Layout, ex: &Exec) -> Result<Self> {
        Ok(Self {
            lists,
            layout,
            placed: ex.scratch_from_host(View::new(&lists.rows, &[lists.rows.len()])?)?,
        })
    }

    /// The rows of each block, as counts for a collective.
    pub fn counts(&self) -> Vec<usize> {
        self.layout.counts(&self.lists.counts)
    }

    /// Copies rows of `table` [R, W] into [rows of all blocks, W]. Rows that no block uses are unspecified.
    pub fn pack(&self, table: View, ex: &mut Exec) -> Result<Scratch> {
        let mut packed = ex.scratch(table.dtype(), &[self.counts().iter().sum(), width(table)])?;
        if self.layout == Layout::Exact {
            gather(table, self.placed.view(), packed.view_mut(), ex)?;
            return Ok(packed);
        }
        let listed = Layout::Exact.blocks(&self.lists.counts);
        for (list, block) in listed.into_iter().zip(self.layout.blocks(&self.lists.counts)) {
            let rows = self.placed.view().narrow(list.start, list.len())?;
            gather(table, rows, packed.view_mut().narrow(block.start, block.len())?, ex)?;
        }
        Ok(packed)
    }

    /// Like [`pack`](Self::pack), for ids [R, K] on the host. Rows that no block uses hold no expert.
    pub fn pack_ids(&self, ids: &[u32], top_k: usize, ex: &mut Exec) -> Result<Scratch> {
        let total: usize = self.counts().iter().sum();
        let mut packed = vec![NO_EXPERT; total * top_k];
        for (rows, block) in self.lists.by_rank().zip(self.layout.blocks(&self.lists.counts)) {
            for (to, &row) in packed[block.start * top_k..].chunks_mut(top_k.max(1)).zip(rows) {
                to.copy_from_slice(&ids[row as usize * top_k..][..top_k]);
            }
        }
        ex.scratch_from_host(View::new(&packed, &[total, top_k])?)
    }
}

/// out\[i\] = table[rows\[i\]].
pub(crate) fn gather(table: View, rows: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
    if rows.elem_count() == 0 {
        return Ok(());
    }
    embedding_into(table, rows, out, ex)
}

/// The size of the last dimension.
pub(crate) fn width(view: View) -> usize {
    view.dims().last().copied().unwrap_or(0)
}

/// Token rows, in one block for each local expert.
pub(crate) struct Batches {
    /// [E_local, room, H]
    pub rows: Scratch,
    /// \[E_local\] u32 rows in use.
    pub counts: Scratch,
    /// Expert e has the slots `slots[offsets[e]..offsets[e + 1]]`, one row each.
    pub offsets: Scratch,
    pub slots: Scratch,
}

/// Sorts `rows` [T, H] with `ids` [T, K] into blocks of `room` rows.
pub(crate) fn batch(
    rows: View,
    ids: View,
    experts: &LocalExperts,
    room: usize,
    ex: &mut Exec,
) -> Result<Batches> {
    let local = experts.num_local();
    let mut offsets = ex.scratch(DType::U32, &[local + 1])?;
    let mut slots = ex.scratch(DType::U32, &[ids.elem_count()])?;
    group_slots_into(ids, experts.expert_map(), offsets.view_mut(), slots.view_mut(), ex)?;
    let groups = RowBatches { offsets: offsets.view(), slots: slots.view(), top_k: width(ids) };
    let mut batched = ex.scratch(rows.dtype(), &[local, room, width(rows)])?;
    let mut counts = ex.scratch(DType::U32, &[local])?;
    batch_rows_into(rows, &groups, batched.view_mut(), counts.view_mut(), ex)?;
    Ok(Batches { rows: batched, counts, offsets, slots })
}
