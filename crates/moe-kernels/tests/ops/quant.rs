//! Products with quantised weights: against f64, against the dequantised f32 matrix bit for bit where that is promised,
//! and over numbers of rows, threads and segments.

use candle_core::Result;
use half::{bf16, f16};
use moe_kernels::quant::{LogicalRows, QuantMatrix, QuantRows, QuantUse};
use moe_kernels::{
    Activation, Exec, ExpertGroups, Float, Fp8Scales, QuantScheme, Segment, gated_activation_into,
    linear_into, linear_row_parallel_into, quant_down_into, quant_down_segment_into, quant_gate_up_into,
    quant_linear_into, quant_linear_segment_into, row_parallel_segments,
};
use proptest::prelude::*;

use crate::common::{bits, data, exec, filled, isas, values, view};
use crate::quantised::{Plain, int, pack, schemes};

const PER_TENSOR: QuantScheme = QuantScheme::Fp8 { scales: Fp8Scales::Tensor };

fn linear<T: Float, O: Float>(x: &[T], w: &QuantMatrix, bias: Option<&[T]>, ex: &mut Exec) -> Result<Vec<O>> {
    let [_, n, k] = w.dims();
    let t = x.len().checked_div(k).unwrap_or(0);
    let mut out = filled::<O>(&[t, n])?;
    let bias = bias.map(|b| view(b, &[n]));
    quant_linear_into(view(x, &[t, k]), w, bias, out.view_mut(), ex)?;
    Ok(values(&out))
}

/// One product of every scheme against its dequantised matrix in f64, with the bound that ops/quant.rs promises.
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
        let (w, packed) = (plain.dequantised(), pack(&plain, usage).unwrap());
        let mut back = vec![0.0; n * k];
        packed.dequantise_into(0, 0..n, &mut back).unwrap();
        assert_eq!(bits(&back), bits(&w), "{scheme}");
        for isa in isas() {
            let got = linear::<T, f32>(&x, &packed, None, &mut exec(isa, threads)).unwrap();
            for (i, got) in got.iter().enumerate() {
                let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(x.widen()) * f64::from(*w));
                let (want, sum): (f64, f64) = terms.fold((0.0, 0.0), |(a, b), t| (a + t, b + t.abs()));
                let largest = x.iter().map(|x| x.widen().abs()).fold(0.0, f32::max);
                let weights: f64 = w.iter().map(|w| f64::from(w.abs())).sum();
                let fixed = f64::from(largest) * weights / f64::from(1 << 15);
                let bound = fixed + sum * (k as f64 + 16.0) / f64::from(1 << 24);
                let (place, error) = ((i / n, i % n), (f64::from(*got) - want).abs());
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
        for scheme in
            schemes(k).into_iter().filter(|s| !matches!(s, QuantScheme::Int { act_order: true, .. }))
        {
            let plain = Plain::new(n, k, scheme, seed % 2 == 0, seed);
            let w = plain.dequantised();
            for isa in isas() {
                let mut ex = exec(isa, 2);
                for usage in [QuantUse::Linear, QuantUse::RowParallel { segments: row_parallel_segments(k) }]
                {
                    let op = if usage == QuantUse::Linear { linear_into } else { linear_row_parallel_into };
                    let mut want = filled::<f32>(&[t, n])?;
                    op(view(&x32, &[t, k]), view(&w, &[n, k]), None, want.view_mut(), &mut ex)?;
                    let (packed, want) = (pack(&plain, usage)?, bits::<f32>(&values(&want)));
                    assert_eq!(
                        bits(&linear::<f32, f32>(&x32, &packed, None, &mut ex)?),
                        want,
                        "{scheme} {isa:?}"
                    );
                    if let QuantScheme::Fp8 { .. } = scheme {
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
    for (bits, most) in [(4, 15u8), (8, 255)] {
        for (k, sign) in [(128, 1.0), (128, -1.0), (1024, 1.0)] {
            let scheme = int(bits, 128, true, false);
            let rows = LogicalRows { q: vec![most; 16 * k], scale: vec![1.0; k / 8], zero: vec![0; k / 8] };
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

/// A row's bits do not depend on the rows beside it, on threads, or on how many segments are computed at a time; and
/// paths that fuse multiply-adds agree.
#[test]
fn bits_depend_on_the_row_alone() -> Result<()> {
    let (n, segments) = (77, 4);
    // Of 512 and 768 columns blocks are such that AMX multiplies them.
    for (k, scheme) in [
        (576, int(4, 32, true, false)),
        (576, int(4, 0, false, true)),
        (576, int(8, 96, true, true)),
        (512, int(4, 32, true, false)),
        (768, int(4, 0, false, true)),
        (512, int(8, 128, true, true)),
    ] {
        let x = data::<bf16>(300 * k, 9);
        let packed = pack(&Plain::new(n, k, scheme, true, 8), QuantUse::RowParallel { segments })?;
        let mut fused = Vec::new();
        for isa in isas() {
            let all = linear::<bf16, f32>(&x, &packed, None, &mut exec(isa, 3))?;
            let ex = &mut exec(isa, 1);
            for (first, rows) in [(0, 1), (299, 1), (3, 2), (10, 5), (20, 13), (7, 250)] {
                let some = linear::<bf16, f32>(&x[first * k..][..rows * k], &packed, None, ex)?;
                assert_eq!(bits(&some), bits(&all[first * n..][..rows * n]), "{scheme} {isa:?} {rows}");
            }
            let mut sum: Vec<f32> = Vec::new();
            for index in 0..segments {
                let mut out = filled::<f32>(&[2, n])?;
                let segment = Segment { index, of: segments };
                quant_linear_segment_into(view(&x[..2 * k], &[2, k]), &packed, segment, out.view_mut(), ex)?;
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

/// Scales and inputs of any size, NaN too, give many rows the bits that each has alone, where scales are always multiplied: many
/// rows add exponents in place of that if none can leave its range.
#[test]
fn scales_of_any_size() -> Result<()> {
    let (rows, n, k) = (20, 40, 256);
    for scheme in [int(4, 32, false, false), int(8, 128, true, false)] {
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
    let (n, k, seed) = (33, 768, 6);
    let whole = Plain::new(n, k, int(4, 32, true, false), true, seed);
    let half = |rank: usize| {
        let columns = |all: &[u8], width: usize| -> Vec<u8> {
            all.chunks(2 * width).flat_map(|row| row[rank * width..][..width].to_vec()).collect()
        };
        let scale = whole.rows.scale.chunks(24).flat_map(|row| row[rank * 12..][..12].to_vec()).collect();
        let rows =
            LogicalRows { q: columns(&whole.rows.q, k / 2), scale, zero: columns(&whole.rows.zero, 12) };
        Plain { n, k: k / 2, scheme: whole.scheme, rows, perm: None }
    };
    let x = data::<bf16>(3 * k, 4);
    let (all, ex) = (pack(&whole, QuantUse::RowParallel { segments: 8 })?, &mut Exec::cpu());
    for index in 0..8 {
        let rank = pack(&half(index / 4), QuantUse::RowParallel { segments: 4 })?;
        let part: Vec<bf16> = x.chunks(k / 2).skip(index / 4).step_by(2).flatten().copied().collect();
        let (mut a, mut b) = (filled::<f32>(&[3, n])?, filled::<f32>(&[3, n])?);
        let segment = Segment { index: index % 4, of: 4 };
        quant_linear_segment_into(view(&x, &[3, k]), &all, Segment { index, of: 8 }, a.view_mut(), ex)?;
        quant_linear_segment_into(view(&part, &[3, k / 2]), &rank, segment, b.view_mut(), ex)?;
        assert_eq!(bits::<f32>(&values(&a)), bits::<f32>(&values(&b)), "{index}");
    }
    Ok(())
}

/// Grouped products are the dense ones of each expert: slots, empty experts, bias, activation, segments.
#[test]
fn experts_are_dense_products() -> Result<()> {
    let (h, i, r) = (96, 72, 5);
    let offsets = [0u32, 2, 2, 9];
    let (in_rows, out_rows) = ([4u32, 0, 1, 1, 2, 3, 0, 4, 2], [3u32, 8, 0, 1, 2, 4, 5, 6, 7]);
    let groups = ExpertGroups {
        offsets: view(&offsets, &[4]),
        in_rows: view(&in_rows, &[9]),
        out_rows: view(&out_rows, &[9]),
    };
    let (x, b13, b2) = (data::<bf16>(r * h, 1), data::<bf16>(3 * 2 * i, 2), data::<bf16>(3 * h, 3));
    for scheme in [int(4, 24, true, false), int(8, 24, true, true), PER_TENSOR] {
        let w13: Vec<_> = (0..3).map(|e| Plain::new(2 * i, h, scheme, true, 10 + e)).collect();
        let w2: Vec<_> = (0..3).map(|e| Plain::new(h, i, scheme, e != 1, 20 + e)).collect();
        let all = |w: &[Plain], usage| {
            QuantMatrix::pack(&w.iter().map(|w| w as &dyn QuantRows).collect::<Vec<_>>(), usage, &Exec::cpu())
        };
        let (gate_up, down) =
            (all(&w13, QuantUse::GateUp)?, all(&w2, QuantUse::RowParallel { segments: 8 })?);
        let mut ex = exec(moe_kernels::CpuIsa::detect(), 2);
        let mut hidden = filled::<bf16>(&[9, i])?;
        let bias = Some(view(&b13, &[3, 2 * i]));
        let act = Activation::SwiGlu;
        quant_gate_up_into(view(&x, &[r, h]), &groups, &gate_up, bias, act, hidden.view_mut(), &mut ex)?;
        let hidden: Vec<bf16> = values(&hidden);
        let (mut out, mut sums) = (filled::<f32>(&[10, h])?, vec![0.0f32; 10 * h]);
        let bias = Some(view(&b2, &[3, h]));
        quant_down_into(view(&hidden, &[9, i]), &groups, &down, bias, out.view_mut(), &mut ex)?;
        for index in 0..8 {
            let (mut part, segment) = (filled::<f32>(&[10, h])?, Segment { index, of: 8 });
            let x = view(&hidden, &[9, i]);
            quant_down_segment_into(x, &groups, &down, segment, part.view_mut(), &mut ex)?;
            sums.iter_mut()
                .zip(values::<f32>(&part))
                .for_each(|(a, b)| *a = if index == 0 { b } else { *a + b });
        }
        let out: Vec<f32> = values(&out);
        for (e, range) in offsets.windows(2).enumerate() {
            for slot in range[0] as usize..range[1] as usize {
                let x = &x[in_rows[slot] as usize * h..][..h];
                let both = linear::<bf16, f32>(x, &pack(&w13[e], QuantUse::Linear)?, None, &mut ex)?;
                let both: Vec<f32> =
                    both.iter().zip(&b13[e * 2 * i..]).map(|(s, b)| s + b.to_f32()).collect();
                let (gate, up) = both.split_at(i);
                let (gate, up, mut want) = (view(gate, &[i]), view(up, &[i]), filled::<bf16>(&[i])?);
                gated_activation_into(gate, up, act, want.view_mut(), &mut ex)?;
                let want: Vec<bf16> = values(&want);
                assert_eq!(bits(&hidden[slot * i..][..i]), bits(&want), "{scheme} slot {slot}");
                let w2 = pack(&w2[e], QuantUse::RowParallel { segments: 8 })?;
                let x = &hidden[slot * i..][..i];
                let (row, b2) = (out_rows[slot] as usize * h, &b2[e * h..][..h]);
                let want: Vec<f32> = linear(x, &w2, Some(b2), &mut ex)?;
                assert_eq!(bits(&out[row..][..h]), bits(&want), "{scheme} slot {slot}");
                let want: Vec<f32> = linear(x, &w2, None, &mut ex)?;
                assert_eq!(bits(&sums[row..][..h]), bits(&want), "{scheme} slot {slot}");
            }
        }
        assert_eq!(out[9 * h..], vec![77.0; h], "a row without a slot is left alone");
    }
    Ok(())
}

/// The size is that of the checkpoint; a frozen workspace serves fewer rows; NaN and infinity stay in their row.
/// Rows for several experts: one that comes again is packed once where columns lie in one order, and anew for another order. Each
/// slot has the bits of its expert alone.
#[test]
fn a_row_for_several_experts() -> Result<()> {
    let (h, i) = (96, 40);
    let x = data::<bf16>(2 * h, 1);
    let (offsets, in_rows) = ([0u32, 1, 2, 3, 4, 6], [1u32, 1, 1, 0, 0, 1]);
    let gate_up =
        |matrices: &[&dyn QuantRows], offsets: &[u32], in_rows: &[u32], ex: &mut Exec| -> Result<Vec<bf16>> {
            let (w, slots) = (QuantMatrix::pack(matrices, QuantUse::GateUp, ex)?, in_rows.len());
            let in_rows = view(in_rows, &[slots]);
            let groups =
                ExpertGroups { offsets: view(offsets, &[offsets.len()]), in_rows, out_rows: in_rows };
            let mut out = filled::<bf16>(&[slots, i])?;
            quant_gate_up_into(view(&x, &[2, h]), &groups, &w, None, Activation::SwiGlu, out.view_mut(), ex)?;
            Ok(values(&out))
        };
    for scheme in schemes(h) {
        // Their orders, where the scheme has one: a, a, b, b, a.
        let matrices: Vec<Plain> = [1, 1, 2, 2, 1]
            .into_iter()
            .zip(10..)
            .map(|(order, seed)| {
                let perm = Plain::new(2 * i, h, scheme, true, order).perm;
                Plain { perm, ..Plain::new(2 * i, h, scheme, true, seed) }
            })
            .collect();
        let all: Vec<&dyn QuantRows> = matrices.iter().map(|m| m as _).collect();
        for isa in isas() {
            let ex = &mut exec(isa, 2);
            let got = gate_up(&all, &offsets, &in_rows, ex)?;
            for (e, slots) in offsets.windows(2).enumerate() {
                for slot in slots[0] as usize..slots[1] as usize {
                    let want = gate_up(&all[e..e + 1], &[0, 1], &in_rows[slot..slot + 1], ex)?;
                    assert_eq!(bits(&got[slot * i..][..i]), bits(&want), "{scheme} {isa:?} slot {slot}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn memory_and_values_that_are_not_finite() -> Result<()> {
    let (n, k) = (64, 256);
    let w = pack(&Plain::new(n, k, int(4, 32, false, false), true, 3), QuantUse::Linear)?;
    assert_eq!(w.bytes(), n * k / 2 + n * (k / 32) * 2);
    let wide = pack(&Plain::new(n, k, int(4, 32, true, false), false, 3), QuantUse::Linear)?;
    assert_eq!(wide.bytes(), n * k / 2 + n * (k / 32) * 5);
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
    fails(&plain(int(3, 32, true, false)), QuantUse::Linear, "expected int4, int8 or fp8");
    fails(&good, QuantUse::RowParallel { segments: 7 }, "7 segments do not divide");
    fails(&Plain::new(3, 32, int(8, 32, true, false), true, 1), QuantUse::GateUp, "even number of rows");
    let mut bad = plain(int(4, 32, true, false));
    bad.rows.q[5] = 16;
    fails(&bad, QuantUse::Linear, "16 does not fit 4 bits");
    let mut bad = plain(int(4, 32, false, false));
    bad.rows.zero[0] = 7;
    fails(&bad, QuantUse::Linear, "zero point 7");
    let mut bad = plain(PER_TENSOR);
    bad.rows.q[7] = 0xff;
    fails(&bad, QuantUse::Linear, "NaN");
    let mut bad = plain(int(4, 32, true, true));
    bad.perm = Some(vec![0; 96]);
    fails(&bad, QuantUse::Linear, "name each of the 96 columns once");
    assert!(QuantMatrix::pack(&[], QuantUse::Linear, &Exec::cpu()).is_err());
    let other = Plain::new(21, 96, good.scheme, true, 1);
    assert!(QuantMatrix::pack(&[&good, &other], QuantUse::Linear, &Exec::cpu()).is_err());

    let (w, mut ex) = (pack(&good, QuantUse::Linear)?, Exec::cpu());
    let (x, mut out) = (data::<f32>(96, 1), filled::<f32>(&[1, 20])?);
    let x = view(&x, &[1, 96]);
    let segment = Segment { index: 0, of: 2 };
    assert!(quant_linear_segment_into(x, &w, segment, out.view_mut(), &mut ex).is_err());
    let both = pack(&good, QuantUse::GateUp)?;
    let e = quant_linear_into(x, &both, None, out.view_mut(), &mut ex).unwrap_err().to_string();
    assert!(e.contains("gate and up"), "{e}");
    assert!(quant_linear_into(view(&[0f32; 95], &[1, 95]), &w, None, out.view_mut(), &mut ex).is_err());
    assert!(w.dequantise_into(1, 0..1, &mut [0.0; 96]).is_err());
    assert!(w.dequantise_into(0, 0..21, &mut [0.0; 96 * 21]).is_err());
    Ok(())
}
