//! Attention over a paged cache.

use candle_core::Result;
use half::{bf16, f16};
use moe_kernels::{ATTENTION_BLOCK, AttentionMeta, CpuIsa, Float, View, paged_attention_into};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, rounding, values, view, wide};

/// One sequence with all its queries, keys and values, [len, heads, d] each.
struct Sequence<T, Q> {
    len: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    q: Vec<Q>,
    k: Vec<T>,
    v: Vec<T>,
    window: Option<usize>,
    /// A logit for each head.
    sinks: Option<Vec<f32>>,
    /// Gates of all rows, and the number of values of a row.
    gates: Option<(Vec<f32>, usize)>,
}

/// How the rows reach the op.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    /// Rows per call.
    chunk: usize,
    block_size: usize,
    threads: usize,
}

impl<T: Float, Q: Float> Sequence<T, Q> {
    fn new(len: usize, heads: (usize, usize), d: usize, window: Option<usize>, seed: u64) -> Self {
        let (hq, hkv) = heads;
        let q = data::<Q>(len * hq * d, seed);
        let k = data(len * hkv * d, seed ^ 1);
        let v = data(len * hkv * d, seed ^ 2);
        Self { len, hq, hkv, d, q, k, v, window, sinks: None, gates: None }
    }

    /// With sinks from below to above the scores of the rows.
    fn with_sinks(self) -> Self {
        let sinks = (0..self.hq).map(|head| [-200.0, 0.3, 2.5, 40.0][(head + self.len) % 4]).collect();
        Self { sinks: Some(sinks), ..self }
    }

    fn sinks(&self) -> Option<View<'_>> {
        self.sinks.as_ref().map(|sinks| view(sinks, &[self.hq]))
    }

    const SCALE: f32 = 0.7;

    /// The cache as it is when positions below `written` are written, with blocks in an arbitrary
    /// order and NaN wherever nothing was written; and the block table.
    fn cache(&self, x: &[T], written: usize, block_size: usize) -> (Vec<T>, Vec<u32>) {
        let used = self.len.div_ceil(block_size);
        let table: Vec<u32> = (0..used).map(|i| (used - i) as u32).collect();
        let mut cache = vec![T::narrow(f32::NAN); (used + 2) * self.hkv * block_size * self.d];
        for position in 0..written {
            for head in 0..self.hkv {
                let block = table[position / block_size] as usize;
                let at = ((block * self.hkv + head) * block_size + position % block_size) * self.d;
                let from = &x[(position * self.hkv + head) * self.d..][..self.d];
                cache[at..at + self.d].copy_from_slice(from);
            }
        }
        (cache, table)
    }

    fn run(&self, isa: CpuIsa, s: Schedule) -> Result<Vec<T>> {
        let hq = self.hq;
        let d = self.d;
        let ex = &mut exec(isa, s.threads);
        let mut out = Vec::new();
        for start in (0..self.len).step_by(s.chunk) {
            let end = self.len.min(start + s.chunk);
            let rows = end - start;
            let (k, table) = self.cache(&self.k, end, s.block_size);
            let (v, _) = self.cache(&self.v, end, s.block_size);
            let dims = [table.len() + 2, self.hkv, s.block_size, d];
            let positions: Vec<u32> = (start as u32..end as u32).collect();
            let bounds = [0, rows as u32];
            let meta = AttentionMeta {
                query_start_loc: view(&bounds, &[2]),
                positions: view(&positions, &[rows]),
                block_tables: view(&table, &[1, table.len()]),
                scale: Self::SCALE,
                sliding_window: self.window,
                sinks: self.sinks(),
                gates: self
                    .gates
                    .as_ref()
                    .map(|(gates, held)| view(&gates[start * held..end * held], &[rows, *held])),
            };
            let mut part = filled::<T>(&[rows, hq * d])?;
            let q = view(&self.q[start * hq * d..end * hq * d], &[rows, hq, d]);
            paged_attention_into(q, view(&k, &dims), view(&v, &dims), &meta, part.view_mut(), ex)?;
            out.extend(values::<T>(&part));
        }
        Ok(out)
    }

    /// The definition in f64.
    fn defined(&self) -> Vec<f64> {
        let q = wide(&self.q);
        let k = wide(&self.k);
        let v = wide(&self.v);
        let mut out = Vec::new();
        for row in 0..self.len {
            for head in 0..self.hq {
                let kv_head = head / (self.hq / self.hkv);
                let seen = self.window.map_or(0, |w| (row + 1).saturating_sub(w))..row + 1;
                let at = |position: usize| (position * self.hkv + kv_head) * self.d;
                let q = &q[(row * self.hq + head) * self.d..][..self.d];
                let score = |p: usize| -> f64 {
                    q.iter().zip(&k[at(p)..]).map(|(a, b)| a * b).sum::<f64>() * Self::SCALE as f64
                };
                let weights: Vec<f64> = seen.clone().map(|p| score(p).exp()).collect();
                let sink = self.sinks.as_ref().map_or(0.0, |sinks| (sinks[head] as f64).exp());
                let total = weights.iter().sum::<f64>() + sink;
                out.extend(
                    (0..self.d).map(|i| {
                        seen.clone().zip(&weights).map(|(p, w)| w * v[at(p) + i]).sum::<f64>() / total
                    }),
                );
            }
        }
        out
    }

    fn check(&self, schedules: &[Schedule]) -> Result<()> {
        let want = self.defined();
        for isa in isas() {
            let first = self.run(isa, schedules[0])?;
            for (i, (got, want)) in wide(&first).iter().zip(&want).enumerate() {
                let tolerance = rounding::<T>() * want.abs() * 1.01 + 1e-5;
                assert!((got - want).abs() <= tolerance, "{isa:?} {i}: {got} {want}");
            }
            for s in &schedules[1..] {
                assert_eq!(bits(&first), bits(&self.run(isa, *s)?), "{isa:?} {s:?}");
            }
        }
        Ok(())
    }
}

fn schedule() -> impl Strategy<Value = Schedule> {
    (prop_oneof![1usize..8, 8usize..400], 1usize..150, 1usize..4)
        .prop_map(|(chunk, block_size, threads)| Schedule { chunk, block_size, threads })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// The bits are the same for every division of the rows into calls, every block size and every number of threads,
    /// and equal to the definition up to rounding. Unwritten cache slots hold NaN, so a read beyond what a row sees
    /// would be noticed.
    #[test]
    fn attention_is_that_of_the_row_alone(
        len in 1usize..200, hkv in 1usize..3, group in 1usize..5,
        d in proptest::sample::select(&[1usize, 8, 16, 20, 64, 80][..]),
        window in proptest::option::of(1usize..150),
        a in schedule(), b in schedule(), seed: u64,
    ) {
        let heads = (hkv * group, hkv);
        match seed % 4 {
            0 => Sequence::<f32, f32>::new(len, heads, d, window, seed).check(&[a, b]),
            1 => Sequence::<bf16, bf16>::new(len, heads, d, window, seed).check(&[a, b]),
            2 => Sequence::<bf16, f32>::new(len, heads, d, window, seed).check(&[a, b]),
            _ => Sequence::<f16, f16>::new(len, heads, d, window, seed).check(&[a, b]),
        }.unwrap();
    }

    /// The same with a sink in the softmax of each head.
    #[test]
    fn sinks_are_terms_of_the_denominator(
        len in 1usize..200, group in 1usize..5, d in proptest::sample::select(&[8usize, 20, 64][..]),
        window in proptest::option::of(1usize..150), a in schedule(), b in schedule(), seed: u64,
    ) {
        let heads = (2 * group, 2);
        match seed % 2 {
            0 => Sequence::<f32, f32>::new(len, heads, d, window, seed).with_sinks().check(&[a, b]),
            _ => Sequence::<bf16, f32>::new(len, heads, d, window, seed).with_sinks().check(&[a, b]),
        }.unwrap();
    }
}

/// Long contexts cut their blocks among tasks when there are few rows.
#[test]
fn long_contexts_split_and_keep_their_bits() -> Result<()> {
    let len = 13 * ATTENTION_BLOCK + 5;
    for window in [None, Some(600)] {
        let s = Sequence::<bf16, f32>::new(len, (4, 1), 32, window, 3).with_sinks();
        for isa in isas() {
            let whole = s.run(isa, Schedule { chunk: len, block_size: 16, threads: 1 })?;
            for (threads, block_size) in [(1, 16), (3, 7), (3, 100)] {
                let (k, table) = s.cache(&s.k, len, block_size);
                let (v, _) = s.cache(&s.v, len, block_size);
                let dims = [table.len() + 2, 1, block_size, 32];
                for row in [len - 1, len - 40] {
                    let positions = [row as u32];
                    let bounds = [0u32, 1];
                    let meta = AttentionMeta {
                        query_start_loc: view(&bounds, &[2]),
                        positions: view(&positions, &[1]),
                        block_tables: view(&table, &[1, table.len()]),
                        scale: Sequence::<bf16, f32>::SCALE,
                        sliding_window: window,
                        sinks: s.sinks(),
                        gates: None,
                    };
                    let mut out = filled::<bf16>(&[1, 4 * 32])?;
                    let q = view(&s.q[row * 4 * 32..][..4 * 32], &[1, 4, 32]);
                    let k = view(&k, &dims);
                    let v = view(&v, &dims);
                    paged_attention_into(q, k, v, &meta, out.view_mut(), &mut exec(isa, threads))?;
                    let want = &whole[row * 4 * 32..][..4 * 32];
                    assert_eq!(bits(&values::<bf16>(&out)), bits(want), "{isa:?} {threads} {block_size}");
                }
            }
        }
    }
    Ok(())
}

/// Several sequences of different lengths in one call, with padding rows after them.
/// The gates of a row are the last values of its row, and scale rounded results.
#[test]
fn gates_scale_results() -> Result<()> {
    fn check<T: Float>() -> Result<()> {
        let s = Sequence::<T, f32>::new(3, (4, 2), 18, None, 5);
        let width = s.hq * s.d;
        let held = width + 7;
        let mut gates = data::<f32>(s.len * held, 6);
        gates.iter_mut().for_each(|gate| *gate *= 9.0);
        gates.chunks_mut(held).for_each(|row| row[..7].fill(f32::NAN));
        for isa in isas() {
            let schedule = Schedule { chunk: 2, block_size: 2, threads: 2 };
            let plain = s.run(isa, schedule)?;
            let gated = Sequence {
                gates: Some((gates.clone(), held)),
                ..Sequence::<T, f32>::new(3, (4, 2), 18, None, 5)
            };
            let got = gated.run(isa, schedule)?;
            for (row, (plain, got)) in plain.chunks(width).zip(got.chunks(width)).enumerate() {
                for (i, (plain, got)) in plain.iter().zip(got).enumerate() {
                    let gate = gates[row * held + 7 + i] as f64;
                    let want = plain.widen() as f64 / (1.0 + (-gate).exp());
                    let off = (got.widen() as f64 - want).abs();
                    assert!(off <= (rounding::<T>() + 1e-6) * want.abs(), "{isa:?}: {want} {}", got.widen());
                }
            }
        }
        Ok(())
    }
    check::<f32>()?;
    check::<bf16>()
}

#[test]
fn sequences_do_not_meet_and_padding_is_zero() -> Result<()> {
    let hq = 4;
    let hkv = 2;
    let d = 24;
    let block_size = 16;
    let lens = [70usize, 1, 130];
    let all: Vec<_> =
        lens.iter().map(|&len| Sequence::<f32, f32>::new(len, (hq, hkv), d, None, len as u64)).collect();
    // The last row of the first sequence, the only row of the second, the last 30 of the third.
    let rows = [(0usize, 69..70usize), (1, 0..1), (2, 100..130)];
    let max_blocks = 9;
    let mut tables = vec![u32::MAX; 3 * max_blocks];
    let mut k = Vec::new();
    let mut v = Vec::new();
    for (i, s) in all.iter().enumerate() {
        let base = (k.len() / (hkv * block_size * d)) as u32;
        let (own_k, table) = s.cache(&s.k, s.len, block_size);
        k.extend(own_k);
        v.extend(s.cache(&s.v, s.len, block_size).0);
        for (entry, block) in tables[i * max_blocks..].iter_mut().zip(table) {
            *entry = base + block;
        }
    }
    let dims = [k.len() / (hkv * block_size * d), hkv, block_size, d];
    let positions: Vec<u32> =
        rows.iter().flat_map(|(_, r)| r.clone().map(|p| p as u32)).chain([0, 0]).collect();
    let t = positions.len();
    let mut q: Vec<f32> =
        rows.iter().flat_map(|(i, r)| all[*i].q[r.start * hq * d..r.end * hq * d].to_vec()).collect();
    q.extend(vec![f32::NAN; 2 * hq * d]);
    let bounds = [0u32, 1, 2, 32];
    let meta = AttentionMeta {
        query_start_loc: view(&bounds, &[4]),
        positions: view(&positions, &[t]),
        block_tables: view(&tables, &[3, max_blocks]),
        scale: Sequence::<f32, f32>::SCALE,
        sliding_window: None,
        sinks: None,
        gates: None,
    };
    for isa in isas() {
        let mut out = filled::<f32>(&[t, hq * d])?;
        let q = view(&q, &[t, hq, d]);
        paged_attention_into(q, view(&k, &dims), view(&v, &dims), &meta, out.view_mut(), &mut exec(isa, 2))?;
        let alone = Schedule { chunk: 1000, block_size: 64, threads: 1 };
        let mut want = Vec::new();
        for (i, r) in &rows {
            want.extend_from_slice(&all[*i].run(isa, alone)?[r.start * hq * d..r.end * hq * d]);
        }
        want.extend(vec![0f32; 2 * hq * d]);
        assert_eq!(bits(&values::<f32>(&out)), bits(&want), "{isa:?}");
    }
    Ok(())
}
