//! The register tile of large products: a few rows of x times 32 rows of w over one chain.
//!
//! Per word of k the tile loads 16 or 32 words of the w panel and broadcasts one word per row of
//! x, so with 12 x 32 outputs (AVX-512) 24 multiply-adds follow 14 loads and the multiply-add
//! units are the bound.

use super::Kernel;
use super::simd::{LANES, Simd};

/// The most rows of x that a tile has on any path.
pub(crate) const MAX_ROWS: usize = 12;

/// Rows of w that a unit of work covers: two vectors.
pub(crate) const UNIT: usize = 2 * LANES;

/// The sums of one row of x with the rows of a unit.
pub(crate) type UnitSums = [f32; UNIT];

/// Calls a function with the number of rows as a constant.
macro_rules! with_rows {
    ($m:expr, $f:ident::<$($t:ty),+; $n:tt>($($a:expr),*)) => {
        match $m {
            1 => $f::<$($t),+, 1, $n>($($a),*),
            2 => $f::<$($t),+, 2, $n>($($a),*),
            3 => $f::<$($t),+, 3, $n>($($a),*),
            4 => $f::<$($t),+, 4, $n>($($a),*),
            5 => $f::<$($t),+, 5, $n>($($a),*),
            6 => $f::<$($t),+, 6, $n>($($a),*),
            7 => $f::<$($t),+, 7, $n>($($a),*),
            8 => $f::<$($t),+, 8, $n>($($a),*),
            9 => $f::<$($t),+, 9, $n>($($a),*),
            10 => $f::<$($t),+, 10, $n>($($a),*),
            11 => $f::<$($t),+, 11, $n>($($a),*),
            12 => $f::<$($t),+, 12, $n>($($a),*),
            _ => unreachable!("a tile has at most 12 rows"),
        }
    };
}
pub(crate) use with_rows;

/// Cache lines to prefetch while a tile computes: part of the weights that are packed next. Tiles are bound by
/// arithmetic and packing by memory, so this is where the two overlap.
#[derive(Clone, Copy)]
pub(crate) struct Ahead<'a> {
    /// The addresses at which the next chain of each row starts: a power of two of them, or none. They are only
    /// prefetched, never read.
    pub rows: &'a [*const u8],
    /// First line: line i is line i / rows of row i % rows.
    pub first: usize,
    /// Number of lines.
    pub count: usize,
}

impl Ahead<'_> {
    /// Nothing.
    pub(crate) const NONE: Self = Ahead { rows: &[], first: 0, count: 0 };

    /// Asks for line i of `count`, if there is one.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&self, s: S, i: usize) {
        if i < self.count {
            let line = self.first + i;
            if let Some(row) = self.rows.get(line & self.rows.len().wrapping_sub(1)) {
                // This is a shift, because a division would take longer than the prefetch saves.
                s.prefetch(row.wrapping_add((line >> self.rows.len().trailing_zeros()) * CACHE_LINE));
            }
        }
    }

    /// Asks for the first line and moves on by one.
    #[inline(always)]
    pub(crate) fn ask_next<S: Simd>(&mut self, s: S) {
        self.ask(s, 0);
        self.first += 1;
        self.count = self.count.saturating_sub(1);
    }
}

/// Bytes of a cache line.
pub(crate) const CACHE_LINE: usize = 64;

/// Multiplies a packed chain of `m` rows of x with a packed chain of w.
pub(crate) struct Tile<'a> {
    /// [words]\[m\].
    pub x: &'a [u32],
    /// [words][16 * TILE_VECTORS].
    pub w: &'a [u32],
    /// Rows of x, at most TILE_ROWS.
    pub m: usize,
    /// First vector of the unit that `w` holds.
    pub vector: usize,
    /// Sums of the m rows.
    pub out: &'a mut [UnitSums],
    /// Add to the sums; else, replace them.
    pub add: bool,
    /// What to fetch meanwhile.
    pub ahead: Ahead<'a>,
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::TILE_VECTORS == 2 {
            with_rows!(self.m, tile::<S; 2>(s, self))
        } else {
            with_rows!(self.m, tile::<S; 1>(s, self))
        }
    }
}

#[inline(always)]
fn tile<S: Simd, const M: usize, const N: usize>(s: S, t: Tile) {
    if M > S::TILE_ROWS || N != S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let mut acc = [[s.splat(0.0); N]; M];
    let w = t.w.as_chunks::<LANES>().0.as_chunks::<N>().0;
    for (i, (x, w)) in t.x.as_chunks::<M>().0.iter().zip(w).enumerate() {
        t.ahead.ask(s, i);
        advance::<S, M, N>(s, &mut acc, x, w);
    }
    let Some((out, _)) = t.out.split_first_chunk_mut::<M>() else { return };
    for m in 0..M {
        store_sums(s, &acc[m], t.add, &mut out[m].as_chunks_mut().0[t.vector..]);
    }
}

/// Advances M x N chains by one word.
#[inline(always)]
pub(crate) fn advance<S: Simd, const M: usize, const N: usize>(
    s: S,
    acc: &mut [[S::V; N]; M],
    x: &[u32; M],
    w: &[[u32; LANES]; N],
) {
    let mut vectors = [s.as_f32(s.load_words(&w[0])); N];
    for i in 1..N {
        vectors[i] = s.as_f32(s.load_words(&w[i]));
    }
    for m in 0..M {
        let x = s.splat(f32::from_bits(x[m]));
        for i in 0..N {
            acc[m][i] = s.fma(x, vectors[i], acc[m][i]);
        }
    }
}

/// Adds sums to `out`, or stores them there.
#[inline(always)]
pub(crate) fn store_sums<S: Simd, const N: usize>(
    s: S,
    acc: &[S::V; N],
    add: bool,
    out: &mut [[f32; LANES]],
) {
    let Some((out, _)) = out.split_first_chunk_mut::<N>() else { return };
    for n in 0..N {
        let sum = if add { s.add(s.load(&out[n]), acc[n]) } else { acc[n] };
        s.store(sum, &mut out[n]);
    }
}

/// The tile of a path: vectors and rows.
pub(crate) struct Shape;

impl Kernel for Shape {
    type Output = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> (usize, usize) {
        (S::TILE_VECTORS, S::TILE_ROWS)
    }
}
