//! Products with quantised weights: against f64, against the dequantised f32 matrix bit for bit where that is promised,
//! and over numbers of rows, threads and segments.

use candle_core::Result;
use half::{bf16, f16};
use moe_kernels::quant::{LogicalRows, QuantMatrix, QuantUse};
use moe_kernels::{
    Codes, Exec, Float, QuantGroup, QuantScheme, Segment, linear_into, linear_row_parallel_into,
    linear_segment_into, row_parallel_segments,
};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, values, view};
use crate::quantised::{PER_TENSOR, Plain, int, linear, pack, schemes, weight};

/// One product of every scheme against its dequantised matrix in f64, with the bound that ops/linear.rs promises.
fn check<T: Float>(
    t: usize,
    n: usize,
    k: usize,
    narrow: bool,
    row_parallel: bool,
    threads: usize,
    seed: u64,
) {
    let segments = if row_parallel { row_parallel_segments(k) } else { 1 };
    let usage = if row_parallel { QuantUse::RowParallel { segments } } else { QuantUse::Linear };
    let x = data::<T>(t * k, seed ^ 5);
    for scheme in schemes(k) {
        let plain = Plain::new(n, k, scheme, narrow, seed);
        let w = plain.dequantised();
        let magnitudes = plain.magnitudes();
        let packed = pack(&plain, usage).unwrap();
        let mut back = vec![0.0; n * k];
        packed.dequantise_into(0, 0..n, &mut back).unwrap();
        assert_eq!(bits(&back), bits(&w), "{scheme}");
        for isa in isas() {
            let got = linear::<T, f32>(&x, &packed, None, &mut exec(isa, threads)).unwrap();
            for (i, got) in got.iter().enumerate() {
                let x = &x[i / n * k..][..k];
                let w = &w[i % n * k..][..k];
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(x.widen()) * f64::from(*w));
                let want: f64 = terms.sum();
                let magnitudes = x.iter().zip(&magnitudes[i % n * k..][..k]);
                let sum: f64 = magnitudes.map(|(x, m)| f64::from(x.widen().abs()) * f64::from(*m)).sum();
                let largest = x.iter().map(|x| x.widen().abs()).fold(0.0, f32::max);
                let weights: f64 = w.iter().map(|w| f64::from(w.abs())).sum();
                let fixed = f64::from(largest) * weights / f64::from(1 << 15);
                let bound = fixed + sum * (k as f64 + 16.0) / f64::from(1 << 24);
                let place = (i / n, i % n);
                let error = (f64::from(*got) - want).abs();
                assert!(error <= bound, "{scheme} {isa:?} {place:?}: {got} {want}, {error} > {bound}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn products_are_those_of_the_dequantised_matrix(
        t in 0usize..36, n in 0usize..70, k in proptest::sample::select(&[0, 1, 7, 8, 9, 72, 96, 250, 288, 480, 600][..]),
        narrow: bool, row_parallel: bool, threads in 1usize..4, seed: u64, dtype in 0usize..3,
    ) {
        let t = if k > 250 { t / 3 } else { t };
        match dtype {
            0 => check::<f32>(t, n, k, narrow, row_parallel, threads, seed),
            1 => check::<bf16>(t, n, k, narrow, row_parallel, threads, seed),
            _ => check::<f16>(t, n, k, narrow, row_parallel, threads, seed),
        }
    }
}

/// f32 activations and FP8 weights: the bits of the dequantised f32 matrix, in both kinds of products.
#[test]
fn float_products_have_the_bits_of_the_dequantised_matrix() -> Result<()> {
    for (t, n, k, seed) in [(1, 40, 288, 1), (33, 17, 600, 2), (7, 64, 72, 3), (2, 16, 4128, 4)] {
        let x = data::<bf16>(t * k, seed);
        let x32: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        for scheme in schemes(k).into_iter().filter(|s| !s.act_order) {
            let plain = Plain::new(n, k, scheme, seed % 2 == 0, seed);
            let w = plain.dequantised();
            for isa in isas() {
                let mut ex = exec(isa, 2);
                for usage in [QuantUse::Linear, QuantUse::RowParallel { segments: row_parallel_segments(k) }]
                {
                    let op = if usage == QuantUse::Linear { linear_into } else { linear_row_parallel_into };
                    let mut want = filled::<f32>(&[t, n])?;
                    op(view(&x32, &[t, k]), view(&w, &[n, k]), None, want.view_mut(), &mut ex)?;
                    let packed = pack(&plain, usage)?;
                    let want = bits::<f32>(&values(&want));
                    assert_eq!(
                        bits(&linear::<f32, f32>(&x32, &packed, None, &mut ex)?),
                        want,
                        "{scheme} {isa:?}"
                    );
                    if scheme.codes == Codes::E4m3 {
                        let got = bits(&linear::<bf16, f32>(&x, &packed, None, &mut ex)?);
                        assert_eq!(got, want, "{scheme} {isa:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sums of the largest integers, which come closest to what 32 bits hold.
#[test]
fn the_largest_sums_are_exact() -> Result<()> {
    for (bits, most) in [(4, 15u8), (5, 31), (6, 63), (8, 255)] {
        for (k, sign) in [(128, 1.0), (128, -1.0), (1024, 1.0)] {
            let scheme = int(bits, 128, true, false);
            let rows = LogicalRows {
                q: vec![most; 16 * k],
                scale: vec![1.0; k / 8],
                zero: vec![0; k / 8],
                ..LogicalRows::default()
            };
            let packed = pack(&Plain { n: 16, k, scheme, rows, perm: None }, QuantUse::Linear)?;
            let x = bf16::from_f32(sign * 1.9921875);
            let want = k as f32 * f32::from(most) * x.to_f32();
            for (isa, t) in isas().flat_map(|isa| [1, 2, 9].map(|t| (isa, t))) {
                let got = linear::<bf16, f32>(&vec![x; t * k], &packed, None, &mut exec(isa, 1))?;
                assert!(got.iter().all(|got| *got == want), "{bits} {k} {isa:?} {t}: {} {want}", got[0]);
            }
        }
    }
    Ok(())
}

/// A row's bits do not depend on the other rows, on threads, or on how many segments are computed at a time; and paths
/// that fuse multiply-adds agree.
#[test]
fn bits_depend_on_the_row_alone() -> Result<()> {
    let n = 77;
    let segments = 8;
    // Of 512 and 768 columns blocks are such that AMX multiplies them.
    for (k, scheme) in [
        (576, int(4, 32, true, false)),
        (576, int(4, 0, false, true)),
        (576, int(8, 96, true, true)),
        (512, int(4, 32, true, false)),
        (768, int(4, 0, false, true)),
        (512, int(8, 128, true, true)),
        (768, int(5, 128, true, false)),
        (768, int(6, 128, true, false)),
        (768, int(4, 128, false, false).with_minima()),
        (512, int(4, 32, false, false).with_minima().with_shared_scales(8)),
        (512, int(5, 32, false, false).with_minima().with_shared_scales(8)),
        (512, int(6, 16, false, false).with_shared_scales(16)),
        (512, QuantScheme::iq4_nl(QuantGroup::Size(32)).with_shared_scales(8)),
        (512, QuantScheme::fp4(QuantGroup::Size(32))),
        (768, QuantScheme::fp4(QuantGroup::Size(128))),
        (512, QuantScheme::fp4(QuantGroup::Size(16)).with_fp8_scales()),
    ] {
        let x = data::<bf16>(300 * k, 9);
        let packed = pack(&Plain::new(n, k, scheme, true, 8), QuantUse::RowParallel { segments })?;
        let mut fused = Vec::new();
        for isa in isas() {
            let all = linear::<bf16, f32>(&x, &packed, None, &mut exec(isa, 3))?;
            let ex = &mut exec(isa, 1);
            let w = weight::<bf16>(&packed)?;
            for (first, rows) in [(0, 1), (299, 1), (3, 2), (10, 5), (20, 13), (7, 250)] {
                let some = linear::<bf16, f32>(&x[first * k..][..rows * k], &packed, None, ex)?;
                assert_eq!(bits(&some), bits(&all[first * n..][..rows * n]), "{scheme} {isa:?} {rows}");
            }
            let mut sum: Vec<f32> = Vec::new();
            for index in 0..segments {
                let mut out = filled::<f32>(&[2, n])?;
                let segment = Segment { index, of: segments };
                let guard = w.read()?;
                linear_segment_into(view(&x[..2 * k], &[2, k]), guard.view()?, segment, out.view_mut(), ex)?;
                let part: Vec<f32> = values(&out);
                sum = if index == 0 { part } else { sum.iter().zip(part).map(|(a, b)| a + b).collect() };
            }
            assert_eq!(bits(&sum), bits(&all[..2 * n]), "{scheme} {isa:?}");
            if isa != moe_kernels::CpuIsa::Scalar {
                fused.push(bits(&all));
            }
        }
        assert!(fused.windows(2).all(|pair| pair[0] == pair[1]), "{scheme}");
    }
    Ok(())
}

/// With scales and inputs of any size, and NaN, many rows have the bits that each has alone. A single row always
/// multiplies scales; many rows add exponents instead if none can leave its range.
#[test]
fn scales_of_any_size() -> Result<()> {
    let rows = 20;
    let n = 40;
    let k = 256;
    let fp4 = QuantScheme::fp4(QuantGroup::Size(32));
    let minima = int(4, 32, false, false).with_minima();
    for scheme in [int(4, 32, false, false), int(8, 128, true, false), fp4, minima] {
        for scale in [0.02f32, 0.0, -0.5, 6e-8, 3e4, 6e4, 1e-30, 1e30, f32::NAN] {
            let mut plain = Plain::new(n, k, scheme, true, 3);
            plain.rows.scale[5] = scale;
            let w = pack(&plain, QuantUse::Linear)?;
            for factor in [1.0, 0.0, 1e-17, 1e-25, 1e-36, 1e36, f32::NAN] {
                let mut x = data::<bf16>(rows * k, 4);
                x[7 * k..][..96].iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * factor));
                for isa in isas() {
                    let ex = &mut exec(isa, 1);
                    let all = linear::<bf16, f32>(&x, &w, None, ex)?;
                    for row in [0, 7, 19] {
                        let alone = linear::<bf16, f32>(&x[row * k..][..k], &w, None, ex)?;
                        for (a, b) in all[row * n..].iter().zip(alone) {
                            let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                            assert!(same, "{scheme} {scale} {factor} {isa:?} row {row}: {a} {b}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// A part of K that a rank holds, packed by itself, gives the bits of its segments in the whole.
#[test]
fn a_rank_has_the_bits_of_its_segments() -> Result<()> {
    let n = 33;
    let k = 768;
    let seed = 6;
    let whole = Plain::new(n, k, int(4, 32, true, false), true, seed);
    let half = |rank: usize| {
        let columns = |all: &[u8], width: usize| -> Vec<u8> {
            all.chunks(2 * width).flat_map(|row| row[rank * width..][..width].to_vec()).collect()
        };
        let scale = whole.rows.scale.chunks(24).flat_map(|row| row[rank * 12..][..12].to_vec()).collect();
        let rows = LogicalRows {
            q: columns(&whole.rows.q, k / 2),
            scale,
            zero: columns(&whole.rows.zero, 12),
            ..LogicalRows::default()
        };
        Plain { n, k: k / 2, scheme: whole.scheme, rows, perm: None }
    };
    let x = data::<bf16>(3 * k, 4);
    let all = weight::<bf16>(&pack(&whole, QuantUse::RowParallel { segments: 8 })?)?;
    let all = all.read()?;
    let ex = &mut Exec::cpu();
    for index in 0..8 {
        let rank = weight::<bf16>(&pack(&half(index / 4), QuantUse::RowParallel { segments: 4 })?)?;
        let rank = rank.read()?;
        let part: Vec<bf16> = x.chunks(k / 2).skip(index / 4).step_by(2).flatten().copied().collect();
        let mut a = filled::<f32>(&[3, n])?;
        let mut b = filled::<f32>(&[3, n])?;
        let segment = Segment { index: index % 4, of: 4 };
        linear_segment_into(view(&x, &[3, k]), all.view()?, Segment { index, of: 8 }, a.view_mut(), ex)?;
        linear_segment_into(view(&part, &[3, k / 2]), rank.view()?, segment, b.view_mut(), ex)?;
        assert_eq!(bits::<f32>(&values(&a)), bits::<f32>(&values(&b)), "{index}");
    }
    Ok(())
}

/// The size is that of the checkpoint; a frozen workspace serves fewer rows; NaN and infinity stay in their row.
#[test]
fn memory_and_values_that_are_not_finite() -> Result<()> {
    let n = 64;
    let k = 256;
    let w = pack(&Plain::new(n, k, int(4, 32, false, false), true, 3), QuantUse::Linear)?;
    assert_eq!(w.bytes(), n * k / 2 + n * (k / 32) * 2);
    let wide = pack(&Plain::new(n, k, int(4, 32, true, false), false, 3), QuantUse::Linear)?;
    assert_eq!(wide.bytes(), n * k / 2 + n * (k / 32) * 5);
    let shared = int(6, 16, false, false).with_shared_scales(16);
    let two = pack(&Plain::new(n, k, shared, false, 3), QuantUse::Linear)?;
    assert_eq!(two.bytes(), n * k * 6 / 8 + n * (k / 16) + n * 2);
    let minima = int(5, 32, false, false).with_minima().with_shared_scales(8);
    let minima = pack(&Plain::new(n, k, minima, false, 3), QuantUse::Linear)?;
    assert_eq!(minima.bytes(), n * k * 5 / 8 + 2 * (n * (k / 32) + n * 2));
    let mut x = data::<bf16>(3 * k, 4);
    let mut ex = Exec::cpu();
    let clean = linear::<bf16, f32>(&x, &w, None, &mut ex)?;
    ex.workspace().freeze(true);
    assert_eq!(bits(&linear::<bf16, f32>(&x[k..], &w, None, &mut ex)?), bits(&clean[n..]));
    (x[k], x[2 * k]) = (bf16::NAN, bf16::INFINITY);
    let got = linear::<bf16, f32>(&x, &w, None, &mut ex)?;
    assert_eq!(bits(&got[..n]), bits(&clean[..n]));
    assert!(got[n..].iter().all(|v| !v.is_finite()));
    Ok(())
}

#[test]
fn errors_say_what_is_wrong() -> Result<()> {
    let plain = |scheme| Plain::new(20, 96, scheme, true, 1);
    let fails = |m: &Plain, usage, what: &str| {
        let e = pack(m, usage).unwrap_err().to_string();
        assert!(e.contains(what), "{e}");
    };
    let good = plain(int(4, 32, true, false));
    fails(&plain(int(3, 32, true, false)), QuantUse::Linear, "expected integers of 4, 5, 6 or 8 bits");
    fails(&good, QuantUse::RowParallel { segments: 7 }, "7 segments do not divide");
    fails(&Plain::new(3, 32, int(8, 32, true, false), true, 1), QuantUse::GateUp, "even number of rows");
    let mut bad = plain(int(4, 32, true, false));
    bad.rows.q[5] = 16;
    fails(&bad, QuantUse::Linear, "16 does not fit 4 bits");
    let mut bad = plain(int(4, 32, false, false));
    bad.rows.zero[0] = 7;
    fails(&bad, QuantUse::Linear, "zero point 7");
    let mut bad = plain(int(4, 32, false, false).with_shared_scales(2));
    bad.rows.scale_levels.factor.pop();
    fails(&bad, QuantUse::Linear, "factors and shared numbers");
    fails(
        &plain(int(4, 32, false, false).with_shared_scales(3)),
        QuantUse::Linear,
        "a power of two of groups",
    );
    let mut bad = plain(QuantScheme::fp4(QuantGroup::Size(16)).with_fp8_scales());
    bad.rows.scale_levels.factor[2] = 0xff;
    fails(&bad, QuantUse::Linear, "an FP8 scale is NaN");
    let mut bad = plain(PER_TENSOR);
    bad.rows.q[7] = 0xff;
    fails(&bad, QuantUse::Linear, "NaN");
    let mut bad = plain(int(4, 32, true, true));
    bad.perm = Some(vec![0; 96]);
    fails(&bad, QuantUse::Linear, "name each of the 96 columns once");
    assert!(QuantMatrix::pack(&[], QuantUse::Linear, &Exec::cpu()).is_err());
    let other = Plain::new(21, 96, good.scheme, true, 1);
    assert!(QuantMatrix::pack(&[&good, &other], QuantUse::Linear, &Exec::cpu()).is_err());

    let w = pack(&good, QuantUse::Linear)?;
    let mut ex = Exec::cpu();
    let x = data::<f32>(96, 1);
    let mut out = filled::<f32>(&[1, 20])?;
    let x = view(&x, &[1, 96]);
    let segment = Segment { index: 0, of: 2 };
    let held = weight::<f32>(&w)?;
    let held = held.read()?;
    let e = linear_segment_into(x, held.view()?, segment, out.view_mut(), &mut ex).unwrap_err().to_string();
    assert!(e.contains("2 segments, got one in 1"), "{e}");
    let e = linear_row_parallel_into(x, held.view()?, None, out.view_mut(), &mut ex).unwrap_err().to_string();
    assert!(e.contains("8 segments, got one in 1"), "{e}");
    let both = weight::<f32>(&pack(&good, QuantUse::GateUp)?)?;
    let both = both.read()?;
    let both = both.view()?.only_matrix("test")?;
    let e = linear_into(x, both, None, out.view_mut(), &mut ex).unwrap_err().to_string();
    assert!(e.contains("gate and up"), "{e}");
    let short = view(&[0f32; 95], &[1, 95]);
    assert!(linear_into(short, held.view()?, None, out.view_mut(), &mut ex).is_err());
    assert!(w.dequantise_into(1, 0..1, &mut [0.0; 96]).is_err());
    assert!(w.dequantise_into(0, 0..21, &mut [0.0; 96 * 21]).is_err());
    Ok(())
}
