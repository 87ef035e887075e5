//! Rows by rank: which rows go to whom, and the copies that pack and unpack them.

use std::ops::Range;

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, NO_EXPERT, Scratch, View, ViewMut, embedding_into};

/// Row numbers for each rank, one rank after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowLists {
    pub rows: Vec<u32>,
    pub counts: Vec<usize>,
}

impl RowLists {
    /// Lists what `fill` pushes as (rank, row); a rank keeps the order in which its rows come.
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
        let mut rest = self.rows.as_slice();
        self.counts.iter().map(move |&count| {
            let (rows, tail) = rest.split_at(count.min(rest.len()));
            rest = tail;
            rows
        })
    }
}

/// Where blocks of rows begin: one after the other, or each at a multiple of a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Exact,
    Fixed(usize),
}

impl Layout {
    /// Rows of each block, as collectives count them.
    pub fn counts(self, counts: &[usize]) -> Vec<usize> {
        match self {
            Self::Exact => counts.to_vec(),
            Self::Fixed(size) => vec![size; counts.len()],
        }
    }

    /// First row of each block.
    pub fn starts(self, counts: &[usize]) -> Vec<usize> {
        let ends = self.counts(counts).into_iter().scan(0, |end, count| {
            *end += count;
            Some(*end - count)
        });
        ends.collect()
    }

    /// The rows of each block.
    pub fn blocks(self, counts: &[usize]) -> Vec<Range<usize>> {
        self.starts(counts).into_iter().zip(counts).map(|(start, count)| start..start + count).collect()
    }

    /// Rows of all blocks.
    pub fn total(self, counts: &[usize]) -> usize {
        self.counts(counts).iter().sum()
    }
}

/// Copies rows of `table` [R, H] into one block per rank, [rows of all blocks, H].
pub(crate) fn pack_rows(
    op: &str,
    table: View,
    lists: &RowLists,
    layout: Layout,
    ex: &mut Exec,
) -> Result<Scratch> {
    let width = table.dims().get(1).copied().unwrap_or(0);
    let mut packed = ex.scratch(table.dtype(), &[layout.total(&lists.counts), width])?;
    for (rows, start) in lists.by_rank().zip(layout.starts(&lists.counts)) {
        check_block(op, layout, rows.len())?;
        gather(table, rows, packed.view_mut().narrow(start, rows.len())?, ex)?;
    }
    Ok(packed)
}

/// Copies rows of `table` [R, K] u32 into one block per rank; unused rows hold no expert.
pub(crate) fn pack_ids(
    op: &str,
    table: View,
    lists: &RowLists,
    layout: Layout,
    ex: &mut Exec,
) -> Result<Scratch> {
    let width = table.dims().get(1).copied().unwrap_or(0);
    let ids = table.cpu::<u32>()?;
    let mut packed = ex.scratch(DType::U32, &[layout.total(&lists.counts), width])?;
    let mut view = packed.view_mut();
    let out = view.cpu_mut::<u32>()?;
    out.fill(NO_EXPERT);
    for (rows, start) in lists.by_rank().zip(layout.starts(&lists.counts)) {
        check_block(op, layout, rows.len())?;
        for (to, &row) in out[start * width..].chunks_mut(width.max(1)).zip(rows) {
            to.copy_from_slice(&ids[row as usize * width..][..width]);
        }
    }
    Ok(packed)
}

/// out\[i\] = table[rows\[i\]].
pub(crate) fn gather(table: View, rows: &[u32], out: ViewMut, ex: &mut Exec) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    embedding_into(table, View::new(rows, &[rows.len()])?, out, ex)
}

fn check_block(op: &str, layout: Layout, rows: usize) -> Result<()> {
    match layout {
        Layout::Fixed(size) if rows > size => {
            bail!("{op}: {rows} rows for one rank, expected at most the fixed {size}")
        }
        _ => Ok(()),
    }
}
