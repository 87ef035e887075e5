//! Products of bf16 by the BF16 dot product of AVX-512, which multiplies twice as much as a multiply-add, where the
//! processor starts it often enough ([`crate::exec::CpuIsa::detect`]).
//!
//! A word is a pair of bf16, both of x and of w. Panels already hold pairs, so a tile reads them without conversion,
//! for any number of rows. Weights in rows become panels chain by chain. The order of sums is in [`super::product`].

mod row;

use std::arch::x86_64::*;
use std::cell::RefCell;

use self::row::Row;
use super::avx512;
use super::pack::Pack;
use super::panel::flush;
use super::product::{Chain, K_BLOCK, chains};
use super::simd::{LANES, Lanes};
use super::tile::{CACHE_LINE, UNIT, UnitSums, with_rows};
use super::units::{Method, UnitWeights, Work, even_parts};

/// Rows of x of a tile: its sums take 24 of 32 registers.
const ROWS: usize = 12;

/// How far ahead weights are asked for, bytes: one tile of x streams them from memory.
const PREFETCH: usize = 4096;

/// The method; see the module.
pub(crate) struct Pairs;

thread_local! {
    /// A chain of packed weights, and the sums of the unit that this thread works on; kept so that steps do not
    /// allocate.
    static LOCAL: RefCell<([Vec<u32>; 2], Vec<UnitSums>)> = const { RefCell::new(([Vec::new(), Vec::new()], Vec::new())) };
}

/// Words of one row of a segment.
fn segment_words(k: usize, segments: usize) -> usize {
    (k / segments).div_ceil(2)
}

impl<T: Lanes> Method<T> for Pairs {
    const PIECE_ROWS: usize = 240;

    fn tiles(&self, m: usize) -> impl Iterator<Item = (usize, usize)> {
        even_parts(m, m.div_ceil(ROWS))
    }

    fn row_words(&self, k: usize, segments: usize) -> usize {
        segments * segment_words(k, segments)
    }

    fn pack(&self, rows: &[&[T]; LANES], m: usize, segments: usize, panel: &mut [u32]) {
        let k = rows[0].len();
        let length = k / segments;
        let words = segment_words(k, segments);
        if m == 1 && length.is_multiple_of(2) {
            // A row's pairs are its words.
            for (word, pair) in panel.iter_mut().zip(bytes(rows[0]).as_chunks().0) {
                *word = u32::from_ne_bytes(*pair);
            }
            return;
        }
        for segment in 0..segments {
            let range = segment * length..(segment + 1) * length;
            let out = &mut panel[segment * words * m..];
            // SAFETY: this path has all of AVX-512 with VNNI.
            unsafe { avx512::run_vnni(Pack::<T, 2> { rows, range, stride: m, out }) };
        }
    }

    fn unit(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums])) {
        LOCAL.with_borrow_mut(|(packed, sums)| {
            sums.resize(2 * work.m.max(sums.len() / 2), [0.0; UNIT]);
            let (total, segment) = sums[..2 * work.m].split_at_mut(work.m);
            if work.k() == 0 {
                total.fill([0.0; UNIT]);
            }
            match one_stream(work) {
                Some(panels) => one_row(work, &panels, segment, total),
                None => {
                    for chain in chains(work.k(), work.segments) {
                        let to = if chain.to_segment { &mut *segment } else { &mut *total };
                        self.chain(work, &chain, packed, to);
                        flush(&chain, segment, total, 0..UNIT);
                    }
                }
            }
            take(total);
        });
    }
}

/// The panels of a unit, if they are to be multiplied one after the other: with one row of x, where the second panel
/// follows the first one in memory. Memory delivers 7 to 15 % more to one stream than to two streams at once.
fn one_stream<'a, T: Copy>(work: &Work<'a, T>) -> Option<[Row<'a>; 2]> {
    let UnitWeights::Panels(panels) = work.weights else { return None };
    let [first, second] = panels.map(bytes);
    let follow = first.as_ptr_range().end == second.as_ptr();
    let next = first.as_ptr().wrapping_add(work.next * size_of::<T>());
    let row = |panel, next| Row { x: work.x, panel, next };
    (work.m == 1 && follow).then(|| [row(first, second.as_ptr()), row(second, next)])
}

/// A unit's panels with one row of x, one after the other.
fn one_row<T: Lanes>(work: &Work<T>, panels: &[Row; 2], segment: &mut [UnitSums], total: &mut [UnitSums]) {
    for (vector, panel) in panels.iter().enumerate() {
        let lanes = vector * LANES..(vector + 1) * LANES;
        let take = |chain: &Chain, sums: &[f32; LANES]| {
            let to = if chain.to_segment { &mut segment[0] } else { &mut total[0] };
            for (to, sum) in to[lanes.clone()].iter_mut().zip(sums) {
                *to = if chain.add { *to + sum } else { *sum };
            }
            flush(chain, segment, total, lanes.clone());
        };
        // SAFETY: the path has AVX-512 BF16.
        unsafe { panel.sums(work.k(), work.segments, take) };
    }
}

impl Pairs {
    /// All tiles of x over one chain of the unit's panels.
    fn chain<T: Lanes>(
        &self,
        work: &Work<T>,
        chain: &Chain,
        packed: &mut [Vec<u32>; 2],
        to: &mut [UnitSums],
    ) {
        let range = chain.start..chain.start + chain.len;
        let k = work.k();
        let words = segment_words(k, work.segments);
        let w = match work.weights {
            UnitWeights::Panels(panels) => {
                panels.map(|panel| bytes(&panel[range.start * LANES..range.end * LANES]))
            }
            UnitWeights::Rows(rows) => {
                for (rows, out) in rows.as_chunks().0.iter().zip(&mut *packed) {
                    out.resize(K_BLOCK / 2 * LANES, 0);
                    // SAFETY: as in `pack`.
                    unsafe {
                        avx512::run_vnni(Pack::<T, 2> { rows, range: range.clone(), stride: LANES, out })
                    };
                }
                let len = chain.len.div_ceil(2) * LANES;
                [0, 1].map(|i| bytes(&packed[i][..len]))
            }
        };
        let ask = match work.weights {
            UnitWeights::Panels(_) => {
                Some(Ask::new((k - chain.start) * LANES, (work.next - k * LANES) * size_of::<T>()))
            }
            UnitWeights::Rows(_) => None,
        };
        // The chain's first word within a row.
        let length = k / work.segments;
        let word = chain.segment * words + (chain.start - chain.segment * length) / 2;
        for (start, m) in Method::<T>::tiles(self, work.m) {
            let x = &work.x[start * work.segments * words + word * m..][..chain.len.div_ceil(2) * m];
            let tile = Tile {
                x,
                w,
                add: chain.add,
                ask: ask.filter(|_| start == 0),
                out: &mut to[start..start + m],
            };
            // SAFETY: the path has AVX-512 BF16.
            unsafe { with_rows!(m, multiply::<T; 2>(tile)) };
        }
    }
}

/// The bytes of words or of values of 16 bits.
fn bytes<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and bytes no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// How weights are prefetched: [`PREFETCH`] bytes ahead, near the end of a panel from the next unit's panel.
#[derive(Clone, Copy)]
struct Ask {
    /// Number of lines for which the line to prefetch is in the same panel.
    within: usize,
    /// Bytes between the panel's end and the next unit's panel.
    jump: usize,
}

impl Ask {
    /// The settings for a chain. `left` is the number of values from its start to the end of the panel.
    fn new(left: usize, jump: usize) -> Self {
        Self { within: (left * size_of::<u16>()).saturating_sub(PREFETCH) / CACHE_LINE, jump }
    }
}

/// A tile of rows of x over one chain of a unit.
struct Tile<'a> {
    /// [words]\[m\].
    x: &'a [u32],
    /// A cache line for each word of a panel.
    w: [&'a [u8]; 2],
    /// Add to the sums; else, replace them.
    add: bool,
    /// What to ask for, where the weights come from memory.
    ask: Option<Ask>,
    out: &'a mut [UnitSums],
}

/// # Safety
/// The processor must support AVX-512 BF16.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
#[expect(clippy::extra_unused_type_parameters, reason = "`with_rows` names the type of the weights")]
unsafe fn multiply<T, const M: usize, const N: usize>(t: Tile) {
    let Some((out, _)) = t.out.split_first_chunk_mut::<M>() else { return };
    let mut acc = [[_mm512_setzero_ps(); N]; M];
    let lines = t.w.map(|w| w.as_chunks::<CACHE_LINE>().0);
    for (i, ((x, first), second)) in t.x.as_chunks::<M>().0.iter().zip(lines[0]).zip(lines[1]).enumerate() {
        let mut w = [_mm512_setzero_ps(); N];
        for (w, line) in w.iter_mut().zip([first, second]) {
            if let Some(ask) = t.ask {
                let ahead = if i < ask.within { PREFETCH } else { PREFETCH + ask.jump };
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast());
            }
            // SAFETY: a line is 64 bytes.
            *w = unsafe { _mm512_loadu_ps(line.as_ptr().cast()) };
        }
        for m in 0..M {
            let x = _mm512_castsi512_ps(_mm512_set1_epi32(x[m] as i32));
            for n in 0..N {
                // SAFETY: vectors of f32 and of pairs of bf16 are the same 64 bytes.
                let pairs = |v| unsafe { std::mem::transmute::<__m512, __m512bh>(v) };
                acc[m][n] = _mm512_dpbf16_ps(acc[m][n], pairs(x), pairs(w[n]));
            }
        }
    }
    for m in 0..M {
        for (to, &acc) in out[m].as_chunks_mut::<LANES>().0.iter_mut().zip(&acc[m]) {
            // SAFETY: 16 values are read and written.
            unsafe {
                let sum = if t.add { _mm512_add_ps(_mm512_loadu_ps(to.as_ptr()), acc) } else { acc };
                _mm512_storeu_ps(to.as_mut_ptr(), sum);
            }
        }
    }
}
