//! One numeric block of attention for one task: keys and values out of the cache, scores,
//! softmax under the block's own maximum, weighted values.

use std::ops::Range;

use super::kernels::{ATTENTION_BLOCK, BlockSoftmax, WeighValues};
use super::{Driver, Local, Task};
use crate::cpu::dispatch;
use crate::cpu::pack::Pack;
use crate::cpu::product::chains;
use crate::cpu::simd::{LANES, Lanes};
use crate::cpu::stream::{Next, Stream};
use crate::cpu::tile::{Ahead, CACHE_LINE, Shape, Tile, UNIT};

impl<T: Lanes, Q: Lanes> Driver<'_, T, Q> {
    /// The partials of a task's rows over one block, into `local.stats` and `local.values`.
    /// Rows that see nothing of the block are left unspecified.
    pub(super) fn block(&self, task: &Task, block: usize, local: &mut Local) {
        let group = self.group();
        let width = self.width();
        let rows = task.rows.len() * group;
        local.visible.clear();
        let mut start = ATTENTION_BLOCK;
        let mut end = 0;
        for row in task.rows.clone() {
            let visible = self.visible_in(row, block);
            if !visible.is_empty() {
                start = start.min(visible.start);
                end = end.max(visible.end);
            }
            local.visible.extend(std::iter::repeat_n(visible, group));
        }
        let seen = start..end;
        if seen.is_empty() {
            return;
        }
        let isa = self.ex.isa();
        let places = self.places(task, block, &seen);
        let keys = self.keys(&places);
        let values = self.values(&places);
        self.scores(&keys, &values, &seen, rows, local);
        local.weights.resize(rows, [0.0; ATTENTION_BLOCK]);
        local.stats.resize(rows, (0.0, 0.0));
        let (first, second) = local.scores.split_at(rows);
        let softmax = BlockSoftmax {
            scores: [first, second],
            scale: self.a.scale,
            visible: &local.visible,
            weights: &mut local.weights,
            partials: &mut local.stats,
        };
        dispatch(isa, softmax);
        local.values.clear();
        local.values.resize(rows * width, 0.0);
        let mut next = [std::ptr::null(); ATTENTION_BLOCK];
        if block + 1 < task.blocks.end {
            let end = ATTENTION_BLOCK.min(task.end - (block + 1) * ATTENTION_BLOCK);
            next = self.key_lines(&self.places(task, block + 1, &(0..end)));
        }
        self.weigh(&values, &next, rows, local);
    }

    /// The cache's rows of the positions of a block. Positions outside of `seen` repeat its first row.
    fn places(&self, task: &Task, block: usize, seen: &Range<usize>) -> [usize; ATTENTION_BLOCK] {
        let size = self.a.block_size;
        let mut places = [0; ATTENTION_BLOCK];
        let mut offset = seen.start;
        while offset < seen.end {
            let position = block * ATTENTION_BLOCK + offset;
            let run = (size - position % size).min(seen.end - offset);
            let cache_block = task.cache_blocks[position / size] as usize;
            let slot = (cache_block * self.a.num_kv_heads + task.kv_head) * size + position % size;
            for (i, place) in places[offset..offset + run].iter_mut().enumerate() {
                *place = slot + i;
            }
            offset += run;
        }
        let first = places[seen.start];
        places[..seen.start].fill(first);
        places[seen.end..].fill(first);
        places
    }

    /// The keys in these rows of the cache.
    fn keys(&self, places: &[usize; ATTENTION_BLOCK]) -> [&[T]; ATTENTION_BLOCK] {
        places.map(|row| &self.a.k_cache[row * self.a.head_dim..][..self.a.head_dim])
    }

    /// The values in these rows of the cache.
    fn values(&self, places: &[usize; ATTENTION_BLOCK]) -> [&[T]; ATTENTION_BLOCK] {
        places.map(|row| &self.a.v_cache[row * self.a.value_row..][..self.a.value_dim])
    }

    /// Pointers to the keys in these rows, to fetch.
    fn key_lines(&self, places: &[usize; ATTENTION_BLOCK]) -> [*const u8; ATTENTION_BLOCK] {
        places.map(|row| self.a.k_cache.as_ptr().wrapping_add(row * self.a.head_dim).cast())
    }

    /// Cache lines of a row of this many values.
    fn row_lines(values: usize) -> usize {
        (values * size_of::<T>()).div_ceil(CACHE_LINE)
    }

    /// q · k of all rows with the positions of a block, into `local.scores` unit by unit. Where keys
    /// are streamed, the values that will be weighted are fetched meanwhile.
    fn scores(
        &self,
        keys: &[&[T]; ATTENTION_BLOCK],
        values: &[&[T]; ATTENTION_BLOCK],
        seen: &Range<usize>,
        rows: usize,
        local: &mut Local,
    ) {
        let isa = self.ex.isa();
        let (vectors, most) = dispatch(isa, Shape);
        let d = self.a.head_dim;
        local.scores.resize(2 * rows, [0.0; UNIT]);
        for (unit, keys) in keys.as_chunks::<UNIT>().0.iter().enumerate() {
            if seen.end <= unit * UNIT || seen.start >= (unit + 1) * UNIT {
                continue;
            }
            let scores = &mut local.scores[unit * rows..(unit + 1) * rows];
            if rows <= most {
                let values = &values.as_chunks::<UNIT>().0[unit];
                let values = values.map(|row| row.as_ptr().cast());
                let next = Next::Rows(Ahead {
                    rows: &values,
                    first: 0,
                    count: UNIT * Self::row_lines(self.a.value_dim),
                });
                let x = &local.q[..];
                dispatch(isa, Stream { rows: keys, next, x, m: rows, segments: 1, out: scores });
                continue;
            }
            let span = LANES * vectors;
            for vector in (0..2).step_by(vectors) {
                for chain in chains(d, 1) {
                    local.keys.resize(chain.len * span, 0);
                    for i in 0..vectors {
                        let keys = keys.as_chunks::<LANES>().0[vector + i];
                        let range = chain.start..chain.start + chain.len;
                        let out = &mut local.keys[i * LANES..];
                        dispatch(isa, Pack::<T, 1> { rows: &keys, range, stride: span, out });
                    }
                    for start in (0..rows).step_by(most) {
                        let m = most.min(rows - start);
                        // Near the diagonal a tile may see none of these keys.
                        let first = unit * UNIT + vector * LANES;
                        let is_seen = |v: &Range<usize>| v.start < first + span && first < v.end;
                        if !local.visible[start..start + m].iter().any(is_seen) {
                            continue;
                        }
                        let x = &local.q[start * d + chain.start * m..][..chain.len * m];
                        let out = &mut scores[start..start + m];
                        let w = &local.keys[..];
                        let add = chain.add;
                        dispatch(isa, Tile { x, w, m, vector, out, add, ahead: Ahead::NONE });
                    }
                }
            }
        }
    }

    /// Adds the weighted values, tile by tile. Positions that all rows of a tile see are added for the whole tile.
    /// Positions before and after them, which only some rows see, are added row by row, so that every chain covers
    /// exactly what its row sees. The next keys are prefetched meanwhile.
    fn weigh(
        &self,
        values: &[&[T]; ATTENTION_BLOCK],
        next: &[*const u8; ATTENTION_BLOCK],
        rows: usize,
        local: &mut Local,
    ) {
        let isa = self.ex.isa();
        let width = self.width();
        let (_, most) = dispatch(isa, Shape);
        let mut ahead = Ahead { rows: next, first: 0, count: next.len() * Self::row_lines(self.a.head_dim) };
        let mut add = |range: Range<usize>, visible: Range<usize>| {
            if !visible.is_empty() {
                let weights = &local.weights[range.clone()];
                let out = &mut local.values[range.start * width..range.end * width];
                dispatch(isa, WeighValues { weights, visible, values, out, width, ahead });
                ahead = Ahead::NONE;
            }
        };
        for start in (0..rows).step_by(most) {
            let tile = start..rows.min(start + most);
            let visible = &local.visible[tile.clone()];
            let first = visible.iter().map(|v| v.start).max().unwrap_or(0);
            let last = visible.iter().map(|v| v.end).min().unwrap_or(0).max(first);
            for (i, v) in tile.clone().zip(visible) {
                add(i..i + 1, v.start..v.end.min(first));
            }
            add(tile.clone(), first..last);
            for (i, v) in tile.clone().zip(visible) {
                add(i..i + 1, v.start.max(last)..v.end);
            }
        }
    }
}
