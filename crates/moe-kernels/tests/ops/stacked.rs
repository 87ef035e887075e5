//! Matrices of several number formats under each other: each row has the bits that it has in a matrix by itself.

use candle_core::Result;
use half::bf16;
use moe_kernels::quant::{QuantMatrix, QuantRows, QuantStack, QuantUse};
use moe_kernels::{
    Activation, Element, Exec, ExpertGroups, Float, QuantGroup, QuantScheme, Weight, gated_activation_into,
    grouped_gate_up_into, linear_into,
};

use crate::common::{bits, data, exec, filled, isas, values, view};
use crate::quantised::{PER_TENSOR, Plain, int, linear, pack, weight};

const K: usize = 512;

fn q4_k() -> QuantScheme {
    int(4, 32, false, false).with_minima().with_shared_scales(8)
}

fn q6_k() -> QuantScheme {
    int(6, 16, false, false).with_shared_scales(16)
}

fn product<T: Float>(x: &[T], w: &Weight, bias: &[T], ex: &mut Exec) -> Result<Vec<f32>> {
    let n = bias.len();
    let t = x.len() / K;
    let mut out = filled::<f32>(&[t, n])?;
    let guard = w.read()?;
    let bias = view(bias, &[n]);
    linear_into(view(x, &[t, K]), guard.view()?, Some(bias), out.view_mut(), ex)?;
    Ok(values(&out))
}

/// Panels of one matrix, of two that share a unit of 32 rows, and a last one that is not full; integers next to FP8.
fn check<T: Float>() -> Result<()> {
    for schemes in [[q4_k(), q4_k(), q6_k()], [int(4, 0, true, true), PER_TENSOR, int(8, 32, false, false)]] {
        let rows = [48, 16, 21];
        let parts: Vec<Plain> =
            (0..3).map(|i| Plain::new(rows[i], K, schemes[i], true, 5 + i as u64)).collect();
        let packed = parts.iter().map(|part| pack(part, QuantUse::Linear)).collect::<Result<Vec<_>>>()?;
        let stack = QuantStack::new(packed.clone(), QuantUse::Linear)?;
        assert_eq!((stack.dims(), stack.usage()), ([1, 85, K], QuantUse::Linear));
        assert_eq!(stack.bytes(), packed.iter().map(QuantMatrix::bytes).sum::<usize>());
        let weight = Weight::of_quantised(stack, <T as Element>::DTYPE)?;
        let floats: Vec<f32> = parts.iter().flat_map(Plain::dequantised).collect();
        let of_weight =
            weight.to_tensor()?.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let narrowed: Vec<f32> = floats.iter().map(|w| T::narrow(*w).widen()).collect();
        assert_eq!(bits(&of_weight), bits(&narrowed));
        let x = data::<T>(300 * K, 3);
        let bias = data::<T>(85, 4);
        for (isa, t) in isas().flat_map(|isa| [1, 2, 7, 30, 300].map(|t| (isa, t))) {
            let ex = &mut exec(isa, 2);
            let x = &x[..t * K];
            let got = product(x, &weight, &bias, ex)?;
            let mut column = 0;
            for (part, packed) in parts.iter().zip(&packed) {
                let bias = &bias[column..column + part.n];
                let want = linear::<T, f32>(x, packed, Some(bias), ex)?;
                let here = got.chunks(85).flat_map(|row| &row[column..column + part.n]).copied();
                assert_eq!(bits(&here.collect::<Vec<_>>()), bits(&want), "{} {isa:?} {t}", part.scheme);
                column += part.n;
            }
        }
    }
    Ok(())
}

#[test]
fn rows_have_the_bits_of_their_own_matrix() -> Result<()> {
    check::<f32>()?;
    check::<bf16>()
}

/// Gate in one format, up in another, of widths that fill panels and not.
#[test]
fn gate_and_up_may_differ() -> Result<()> {
    for width in [32, 40] {
        let schemes = [q4_k(), QuantScheme::fp4(QuantGroup::Size(32))];
        let experts = |scheme, seed| -> Vec<Plain> {
            (0..3u64).map(|e| Plain::new(width, K, scheme, true, seed + e)).collect()
        };
        let halves = [experts(schemes[0], 20), experts(schemes[1], 40)];
        let pack_all = |half: &Vec<Plain>| {
            let rows: Vec<&dyn QuantRows> = half.iter().map(|m| m as _).collect();
            QuantMatrix::pack(&rows, QuantUse::Linear, &Exec::cpu())
        };
        let packed = halves.iter().map(pack_all).collect::<Result<Vec<_>>>()?;
        let both =
            Weight::of_quantised(QuantStack::new(packed, QuantUse::GateUp)?, <bf16 as Element>::DTYPE)?;
        assert_eq!(both.dims(), [3, 2 * width, K]);
        let x = data::<bf16>(30 * K, 9);
        let offsets = [0u32, 1, 1, 30];
        let in_rows: Vec<u32> = (0..30).map(|row| row * 7 % 30).collect();
        let rows = view(&in_rows, &[30]);
        let groups = ExpertGroups { offsets: view(&offsets, &[4]), in_rows: rows, out_rows: rows };
        for isa in isas() {
            let ex = &mut exec(isa, 2);
            let mut out = filled::<bf16>(&[30, width])?;
            let guard = both.read()?;
            let act = Activation::SwiGlu;
            grouped_gate_up_into(view(&x, &[30, K]), &groups, guard.view()?, None, act, out.view_mut(), ex)?;
            let got: Vec<bf16> = values(&out);
            for slot in 0..30 {
                let e = if slot == 0 { 0 } else { 2 };
                let x = &x[in_rows[slot] as usize * K..][..K];
                let sums = |half: &[Plain], ex: &mut Exec| {
                    linear::<bf16, f32>(x, &pack(&half[e], QuantUse::Linear)?, None, ex)
                };
                let [gate, up] = [sums(&halves[0], ex)?, sums(&halves[1], ex)?];
                let mut want = filled::<bf16>(&[width])?;
                gated_activation_into(view(&gate, &[width]), view(&up, &[width]), act, want.view_mut(), ex)?;
                let want: Vec<bf16> = values(&want);
                assert_eq!(bits(&got[slot * width..][..width]), bits(&want), "{isa:?} {width} slot {slot}");
            }
        }
        // An expert moves with both.
        let bytes = both.expert_bytes(1)?;
        let before = both.to_tensor()?.get(1)?.flatten_all()?.to_vec1::<bf16>()?;
        both.write_expert(2, &bytes)?;
        assert_eq!(both.to_tensor()?.get(2)?.flatten_all()?.to_vec1::<bf16>()?, before);
        assert!(both.write_expert(2, &bytes[1..]).is_err());
    }
    Ok(())
}

#[test]
fn matrices_that_do_not_stack_are_errors() -> Result<()> {
    let packed = |n, k, usage| pack(&Plain::new(n, k, q4_k(), true, 1), usage);
    let fails = |matrices: Vec<QuantMatrix>, usage, what: &str| {
        let error = QuantStack::new(matrices, usage).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    let good = packed(16, K, QuantUse::Linear)?;
    fails(Vec::new(), QuantUse::Linear, "at least one");
    fails(vec![good.clone(), packed(16, 256, QuantUse::Linear)?], QuantUse::Linear, "[1, 16, 256]");
    fails(vec![good.clone(), packed(16, K, QuantUse::GateUp)?], QuantUse::Linear, "for GateUp");
    fails(vec![packed(8, K, QuantUse::Linear)?, good.clone()], QuantUse::Linear, "[8, 16] rows");
    fails(vec![good.clone(), packed(32, K, QuantUse::Linear)?], QuantUse::GateUp, "[16, 32] rows");
    fails(vec![good.clone(), good], QuantUse::RowParallel { segments: 1 }, "do not stack");
    let stack = QuantStack::from(packed(16, K, QuantUse::Linear)?);
    assert_eq!(weight::<bf16>(&packed(16, K, QuantUse::Linear)?)?.bytes(), stack.bytes());
    Ok(())
}
