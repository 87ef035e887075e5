//! Units of a product on vector registers.
//!
//! A unit with few rows of x streams its weights ([`super::stream`]); one with more packs each
//! chain of its weights once and multiplies it with every tile of x ([`super::tile`]).

use std::cell::RefCell;
use std::marker::PhantomData;

use super::dispatch;
use super::gemm::{Method, Work, even_parts};
use super::pack::Pack;
use super::product::{Chain, K_BLOCK, Step, chains, row_words};
use super::simd::{LANES, Lanes};
use super::stream::{Next, Stream};
use super::tile::{Ahead, CACHE_LINE, MAX_ROWS, Shape, Tile, UNIT, UnitSums};
use crate::exec::CpuIsa;

/// The vector registers of a path, with its way to advance chains.
pub(crate) struct Vectors<P> {
    pub isa: CpuIsa,
    pub step: PhantomData<P>,
}

thread_local! {
    /// Panel and sums of the unit that this thread works on; kept so that steps do not allocate.
    static LOCAL: RefCell<(Vec<u32>, Vec<UnitSums>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<T: Lanes, P: Step> Method<T> for Vectors<P> {
    /// The panel costs about as much as eight rows; the sums of a unit and the tiles of x stay in
    /// the second-level cache.
    const PIECE_ROWS: usize = 240;

    /// As even as can be: a small tile does not hide the latency of its chains.
    fn tiles(&self, m: usize) -> impl Iterator<Item = (usize, usize)> {
        even_parts(m, m.div_ceil(dispatch(self.isa, Shape).1))
    }

    fn row_words(&self, k: usize, segments: usize) -> usize {
        row_words(k, segments, P::DEPTH)
    }

    fn pack(&self, rows: &[&[T]; LANES], m: usize, segments: usize, panel: &mut [u32]) {
        for chain in chains(rows[0].len(), segments, P::DEPTH) {
            let out = &mut panel[chain.word * m..];
            let range = chain.start..chain.start + chain.len;
            dispatch(self.isa, Pack { rows, range, stride: m, out, step: self.step });
        }
    }

    fn unit(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums])) {
        if work.m <= dispatch(self.isa, Shape).1 {
            self.stream(work, take);
        } else {
            LOCAL.with_borrow_mut(|(panel, sums)| self.tiled(work, panel, sums, take));
        }
    }
}

impl<P: Step> Vectors<P> {
    /// One tile of x.
    fn stream<T: Lanes>(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums])) {
        let mut sums = [[0.0; UNIT]; MAX_ROWS];
        let out = &mut sums[..work.m];
        let &Work { rows, next, x, m, segments } = work;
        dispatch(self.isa, Stream { rows, next: Next::Unit(next), x, m, segments, out, step: self.step });
        take(&sums[..work.m]);
    }

    /// Several tiles of x.
    fn tiled<T: Lanes>(
        &self,
        work: &Work<T>,
        panel: &mut Vec<u32>,
        sums: &mut Vec<UnitSums>,
        take: impl FnOnce(&[UnitSums]),
    ) {
        let (vectors, _) = dispatch(self.isa, Shape);
        panel.resize(K_BLOCK * LANES * vectors, 0);
        sums.clear();
        sums.resize(2 * work.m, [0.0; UNIT]);
        let (total, segment) = sums.split_at_mut(work.m);
        for vector in (0..2).step_by(vectors) {
            let rows = &work.rows[vector * LANES..(vector + vectors) * LANES];
            for chain in chains(rows[0].len(), work.segments, P::DEPTH) {
                let panel = &mut panel[..chain.len.div_ceil(P::DEPTH) * LANES * vectors];
                for (i, rows) in rows.as_chunks().0.iter().enumerate() {
                    let (out, range) = (&mut panel[i * LANES..], chain.start..chain.start + chain.len);
                    let stride = LANES * vectors;
                    dispatch(self.isa, Pack { rows, range, stride, out, step: self.step });
                }
                let to = if chain.to_segment { &mut *segment } else { &mut *total };
                self.tiles(work, panel, rows, vector, chain, to);
                if let Some(add) = chain.flush {
                    flush(segment, total, add, vector * LANES..(vector + vectors) * LANES);
                }
            }
        }
        take(total);
    }

    /// All tiles of x over one packed chain, while the weights of the next one are fetched.
    fn tiles<T: Lanes>(
        &self,
        work: &Work<T>,
        w: &[u32],
        rows: &[&[T]],
        vector: usize,
        chain: Chain,
        to: &mut [UnitSums],
    ) {
        let k = rows[0].len();
        let (words, chain_words) = (row_words(k, work.segments, P::DEPTH), chain.len.div_ceil(P::DEPTH));
        let end = chain.start + chain.len;
        let next = if end < k { end } else { work.next };
        let mut starts = [std::ptr::null(); UNIT];
        for (start, row) in starts.iter_mut().zip(rows) {
            *start = row.as_ptr().wrapping_add(next).cast();
        }
        let lines = rows.len() * (chain.len * size_of::<T>()).div_ceil(CACHE_LINE);
        let tiles = || Method::<T>::tiles(self, work.m);
        for ((start, m), (first, count)) in tiles().zip(even_parts(lines, tiles().count())) {
            let tile = Tile {
                x: &work.x[start * words + chain.word * m..][..chain_words * m],
                w,
                m,
                vector,
                out: &mut to[start..start + m],
                add: chain.add,
                ahead: Ahead { rows: &starts[..rows.len()], first, count },
                step: self.step,
            };
            dispatch(self.isa, tile);
        }
    }
}

/// Adds the sums of a segment to the totals, or starts the totals with them.
fn flush(segment: &[UnitSums], total: &mut [UnitSums], add: bool, lanes: std::ops::Range<usize>) {
    for (total, segment) in total.iter_mut().zip(segment) {
        for (total, segment) in total[lanes.clone()].iter_mut().zip(&segment[lanes.clone()]) {
            *total = if add { *total + segment } else { *segment };
        }
    }
}
