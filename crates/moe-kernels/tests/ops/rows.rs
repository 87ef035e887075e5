//! Row-wise ops: norms, addition, embedding, softmax, combine, head norm with RoPE.

use candle_core::{DType, Result};
use half::{bf16, f16};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Buffer, CpuIsa, Element, Float, NO_EXPERT, QkNormRope, add_into, add_rms_norm_into, embedding_into,
    qk_norm_rope_cache_into, rms_norm_into, softmax_into, weighted_sum_into,
};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, rounding, values, view, wide};
use crate::quantised::{Plain, pack, schemes, weight};

fn close<T: Float>(got: &[T], want: &[f64], slack: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in wide(got).iter().zip(want).enumerate() {
        let tolerance = want.abs() * rounding::<T>() * 1.01 + slack * want.abs().max(0.1);
        assert!((got - want).abs() <= tolerance, "{i}: {got} {want}");
    }
}

fn norm_row(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

fn norms<T: Float, S: Float>(r: usize, d: usize, threads: usize, seed: u64) -> Result<()> {
    let x = data::<S>(r * d, seed);
    let delta = data::<S>(r * d, seed ^ 1);
    let weight = data::<T>(d, seed ^ 2);
    let want_of =
        |x: &[f64]| -> Vec<f64> { x.chunks(d).flat_map(|row| norm_row(row, &wide(&weight), 1e-6)).collect() };
    for isa in isas() {
        let ex = &mut exec(isa, threads);
        let mut out = filled::<T>(&[r, d])?;
        rms_norm_into(view(&x, &[r, d]), view(&weight, &[d]), 1e-6, out.view_mut(), ex)?;
        close::<T>(&values(&out), &want_of(&wide(&x)), 2e-6);
        // A row alone has the bits that it has among others.
        if let Some(last) = x.chunks(d).next_back() {
            let mut one = filled::<T>(&[1, d])?;
            rms_norm_into(view(last, &[1, d]), view(&weight, &[d]), 1e-6, one.view_mut(), ex)?;
            assert_eq!(bits(&values::<T>(&one)), bits(&values::<T>(&out)[(r - 1) * d..]));
        }
        let mut residual = Buffer::from_vec(x.clone(), &[r, d])?;
        let mut fused = filled::<T>(&[r, d])?;
        let weight = view(&weight, &[d]);
        let delta = view(&delta, &[r, d]);
        add_rms_norm_into(delta, weight, 1e-6, residual.view_mut(), fused.view_mut(), ex)?;
        let mut sum = Buffer::from_vec(x.clone(), &[r, d])?;
        add_into(delta, sum.view_mut(), ex)?;
        let mut norm = filled::<T>(&[r, d])?;
        rms_norm_into(sum.view(), weight, 1e-6, norm.view_mut(), ex)?;
        assert_eq!(bits(&values::<S>(&residual)), bits(&values::<S>(&sum)));
        assert_eq!(bits(&values::<T>(&fused)), bits(&values::<T>(&norm)));
        let added: Vec<f64> = wide(&x).iter().zip(wide(delta.cpu::<S>()?)).map(|(a, b)| a + b).collect();
        close::<S>(&values(&sum), &added, 1e-7);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn norms_match_their_definition(r in 0usize..40, d in 1usize..80, threads in 1usize..4, seed: u64) {
        let d = if seed % 5 == 0 { d * 16 } else { d };
        match seed % 4 {
            0 => norms::<f32, f32>(r, d, threads, seed),
            1 => norms::<bf16, bf16>(r, d, threads, seed),
            2 => norms::<bf16, f32>(r, d, threads, seed),
            _ => norms::<f16, f16>(r, d, threads, seed),
        }.unwrap();
    }

    #[test]
    fn softmax_matches_its_definition(r in 0usize..20, n in 1usize..100, threads in 1usize..4, seed: u64) {
        let x: Vec<f32> = data::<f32>(r * n, seed).iter().map(|x| x * 30.0).collect();
        let want: Vec<f64> = wide(&x).chunks(n).flat_map(|row| {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let e: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(move |e| e / sum).collect::<Vec<_>>()
        }).collect();
        for isa in isas() {
            let mut out = filled::<f32>(&[r, n]).unwrap();
            softmax_into(view(&x, &[r, n]), out.view_mut(), &mut exec(isa, threads)).unwrap();
            close::<f32>(&values(&out), &want, 2e-6);
        }
    }

    #[test]
    fn combine_adds_in_order_and_skips_absent_experts(
        t in 0usize..12, k in 1usize..6, h in 1usize..70, threads in 1usize..4, seed: u64,
    ) {
        let weights = data::<f32>(t * k, seed);
        let ids: Vec<u32> = (0..t * k).map(|i| if (seed >> (i % 60)) & 1 == 0 { 3 } else { NO_EXPERT }).collect();
        let mut slots = data::<f32>(t * k * h, seed ^ 1);
        for (slot, id) in ids.iter().enumerate() {
            if *id == NO_EXPERT {
                slots[slot * h..(slot + 1) * h].fill(f32::NAN);
            }
        }
        for isa in isas() {
            let mut out = filled::<bf16>(&[t, h]).unwrap();
            let slots_v = view(&slots, &[t, k, h]);
            let ids_v = view(&ids, &[t, k]);
            let weights_v = view(&weights, &[t, k]);
            weighted_sum_into(slots_v, ids_v, weights_v, out.view_mut(), &mut exec(isa, threads)).unwrap();
            let want: Vec<bf16> = (0..t * h).map(|i| {
                let mut sum = 0f32;
                for slot in (i / h * k..(i / h + 1) * k).filter(|s| ids[*s] != NO_EXPERT) {
                    let w = weights[slot];
                    let v = slots[slot * h + i % h];
                    sum = if isa == CpuIsa::Scalar { w * v + sum } else { w.mul_add(v, sum) };
                }
                bf16::from_f32(sum)
            }).collect();
            prop_assert_eq!(bits(&values::<bf16>(&out)), bits(&want));
        }
    }

    #[test]
    fn embedding_copies_rows(v in 1usize..20, h in 0usize..40, ids in proptest::collection::vec(0u32..20, 0..30)) {
        let ids: Vec<u32> = ids.into_iter().map(|i| i % v as u32).collect();
        let table = data::<f16>(v * h, 1);
        let mut same = filled::<f16>(&[ids.len(), h]).unwrap();
        let mut wide_out = filled::<f32>(&[ids.len(), h]).unwrap();
        let ex = &mut exec(CpuIsa::Scalar, 1);
        let table_v = view(&table, &[v, h]);
        let ids_v = view(&ids, &[ids.len()]);
        embedding_into(table_v, ids_v, same.view_mut(), ex).unwrap();
        embedding_into(table_v, ids_v, wide_out.view_mut(), ex).unwrap();
        let want: Vec<f16> = ids.iter().flat_map(|i| table[*i as usize * h..][..h].to_vec()).collect();
        prop_assert_eq!(bits(&values::<f16>(&same)), bits(&want));
        prop_assert_eq!(bits(&values::<f32>(&wide_out)), bits(&want));
    }

    #[test]
    fn heads_are_normed_rotated_and_cached(
        t in 0usize..20, hq in 1usize..5, hkv in 1usize..4, half in 1usize..40, block_size in 1usize..9,
        normed: bool, threads in 1usize..4, seed: u64,
    ) {
        let c = Heads { t, hq, hkv, d: 2 * half, block_size, normed, threads, seed };
        match seed % 3 {
            0 => c.check::<f32, f32>(),
            1 => c.check::<bf16, f32>(),
            _ => c.check::<f16, f16>(),
        }.unwrap();
    }
}

struct Heads {
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    block_size: usize,
    normed: bool,
    threads: usize,
    seed: u64,
}

impl Heads {
    /// T is the dtype of the cache, S of the stream.
    fn check<T: Float, S: Float>(&self) -> Result<()> {
        let t = self.t;
        let hq = self.hq;
        let hkv = self.hkv;
        let d = self.d;
        let half = self.d / 2;
        // In some cases gates follow, which are not read here.
        let gates = if self.seed.is_multiple_of(2) { hq } else { 0 };
        let width = (hq + 2 * hkv + gates) * d;
        let mut qkv = data::<S>(t * width, self.seed);
        qkv.chunks_mut(width).for_each(|row| row[(hq + 2 * hkv) * d..].fill(S::narrow(f32::NAN)));
        let q_norm = data::<T>(d, 7);
        let k_norm = data::<T>(d, 8);
        let cos = data::<f32>(t * half, 9);
        let sin = data::<f32>(t * half, 10);
        let blocks = (t + 2).div_ceil(self.block_size) + 1;
        // Rows go to slots in reverse; every fourth row writes nothing.
        let slots: Vec<u32> = (0..t).map(|i| if i % 4 == 3 { u32::MAX } else { (t - i) as u32 }).collect();
        let head = |row: usize, place: usize, norm: Option<&Vec<T>>| -> Vec<f64> {
            let x = wide(&qkv[row * width + place * d..][..d]);
            let x = norm.map_or(x.clone(), |w| norm_row(&x, &wide(w), 1e-5));
            let angle = |i: usize| (cos[row * half + i % half] as f64, sin[row * half + i % half] as f64);
            (0..d)
                .map(|i| {
                    let (c, s) = angle(i);
                    if i < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s }
                })
                .collect()
        };
        for isa in isas() {
            let cache = [blocks, hkv, self.block_size, d];
            let mut k_cache = filled::<T>(&cache)?;
            let mut v_cache = filled::<T>(&cache)?;
            let mut q_out = filled::<S>(&[t, hq, d])?;
            let args = QkNormRope {
                qkv: view(&qkv, &[t, width]),
                q_norm: self.normed.then(|| view(&q_norm, &[d])),
                k_norm: self.normed.then(|| view(&k_norm, &[d])),
                eps: 1e-5,
                cos: view(&cos, &[t, half]),
                sin: view(&sin, &[t, half]),
                slot_mapping: view(&slots, &[t]),
                num_heads: hq,
                num_kv_heads: hkv,
                head_dim: d,
            };
            let ex = &mut exec(isa, self.threads);
            qk_norm_rope_cache_into(&args, q_out.view_mut(), k_cache.view_mut(), v_cache.view_mut(), ex)?;
            let norm = |w| self.normed.then_some(w);
            let q: Vec<f64> = (0..t * hq).flat_map(|i| head(i / hq, i % hq, norm(&q_norm))).collect();
            close::<S>(&values(&q_out), &q, 4e-6);
            let mut k = vec![77.0; blocks * hkv * self.block_size * d];
            let mut v = k.clone();
            for (row, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != u32::MAX) {
                for h in 0..hkv {
                    let block = slot as usize / self.block_size;
                    let offset = slot as usize % self.block_size;
                    let at = ((block * hkv + h) * self.block_size + offset) * d;
                    k[at..at + d].copy_from_slice(&head(row, hq + h, norm(&k_norm)));
                    v[at..at + d].copy_from_slice(&wide(&qkv[row * width + (hq + hkv + h) * d..][..d]));
                }
            }
            close::<T>(&values(&k_cache), &k, 4e-6);
            close::<T>(&values(&v_cache), &v, 0.0);
        }
        Ok(())
    }
}

/// Rounding is to nearest even, of NaN to NaN, and the same in a vector and in a tail.
#[test]
fn rounding_is_that_of_the_half_crate() -> Result<()> {
    fn check<T: Float>(x: &[f32]) -> Result<()> {
        for isa in isas() {
            let mut acc = Buffer::zeros(<T as Element>::DTYPE, &[x.len()])?;
            add_into(view(x, &[x.len()]), acc.view_mut(), &mut exec(isa, 1))?;
            for (got, x) in values::<T>(&acc).iter().zip(x) {
                let want = T::narrow(*x);
                let same = got.widen().to_bits() == want.widen().to_bits();
                assert!(same || got.widen().is_nan() && want.widen().is_nan(), "{isa:?} {x:?}");
            }
        }
        Ok(())
    }
    let mut x: Vec<f32> = (0..40_000u32).map(|i| f32::from_bits(i.wrapping_mul(107_374_183))).collect();
    x.extend([0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65_520.0, 1e-41, 3.0e-8, f32::MAX]);
    check::<bf16>(&x)?;
    check::<f16>(&x)
}

#[test]
fn softmax_of_infinities() -> Result<()> {
    for isa in isas() {
        let x = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, f32::NAN, 1.0, 2.0];
        let mut out = Buffer::zeros(DType::F32, &[2, 3])?;
        softmax_into(view(&x, &[2, 3]), out.view_mut(), &mut exec(isa, 1))?;
        let got = values::<f32>(&out);
        assert_eq!(&got[..3], &[0.0, 1.0, 0.0], "{isa:?}");
        assert!(got[3..].iter().all(|x| x.is_nan()), "{isa:?}: {got:?}");
    }
    Ok(())
}

/// Looks `ids` up in a quantised table, which must have the bits of its floats in dtype T.
fn looks_up<T: Float>(table: &Plain, ids: &[u32], threads: usize) -> Result<()> {
    let floats: Vec<T> = table.dequantised().into_iter().map(T::narrow).collect();
    let want: Vec<T> =
        ids.iter().flat_map(|id| floats[*id as usize * table.k..][..table.k].to_vec()).collect();
    let weight = weight::<T>(&pack(table, QuantUse::Linear)?)?;
    let guard = weight.read()?;
    let ex = &mut exec(CpuIsa::Scalar, threads);
    let mut same = filled::<T>(&[ids.len(), table.k])?;
    let mut wide_out = filled::<f32>(&[ids.len(), table.k])?;
    embedding_into(guard.view()?, view(ids, &[ids.len()]), same.view_mut(), ex)?;
    embedding_into(guard.view()?, view(ids, &[ids.len()]), wide_out.view_mut(), ex)?;
    assert_eq!(bits(&values::<T>(&same)), bits(&want), "{}", table.scheme);
    assert_eq!(bits(&values::<f32>(&wide_out)), bits(&want), "{}", table.scheme);
    Ok(())
}

#[test]
fn quantised_tables_are_looked_up_as_floats() -> Result<()> {
    for (seed, scheme) in (1..).zip(schemes(96)) {
        for (n, k, count) in [(37, 96, 9), (5, 100, 3), (40, 96, 700), (1, 8, 0)] {
            if k != 96 && !schemes(k).contains(&scheme) {
                continue;
            }
            let table = Plain::new(n, k, scheme, true, seed);
            let ids: Vec<u32> = (0..count).map(|i| (i * 7 + 3) % n as u32).collect();
            for threads in [1, 3] {
                looks_up::<f32>(&table, &ids, threads)?;
                looks_up::<bf16>(&table, &ids, threads)?;
                looks_up::<f16>(&table, &ids, threads)?;
            }
        }
    }
    Ok(())
}
