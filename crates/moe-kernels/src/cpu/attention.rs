//! Attention over a paged KV cache.
//!
//! Positions are walked in numeric blocks of [`ATTENTION_BLOCK`] that are aligned at position 0 and have nothing to do
//! with the cache's block size. Each row has a partial result for each block that it sees. A partial depends on no
//! other block: it consists of the scores (products of length D in the order of [`super::product`], then times scale),
//! their maximum over the visible positions, weights exp(score - maximum), the sum of the weights (lane = offset % 16,
//! ascending, then folded), and the weighted values, one chain per output over the visible positions in ascending
//! order. Partials are merged in ascending order of blocks. So a row's bits depend on its query and its visible keys
//! and values alone.
//!
//! The query heads that share a KV head, and neighbouring query rows, are the rows of one product, so that keys and
//! values are read once for all of them. If there are fewer such tasks than threads, the blocks are distributed over
//! tasks as well: each task stores its partials, and a merge in the same order follows.
//!
//! A head may have a sink, a logit that belongs to no position. It is merged last, as a partial of weight 1 whose
//! values are zero: a term of the denominator alone.

mod block;
mod kernels;

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{DType, Result};

pub use self::kernels::ATTENTION_BLOCK;
use self::kernels::{BlockWeights, Divide, Merge, MergeRows, MergeSink, Partial};
use super::dispatch;
use super::pack::Pack;
use super::parallel::for_each;
use super::product::chains;
use super::shared::Shared;
use super::simd::{LANES, Lanes};
use super::tile::{Shape, UnitSums};
use crate::exec::Exec;

/// The largest number of query rows times heads of one task: sixteen tiles that share each packed block of keys. Tasks
/// are smaller if there would be too few of them.
const MAX_TASK_ROWS: usize = 192;

/// Fewest blocks that are worth a task of their own.
const SPLIT_BLOCKS: usize = 4;

/// The rows of one sequence.
pub(crate) struct Sequence<'a> {
    /// Cache block of positions `i * block_size..`.
    pub blocks: &'a [u32],
    /// Its rows.
    pub rows: Range<usize>,
}

/// Arguments of attention, checked.
pub(crate) struct Attention<'a, T, Q> {
    /// [T, Hq, D].
    pub q: &'a [Q],
    /// [num_blocks, Hkv, block_size, D].
    pub k_cache: &'a [T],
    /// [num_blocks, Hkv, block_size, value_row]; may be the keys.
    pub v_cache: &'a [T],
    pub block_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Length of a row of `v_cache`.
    pub value_row: usize,
    /// Values at the start of such a row that are the value.
    pub value_dim: usize,
    pub sequences: &'a [Sequence<'a>],
    /// Position of each row.
    pub positions: &'a [u32],
    pub scale: f32,
    pub window: Option<usize>,
    /// A logit for each head, \[Hq\], that takes part in the softmax of its rows.
    pub sinks: Option<&'a [f32]>,
}

/// Computes attention for the rows of all sequences.
pub(crate) fn attend<T: Lanes, Q: Lanes>(a: &Attention<T, Q>, out: &mut [T], ex: &Exec) -> Result<()> {
    Driver { a, ex }.run(out)
}

/// Rows of one sequence under one KV head, over some of its blocks.
#[derive(Clone)]
struct Task<'a> {
    cache_blocks: &'a [u32],
    kv_head: usize,
    rows: Range<usize>,
    blocks: Range<usize>,
    /// Positions below this are seen.
    end: usize,
}

/// Buffers of a task.
#[derive(Default)]
struct Local {
    q: Vec<u32>,
    keys: Vec<u32>,
    scores: Vec<UnitSums>,
    weights: Vec<BlockWeights>,
    /// The offsets in this block that each row sees.
    visible: Vec<Range<usize>>,
    /// Maximum and sum of each row's partial of this block.
    stats: Vec<(f32, f32)>,
    values: Vec<f32>,
    /// Whether a row has seen a block yet. If so, the next two fields have its maximum and sum, and its values, over
    /// the blocks so far.
    seen: Vec<bool>,
    merged_stats: Vec<(f32, f32)>,
    merged_values: Vec<f32>,
}

thread_local! {
    /// The buffers are kept per thread, so that steps do not allocate.
    static LOCAL: RefCell<Local> = RefCell::new(Local::default());
}

struct Driver<'a, T, Q> {
    a: &'a Attention<'a, T, Q>,
    ex: &'a Exec,
}

impl<T: Lanes, Q: Lanes> Driver<'_, T, Q> {
    fn group(&self) -> usize {
        self.a.num_heads / self.a.num_kv_heads
    }

    /// Size of a value, rounded up to whole vectors.
    fn width(&self) -> usize {
        self.a.value_dim.next_multiple_of(LANES)
    }

    /// Positions that a row sees.
    fn visible(&self, row: usize) -> Range<usize> {
        let end = self.a.positions[row] as usize + 1;
        self.a.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Offsets within a block that a row sees.
    fn visible_in(&self, row: usize, block: usize) -> Range<usize> {
        let visible = self.visible(row);
        let at = |position: usize| position.saturating_sub(block * ATTENTION_BLOCK).min(ATTENTION_BLOCK);
        at(visible.start)..at(visible.end)
    }

    /// Blocks that some of these rows see.
    fn blocks(&self, rows: Range<usize>) -> Range<usize> {
        let mut start = usize::MAX;
        let mut end = 0;
        for row in rows {
            let visible = self.visible(row);
            start = start.min(visible.start / ATTENTION_BLOCK);
            end = end.max(visible.end.div_ceil(ATTENTION_BLOCK));
        }
        start..end
    }

    fn run(&self, out: &mut [T]) -> Result<()> {
        let total: usize = self.a.sequences.iter().map(|s| s.rows.len() * self.a.num_heads).sum();
        let rows = (total / (4 * self.ex.num_threads())).clamp(MAX_TASK_ROWS / 8, MAX_TASK_ROWS);
        let per_task = (rows / self.group()).max(1);
        let mut tasks = Vec::new();
        let mut work = 0;
        for sequence in self.a.sequences {
            for start in sequence.rows.clone().step_by(per_task) {
                let rows = start..sequence.rows.end.min(start + per_task);
                let blocks = self.blocks(rows.clone());
                let end = rows.clone().map(|row| self.visible(row).end).max().unwrap_or(0);
                work += blocks.len() * rows.len() * self.a.num_heads * ATTENTION_BLOCK * self.a.head_dim;
                for kv_head in 0..self.a.num_kv_heads {
                    let rows = rows.clone();
                    let blocks = blocks.clone();
                    tasks.push(Task { cache_blocks: sequence.blocks, kv_head, rows, blocks, end });
                }
            }
        }
        if tasks.len() < 2 * self.ex.num_threads()
            && tasks.iter().any(|task| task.blocks.len() >= 2 * SPLIT_BLOCKS)
        {
            return self.run_split(&tasks, work, out);
        }
        let out = Shared::new(out);
        for_each(self.ex, tasks.len(), work, |i| {
            LOCAL.with_borrow_mut(|local| self.whole(&tasks[i], local, &out));
        });
        Ok(())
    }

    /// All blocks of a task, merged as they come.
    fn whole(&self, task: &Task, local: &mut Local, out: &Shared<T>) {
        let rows = task.rows.len() * self.group();
        let width = self.width();
        self.start(task, local);
        local.seen.clear();
        local.seen.resize(rows, false);
        local.merged_stats.resize(rows, (0.0, 0.0));
        local.merged_values.resize(rows * width, 0.0);
        for block in task.blocks.clone() {
            self.block(task, block, local);
            let merge = MergeRows {
                visible: &local.visible,
                seen: &mut local.seen,
                width,
                stats: &local.stats,
                values: &local.values,
                into_stats: &mut local.merged_stats,
                into_values: &mut local.merged_values,
            };
            dispatch(self.ex.isa(), merge);
        }
        for i in 0..rows {
            let values = &mut local.merged_values[i * width..(i + 1) * width];
            let stats = &mut local.merged_stats[i];
            self.finish(task, i, Partial { stats, values }, out);
        }
    }

    /// Adds the sink to row i of a task, divides and writes it.
    fn finish(&self, task: &Task, i: usize, row_of: Partial, out: &Shared<T>) {
        let (row, head) = self.place(task, i);
        let d = self.a.value_dim;
        let Partial { stats, values } = row_of;
        if let Some(sinks) = self.a.sinks {
            let into = Partial { stats: &mut *stats, values: &mut *values };
            dispatch(self.ex.isa(), MergeSink { into, logit: sinks[head] });
        }
        let sum = stats.1;
        // SAFETY: each (row, head) belongs to one task, and within it to one i.
        let out = unsafe { out.range((row * self.a.num_heads + head) * d, d) };
        dispatch(self.ex.isa(), Divide { values, sum, out });
    }

    /// Query row and query head of row i of a task.
    fn place(&self, task: &Task, i: usize) -> (usize, usize) {
        (task.rows.start + i / self.group(), task.kv_head * self.group() + i % self.group())
    }

    /// Cuts the blocks among tasks; partials go to scratch and are merged after.
    fn run_split(&self, tasks: &[Task], work: usize, out: &mut [T]) -> Result<()> {
        let group = self.group();
        let width = self.width();
        let pieces = (2 * self.ex.num_threads()).div_ceil(tasks.len().max(1));
        let mut parts = Vec::new();
        let mut slots = 0;
        let mut first_slot = Vec::with_capacity(tasks.len());
        for task in tasks {
            first_slot.push(slots);
            let step = task.blocks.len().div_ceil(pieces).max(SPLIT_BLOCKS);
            for start in task.blocks.clone().step_by(step) {
                let blocks = start..task.blocks.end.min(start + step);
                let slot = slots + (start - task.blocks.start) * task.rows.len() * group;
                parts.push((Task { blocks, ..task.clone() }, slot));
            }
            slots += task.blocks.len() * task.rows.len() * group;
        }
        // Per row and block: the values, then maximum and sum.
        let stride = width + 2;
        let mut scratch = self.ex.scratch(DType::F32, &[slots, stride])?;
        let mut view = scratch.view_mut();
        let partials = Shared::new(view.cpu_mut::<f32>()?);
        for_each(self.ex, parts.len(), work, |i| {
            LOCAL.with_borrow_mut(|local| {
                let (task, slot) = &parts[i];
                self.start(task, local);
                let rows = task.rows.len() * group;
                // SAFETY: the slots of a part belong to it alone.
                let to = unsafe { partials.range(slot * stride, task.blocks.len() * rows * stride) };
                for (block, to) in task.blocks.clone().zip(to.chunks_exact_mut(rows * stride)) {
                    self.block(task, block, local);
                    for (i, to) in to.chunks_exact_mut(stride).enumerate() {
                        to[..width].copy_from_slice(&local.values[i * width..(i + 1) * width]);
                        (to[width], to[width + 1]) = local.stats[i];
                    }
                }
            });
        });
        let out = Shared::new(out);
        let partials = view.cpu_mut::<f32>()?;
        for (task, first) in tasks.iter().zip(first_slot) {
            self.merge_stored(task, &mut partials[first * stride..], &out);
        }
        Ok(())
    }

    /// Merges the stored partials of a task's rows, block by block in ascending order.
    fn merge_stored(&self, task: &Task, partials: &mut [f32], out: &Shared<T>) {
        let rows = task.rows.len() * self.group();
        let width = self.width();
        let stride = width + 2;
        for i in 0..rows {
            let row = self.place(task, i).0;
            let visible = self.blocks(row..row + 1);
            let at = |block: usize| ((block - task.blocks.start) * rows + i) * stride;
            let (earlier, later) = partials.split_at_mut(at(visible.start) + stride);
            let into = &mut earlier[at(visible.start)..];
            for block in visible.start + 1..visible.end {
                let from = &later[at(block) - at(visible.start) - stride..][..stride];
                let (values, rest) = into.split_at_mut(width);
                let mut stats = (rest[0], rest[1]);
                let merge = Merge {
                    into: Partial { stats: &mut stats, values },
                    stats: (from[width], from[width + 1]),
                    values: &from[..width],
                };
                dispatch(self.ex.isa(), merge);
                (rest[0], rest[1]) = stats;
            }
            let (values, rest) = into.split_at_mut(width);
            let mut stats = (rest[0], rest[1]);
            self.finish(task, i, Partial { stats: &mut stats, values }, out);
        }
    }

    /// Packs the queries of a task.
    fn start(&self, task: &Task, local: &mut Local) {
        let (_, most) = dispatch(self.ex.isa(), Shape);
        let d = self.a.head_dim;
        let rows = task.rows.len() * self.group();
        local.q.resize(rows * d, 0);
        for start in (0..rows).step_by(most) {
            let m = most.min(rows - start);
            let q: [&[Q]; LANES] = std::array::from_fn(|j| {
                let (row, head) = self.place(task, start + j.min(m - 1));
                &self.a.q[(row * self.a.num_heads + head) * d..][..d]
            });
            let panel = &mut local.q[start * d..(start + m) * d];
            for chain in chains(d, 1) {
                let out = &mut panel[chain.start * m..];
                let range = chain.start..chain.start + chain.len;
                let pack = Pack::<Q, 1> { rows: &q, range, stride: m, out };
                dispatch(self.ex.isa(), pack);
            }
        }
    }
}
