//! Weights in panels of 16 rows, and products with few rows of x.
//!
//! A panel holds 16 rows of a matrix as [K / D][16][D], where D = [`Lanes::PANEL_DEPTH`] values of k of a row are next
//! to each other. A vector load gives the same k of 16 rows, so nothing is transposed while weights stream from memory,
//! and a panel is one stream that begins where the one before it ends. A matrix keeps its size: only the values of 16
//! rows are permuted. The chains are the chains of [`super::product`], so a row's bits are the same as with weights in
//! rows.

use std::ops::Range;

use super::Kernel;
use super::product::{Chain, chains};
use super::simd::{LANES, Lanes, Simd};
use super::tile::{MAX_ROWS, UnitSums, store_sums, with_rows};
use super::units::even_parts;

/// Columns that are packed at a time: the lines of 16 rows stay in the first-level cache.
const PACK_COLUMNS: usize = 256;

/// Packs 16 rows, one after the other, into their panel of the same length. K is a multiple of D.
pub(crate) fn pack_panel<T: Lanes>(rows: &[T], panel: &mut [T]) {
    let k = rows.len() / LANES;
    for start in (0..k).step_by(PACK_COLUMNS) {
        let end = k.min(start + PACK_COLUMNS);
        let panel = &mut panel[start * LANES..end * LANES];
        for (row, values) in rows.chunks_exact(k).enumerate() {
            let groups = panel.chunks_exact_mut(LANES * T::PANEL_DEPTH);
            for (group, values) in groups.zip(values[start..end].chunks_exact(T::PANEL_DEPTH)) {
                group[row * T::PANEL_DEPTH..][..T::PANEL_DEPTH].copy_from_slice(values);
            }
        }
    }
}

/// Copies a row of a matrix in panels; `panels` begins with the panel that holds the row.
pub(crate) fn unpack_row<T: Lanes>(panels: &[T], k: usize, row: usize, out: &mut [T]) {
    let groups = panels[..LANES * k].chunks_exact(LANES * T::PANEL_DEPTH);
    for (out, group) in out.chunks_exact_mut(T::PANEL_DEPTH).zip(groups) {
        out.copy_from_slice(&group[row % LANES * T::PANEL_DEPTH..][..T::PANEL_DEPTH]);
    }
}

/// Expands the chain of a panel into words as [`super::tile`] takes them: word i of 16 rows goes to
/// `out[i * stride..]`.
pub(crate) struct Expand<'a, T> {
    /// The chain's part of a panel.
    pub panel: &'a [T],
    /// Distance between words of one row.
    pub stride: usize,
    /// The words, to their end.
    pub out: &'a mut [u32],
}

impl<T: Lanes> Kernel for Expand<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let groups = self.panel.chunks_exact(LANES * T::PANEL_DEPTH);
        for (i, group) in groups.enumerate() {
            for j in 0..T::PANEL_DEPTH {
                if let Some(out) = self.out[(i * T::PANEL_DEPTH + j) * self.stride..].first_chunk_mut() {
                    s.store_words(s.to_words(T::panel(s, group, j)), out);
                }
            }
        }
    }
}

/// Multiplies a few packed rows of x with the two panels of a unit: weights stream from memory
/// straight into registers, and meet the further tiles of x in the first-level cache.
pub(crate) struct PanelUnit<'a, T> {
    /// The panels' columns that are multiplied.
    pub panels: [&'a [T]; 2],
    /// The distance, in values, from a panel to the same panel of the unit that this thread is likely to take next.
    pub next: usize,
    /// Packed rows of x, tile by tile.
    pub x: &'a [u32],
    /// Rows of x.
    pub m: usize,
    /// The number of tiles of x. Their sizes differ by one at most.
    pub tiles: usize,
    /// Segments of K.
    pub segments: usize,
    /// Sums of the m rows, and room for the sums of a segment.
    pub total: &'a mut [UnitSums],
    pub segment: &'a mut [UnitSums],
}

impl<T: Lanes> Kernel for PanelUnit<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.panels[0].len() / LANES;
        let width = if self.m <= S::PAIRED_ROWS { 2 } else { S::TILE_VECTORS };
        for vector in (0..2).step_by(width) {
            let vectors = vector..vector + width;
            let panels = [self.panels[vector], self.panels[vectors.end - 1]];
            for chain in chains(k, self.segments) {
                let range = chain.start * LANES..(chain.start + chain.len) * LANES;
                let ahead = match chain.start + chain.len < k {
                    true => panels_from(&self.panels, vectors.clone(), chain.start + chain.len),
                    false => following(&self.panels, self.next, vectors.clone()),
                };
                let to = if chain.to_segment { &mut *self.segment } else { &mut *self.total };
                for (start, m) in even_parts(self.m, self.tiles) {
                    let x = &self.x[start * k + chain.start * m..][..chain.len * m];
                    let tile = ChainTile {
                        x,
                        w: [&panels[0][range.clone()], &panels[1][range.clone()]],
                        ahead: (start == 0).then_some(ahead),
                        vector,
                        add: chain.add,
                        out: &mut to[start..start + m],
                    };
                    if width == 2 {
                        with_rows!(m, chain_tile::<S, T; 2>(s, tile))
                    } else {
                        with_rows!(m, chain_tile::<S, T; 1>(s, tile))
                    }
                }
                flush(&chain, self.segment, self.total, vector * LANES..vectors.end * LANES);
            }
        }
    }
}

/// The addresses of a column in the panels of one or two vectors. For one vector, its panel comes twice.
#[inline(always)]
pub(crate) fn panels_from<T>(panels: &[&[T]; 2], vectors: Range<usize>, column: usize) -> [*const T; 2] {
    [vectors.start, vectors.end - 1].map(|i| panels[i].as_ptr().wrapping_add(column * LANES))
}

/// The addresses that are read after the panels of one or two vectors: the unit's other panel, or the panels of the
/// next unit.
#[inline(always)]
pub(crate) fn following<T>(panels: &[&[T]; 2], next: usize, vectors: Range<usize>) -> [*const T; 2] {
    match vectors.end {
        1 => [panels[1].as_ptr(); 2],
        _ => [0, vectors.len() - 1].map(|i| panels[i].as_ptr().wrapping_add(next)),
    }
}

/// A tile of x over one chain of one or two panels.
struct ChainTile<'a, T> {
    /// [words]\[m\].
    x: &'a [u32],
    /// The chain's part of each panel; one panel comes twice.
    w: [&'a [T]; 2],
    /// The addresses of the chains that are prefetched meanwhile.
    ahead: Option<[*const T; 2]>,
    /// First vector of the unit.
    vector: usize,
    /// Add to the sums; else, replace them.
    add: bool,
    out: &'a mut [UnitSums],
}

#[inline(always)]
fn chain_tile<S: Simd, T: Lanes, const M: usize, const N: usize>(s: S, t: ChainTile<T>) {
    if M > if N == S::TILE_VECTORS { S::PANEL_ROWS } else { S::PAIRED_ROWS } {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let group = LANES * T::PANEL_DEPTH;
    let mut acc = [[s.splat(0.0); N]; M];
    let x = t.x.chunks_exact(T::PANEL_DEPTH * M);
    let w = t.w[0].chunks_exact(group).zip(t.w[1].chunks_exact(group));
    if let Some(ahead) = t.ahead {
        for (i, (x, (first, second))) in x.zip(w).enumerate() {
            for n in 0..N {
                s.prefetch(ahead[n].wrapping_add(i * group));
            }
            advance::<S, T, M, N>(s, &mut acc, x, [first, second]);
        }
    } else {
        for (x, (first, second)) in x.zip(w) {
            advance::<S, T, M, N>(s, &mut acc, x, [first, second]);
        }
    }
    let Some((out, _)) = t.out.split_first_chunk_mut::<M>() else { return };
    for m in 0..M {
        store_sums(s, &acc[m], t.add, &mut out[m].as_chunks_mut().0[t.vector..]);
    }
    debug_assert!(M <= MAX_ROWS);
}

/// Advances M x N chains by one group of N panels, 16 * [`Lanes::PANEL_DEPTH`] values each, and the words of x that
/// belong to them, [words]\[M\].
#[inline(always)]
fn advance<S: Simd, T: Lanes, const M: usize, const N: usize>(
    s: S,
    acc: &mut [[S::V; N]; M],
    x: &[u32],
    w: [&[T]; 2],
) {
    for i in 0..T::PANEL_DEPTH {
        let mut vectors = [T::panel(s, w[0], i); N];
        for n in 1..N {
            vectors[n] = T::panel(s, w[n], i);
        }
        for m in 0..M {
            let x = s.splat(f32::from_bits(x[i * M + m]));
            for n in 0..N {
                acc[m][n] = s.fma(x, vectors[n], acc[m][n]);
            }
        }
    }
}

/// Where a chain ends its segment: adds the segment's sums to the totals, or starts the totals with them.
pub(crate) fn flush(chain: &Chain, segment: &[UnitSums], total: &mut [UnitSums], lanes: Range<usize>) {
    let Some(add) = chain.flush else { return };
    for (total, segment) in total.iter_mut().zip(segment) {
        for (total, segment) in total[lanes.clone()].iter_mut().zip(&segment[lanes.clone()]) {
            *total = if add { *total + segment } else { *segment };
        }
    }
}

/// Rows of x of a tile that multiplies panels without expanding them.
pub(crate) struct PanelRows;

impl Kernel for PanelRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        S::PANEL_ROWS
    }
}
