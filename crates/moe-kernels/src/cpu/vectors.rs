//! Units of a product on vector registers.
//!
//! A unit with few rows of x streams its weights ([`super::stream`], [`super::panel`]); one with more packs
//! each chain of its weights once and multiplies it with every tile of x ([`super::tile`]).

use std::cell::RefCell;
use std::ops::Range;

use super::dispatch;
use super::pack::Pack;
use super::panel::{Expand, PanelRows, PanelUnit, flush, following, panels_from};
use super::product::{Chain, K_BLOCK, chains};
use super::simd::{LANES, Lanes};
use super::stream::{Next, Stream};
use super::tile::{Ahead, CACHE_LINE, MAX_ROWS, Shape, Tile, UNIT, UnitSums};
use super::units::{Method, UnitWeights, Work, even_parts};
use crate::exec::CpuIsa;

/// The vector registers of a path.
pub(crate) struct Vectors {
    pub isa: CpuIsa,
    /// Whether weights are in panels.
    pub panels: bool,
}

/// The largest number of tiles of x for which panels are not expanded: each of them widens the weights again.
const DIRECT_TILES: usize = 2;

thread_local! {
    /// Panel and sums of the unit that this thread works on; kept so that steps do not allocate.
    static LOCAL: RefCell<(Vec<u32>, Vec<UnitSums>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<T: Lanes> Method<T> for Vectors {
    /// The panel costs about as much as eight rows; the sums of a unit and the tiles of x stay in
    /// the second-level cache.
    const PIECE_ROWS: usize = 240;

    /// The tiles are of nearly equal size, because a small tile does not hide the latency of its chains.
    fn tiles(&self, m: usize) -> impl Iterator<Item = (usize, usize)> {
        even_parts(m, m.div_ceil(self.tile_rows(m)))
    }

    fn row_words(&self, k: usize, _segments: usize) -> usize {
        k
    }

    fn pack(&self, rows: &[&[T]; LANES], m: usize, segments: usize, panel: &mut [u32]) {
        for chain in chains(rows[0].len(), segments) {
            let out = &mut panel[chain.start * m..];
            let range = chain.start..chain.start + chain.len;
            dispatch(self.isa, Pack::<T, 1> { rows, range, stride: m, out });
        }
    }

    fn unit(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums])) {
        let is_direct = self.is_direct(work.m);
        LOCAL.with_borrow_mut(|(panel, sums)| match work.weights {
            UnitWeights::Panels(panels) if is_direct => {
                self.direct(work, panels, sums, take);
            }
            UnitWeights::Rows(rows) if work.m <= self.tile_rows(work.m) => self.stream(work, rows, take),
            _ => self.tiled(work, panel, sums, take),
        });
    }
}

impl Vectors {
    /// Whether m rows of x multiply panels as they are.
    fn is_direct(&self, m: usize) -> bool {
        self.panels && m <= DIRECT_TILES * dispatch(self.isa, PanelRows)
    }

    /// Rows of a tile of x where there are m of them.
    fn tile_rows(&self, m: usize) -> usize {
        if self.is_direct(m) { dispatch(self.isa, PanelRows) } else { dispatch(self.isa, Shape).1 }
    }

    /// One tile of x, or a few, with panels.
    fn direct<T: Lanes>(
        &self,
        work: &Work<T>,
        panels: [&[T]; 2],
        sums: &mut Vec<UnitSums>,
        take: impl FnOnce(&[UnitSums]),
    ) {
        let &Work { next, x, m, segments, .. } = work;
        sums.resize(2 * m.max(sums.len() / 2), [0.0; UNIT]);
        let (total, segment) = sums[..2 * m].split_at_mut(m);
        let tiles = m.div_ceil(self.tile_rows(m));
        let unit = PanelUnit { panels, next, x, m, tiles, segments, total, segment };
        dispatch(self.isa, unit);
        take(&sums[..m]);
    }

    /// One tile of x, with rows.
    fn stream<T: Lanes>(&self, work: &Work<T>, rows: &[&[T]; UNIT], take: impl FnOnce(&[UnitSums])) {
        let mut sums = [[0.0; UNIT]; MAX_ROWS];
        let out = &mut sums[..work.m];
        let &Work { next, x, m, segments, .. } = work;
        dispatch(self.isa, Stream { rows, next: Next::Unit(next), x, m, segments, out });
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
            for chain in chains(work.k(), work.segments) {
                let panel = &mut panel[..chain.len * LANES * vectors];
                self.pack_chain(work, vector..vector + vectors, &chain, panel);
                let to = if chain.to_segment { &mut *segment } else { &mut *total };
                self.tiles(work, panel, vector..vector + vectors, chain, to);
                flush(&chain, segment, total, vector * LANES..(vector + vectors) * LANES);
            }
        }
        take(total);
    }

    /// The words of one chain of some vectors of the unit.
    fn pack_chain<T: Lanes>(&self, work: &Work<T>, vectors: Range<usize>, chain: &Chain, words: &mut [u32]) {
        let stride = LANES * vectors.len();
        let range = chain.start..chain.start + chain.len;
        for (i, vector) in vectors.enumerate() {
            let out = &mut words[i * LANES..];
            match work.weights {
                UnitWeights::Rows(rows) => {
                    let rows = &rows.as_chunks().0[vector];
                    let range = range.clone();
                    dispatch(self.isa, Pack::<T, 1> { rows, range, stride, out });
                }
                UnitWeights::Panels(panels) => {
                    let panel = &panels[vector][range.start * LANES..range.end * LANES];
                    dispatch(self.isa, Expand { panel, stride, out });
                }
            }
        }
    }

    /// All tiles of x over one packed chain, while the weights of the next one are fetched.
    fn tiles<T: Lanes>(
        &self,
        work: &Work<T>,
        w: &[u32],
        vectors: Range<usize>,
        chain: Chain,
        to: &mut [UnitSums],
    ) {
        let k = work.k();
        let end = chain.start + chain.len;
        let mut starts = [std::ptr::null(); UNIT];
        let streams = work.ahead(vectors.clone(), end, &mut starts);
        let lines = vectors.len() * LANES * (chain.len * size_of::<T>()).div_ceil(CACHE_LINE);
        let tiles = || Method::<T>::tiles(self, work.m);
        for ((start, m), (first, count)) in tiles().zip(even_parts(lines, tiles().count())) {
            let tile = Tile {
                x: &work.x[start * k + chain.start * m..][..chain.len * m],
                w,
                m,
                vector: vectors.start,
                out: &mut to[start..start + m],
                add: chain.add,
                ahead: Ahead { rows: &starts[..streams], first, count },
            };
            dispatch(self.isa, tile);
        }
    }
}

impl<T: Lanes> Work<'_, T> {
    /// Length of the products.
    pub(super) fn k(&self) -> usize {
        match self.weights {
            UnitWeights::Rows(rows) => rows[0].len(),
            UnitWeights::Panels(panels) => panels[0].len() / LANES,
        }
    }

    /// Writes the addresses of column `end` in the rows or panels of some vectors to `starts`, or their addresses in
    /// the next unit if the matrix ends there. Returns their number.
    fn ahead(&self, vectors: Range<usize>, end: usize, starts: &mut [*const u8; UNIT]) -> usize {
        let is_last = end == self.k();
        match self.weights {
            UnitWeights::Rows(rows) => {
                let rows = &rows[vectors.start * LANES..vectors.end * LANES];
                let offset = if is_last { self.next } else { end };
                for (start, row) in starts.iter_mut().zip(rows) {
                    *start = row.as_ptr().wrapping_add(offset).cast();
                }
                rows.len()
            }
            UnitWeights::Panels(panels) => {
                let count = vectors.len();
                let further = match is_last {
                    true => following(&panels, self.next, vectors),
                    false => panels_from(&panels, vectors, end),
                };
                for (start, panel) in starts.iter_mut().zip(&further[..count]) {
                    *start = panel.cast();
                }
                count
            }
        }
    }
}
