//! Grouped products with quantised weights: each expert's are the dense ones.

use candle_core::Result;
use half::bf16;
use moe_kernels::quant::{QuantMatrix, QuantRows, QuantUse};
use moe_kernels::{
    Activation, Exec, ExpertGroups, Segment, gated_activation_into, grouped_down_into,
    grouped_down_segment_into, grouped_gate_up_into,
};

use crate::common::{bits, data, exec, filled, isas, values, view};
use crate::quantised::{PER_TENSOR, Plain, int, linear, pack, schemes, weight};

/// Grouped products are the dense ones of each expert: slots, empty experts, bias, activation, segments.
#[test]
fn experts_are_dense_products() -> Result<()> {
    let h = 96;
    let i = 72;
    let r = 5;
    let offsets = [0u32, 2, 2, 9];
    let in_rows = [4u32, 0, 1, 1, 2, 3, 0, 4, 2];
    let out_rows = [3u32, 8, 0, 1, 2, 4, 5, 6, 7];
    let groups = ExpertGroups {
        offsets: view(&offsets, &[4]),
        in_rows: view(&in_rows, &[9]),
        out_rows: view(&out_rows, &[9]),
    };
    let x = data::<bf16>(r * h, 1);
    let b13 = data::<bf16>(3 * 2 * i, 2);
    let b2 = data::<bf16>(3 * h, 3);
    for scheme in [int(4, 24, true, false), int(8, 24, true, true), PER_TENSOR] {
        let w13: Vec<_> = (0..3).map(|e| Plain::new(2 * i, h, scheme, true, 10 + e)).collect();
        let w2: Vec<_> = (0..3).map(|e| Plain::new(h, i, scheme, e != 1, 20 + e)).collect();
        let all = |w: &[Plain], usage| {
            QuantMatrix::pack(&w.iter().map(|w| w as &dyn QuantRows).collect::<Vec<_>>(), usage, &Exec::cpu())
        };
        let gate_up = weight::<bf16>(&all(&w13, QuantUse::GateUp)?)?;
        let down = weight::<bf16>(&all(&w2, QuantUse::RowParallel { segments: 8 })?)?;
        let gate_up = gate_up.read()?;
        let down = down.read()?;
        let gate_up = gate_up.view()?;
        let down = down.view()?;
        let mut ex = exec(moe_kernels::CpuIsa::detect(), 2);
        let mut hidden = filled::<bf16>(&[9, i])?;
        let bias = Some(view(&b13, &[3, 2 * i]));
        let act = Activation::SwiGlu;
        grouped_gate_up_into(view(&x, &[r, h]), &groups, gate_up, bias, act, hidden.view_mut(), &mut ex)?;
        let hidden: Vec<bf16> = values(&hidden);
        let mut out = filled::<f32>(&[10, h])?;
        let mut sums = vec![0.0f32; 10 * h];
        let bias = Some(view(&b2, &[3, h]));
        grouped_down_into(view(&hidden, &[9, i]), &groups, down, bias, out.view_mut(), &mut ex)?;
        for index in 0..8 {
            let mut part = filled::<f32>(&[10, h])?;
            let segment = Segment { index, of: 8 };
            let x = view(&hidden, &[9, i]);
            grouped_down_segment_into(x, &groups, down, segment, part.view_mut(), &mut ex)?;
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
                let gate = view(gate, &[i]);
                let up = view(up, &[i]);
                let mut want = filled::<bf16>(&[i])?;
                gated_activation_into(gate, up, act, want.view_mut(), &mut ex)?;
                let want: Vec<bf16> = values(&want);
                assert_eq!(bits(&hidden[slot * i..][..i]), bits(&want), "{scheme} slot {slot}");
                let w2 = pack(&w2[e], QuantUse::RowParallel { segments: 8 })?;
                let x = &hidden[slot * i..][..i];
                let row = out_rows[slot] as usize * h;
                let b2 = &b2[e * h..][..h];
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

/// Rows for several experts: a row that is used again is packed once if the columns have the same order, and again for
/// another order. Each slot has the bits of its expert alone.
#[test]
fn a_row_for_several_experts() -> Result<()> {
    let h = 96;
    let i = 40;
    let x = data::<bf16>(2 * h, 1);
    let offsets = [0u32, 1, 2, 3, 4, 6];
    let in_rows = [1u32, 1, 1, 0, 0, 1];
    let gate_up =
        |matrices: &[&dyn QuantRows], offsets: &[u32], in_rows: &[u32], ex: &mut Exec| -> Result<Vec<bf16>> {
            let w = QuantMatrix::pack(matrices, QuantUse::GateUp, ex)?;
            let slots = in_rows.len();
            let in_rows = view(in_rows, &[slots]);
            let groups =
                ExpertGroups { offsets: view(offsets, &[offsets.len()]), in_rows, out_rows: in_rows };
            let mut out = filled::<bf16>(&[slots, i])?;
            let w = weight::<bf16>(&w)?;
            let guard = w.read()?;
            let x = view(&x, &[2, h]);
            grouped_gate_up_into(x, &groups, guard.view()?, None, Activation::SwiGlu, out.view_mut(), ex)?;
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
