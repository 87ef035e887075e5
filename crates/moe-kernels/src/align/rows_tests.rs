//! Batched rows compared with brute force; scaling and masking; the errors of these ops.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::align::tests::{group, local_of, routing};

proptest! {
    #[test]
    fn rows_go_to_experts_and_back(
        (ids, k, map, local) in routing(), hidden in 1usize..7, room in 0usize..3,
    ) {
        let tokens = ids.len() / k;
        let (offsets, slots) = group(&ids, k, map.as_deref(), local).unwrap();
        let max = offsets.windows(2).map(|r| (r[1] - r[0]) as usize).max().unwrap_or(0) + room;
        let rows: Vec<f32> = (0..tokens * hidden).map(|i| i as f32 + 1.).collect();
        let batches = RowBatches {
            offsets: View::new(&offsets, &[offsets.len()]).unwrap(),
            slots: View::new(&slots, &[slots.len()]).unwrap(),
            top_k: k,
        };
        let mut out = vec![-1f32; local * max * hidden];
        let mut counts = vec![9u32; local];
        batch_rows_into(
            View::new(&rows, &[tokens, hidden]).unwrap(),
            &batches,
            ViewMut::new(&mut out, &[local, max, hidden]).unwrap(),
            ViewMut::new(&mut counts, &[local]).unwrap(),
            &mut Exec::cpu(),
        ).unwrap();
        let mut want = vec![-1f32; out.len()];
        for (e, &count) in counts.iter().enumerate() {
            let mine = (0..ids.len()).filter(|&s| local_of(ids[s], &map) == Some(e)).collect::<Vec<_>>();
            prop_assert_eq!(count as usize, mine.len());
            for (r, s) in mine.into_iter().enumerate() {
                let to = (e * max + r) * hidden;
                let from = s / k * hidden;
                want[to..to + hidden].copy_from_slice(&rows[from..from + hidden]);
            }
        }
        prop_assert_eq!(&out, &want);

        let mut back = vec![-1f32; ids.len() * hidden];
        let view = View::new(&out, &[local, max, hidden]).unwrap();
        let back_view = ViewMut::new(&mut back, &[tokens, k, hidden]).unwrap();
        unbatch_rows_into(view, &batches, back_view, &mut Exec::cpu()).unwrap();
        for (s, row) in back.chunks(hidden).enumerate() {
            match local_of(ids[s], &map) {
                Some(_) => prop_assert_eq!(row, &rows[s / k * hidden..][..hidden]),
                None => prop_assert!(row.iter().all(|&x| x == -1.), "a slot in no group was written"),
            }
        }
    }
}

#[test]
fn scaling_rounds_the_f32_product_once() -> Result<()> {
    let rows = [1.5, -2.25, 0.1, 3.0].map(bf16::from_f32);
    let mut out = [bf16::ZERO; 4];
    let scale = [0.3f32, -7.1];
    scale_rows_into(
        View::new(&rows, &[2, 2])?,
        View::new(&scale, &[2, 1])?,
        ViewMut::new(&mut out, &[2, 2])?,
        &mut Exec::cpu(),
    )?;
    for i in 0..4 {
        assert_eq!(out[i], bf16::from_f32(rows[i].to_f32() * scale[i / 2]));
    }
    Ok(())
}

#[test]
fn copies_round_f32_once_widen_to_f32_and_keep_the_rest() -> Result<()> {
    let rows = [0.1f32, -0.0, 1e30, -3.3];
    let mut out = [bf16::ZERO; 4];
    copy_rows_into(View::new(&rows, &[2, 2])?, ViewMut::new(&mut out, &[2, 2])?, &mut Exec::cpu())?;
    assert_eq!(out.map(bf16::to_bits), rows.map(|x| bf16::from_f32(x).to_bits()));
    let mut same = [bf16::ZERO; 4];
    copy_rows_into(View::new(&out, &[2, 2])?, ViewMut::new(&mut same, &[2, 2])?, &mut Exec::cpu())?;
    assert_eq!(same.map(bf16::to_bits), out.map(bf16::to_bits));
    let mut wide = [0f32; 4];
    copy_rows_into(View::new(&out, &[2, 2])?, ViewMut::new(&mut wide, &[2, 2])?, &mut Exec::cpu())?;
    assert_eq!(wide.map(f32::to_bits), out.map(|x| x.to_f32().to_bits()));
    let mut other = [f16::ZERO; 4];
    let other = ViewMut::new(&mut other, &[2, 2])?;
    let e = copy_rows_into(View::new(&out, &[2, 2])?, other, &mut Exec::cpu()).unwrap_err().to_string();
    assert!(e.contains("expected rows of dtype f32, got bf16"), "{e}");
    Ok(())
}

#[test]
fn too_many_rows_and_bad_slots_are_named() -> Result<()> {
    let rows = [0f32; 6];
    let run = |offsets: &[u32], slots: &[u32], max: usize| {
        let batches = RowBatches {
            offsets: View::new(offsets, &[offsets.len()])?,
            slots: View::new(slots, &[slots.len()])?,
            top_k: 1,
        };
        let mut out = vec![0f32; 2 * max * 2];
        let mut counts = [0u32; 2];
        let out = ViewMut::new(&mut out, &[2, max, 2])?;
        let counts = ViewMut::new(&mut counts, &[2])?;
        batch_rows_into(View::new(&rows, &[3, 2])?, &batches, out, counts, &mut Exec::cpu())
    };
    let message = |r: Result<()>| r.unwrap_err().to_string();
    run(&[0, 1, 3], &[0, 1, 2], 2)?;
    let e = message(run(&[0, 0, 3], &[0, 1, 2], 2));
    assert!(e.contains("local expert 1 got 3 rows, expected at most max_num_tokens = 2"), "{e}");
    assert!(message(run(&[0, 1, 1], &[0, 1, 2], 0)).contains("expected at most max_num_tokens = 0"));
    let e = message(run(&[0, 1, 3], &[0, 1, 3], 2));
    assert!(e.contains("slot 3 is out of range; expected 0..3"), "{e}");
    for offsets in [[0, 1, 4], [2, 1, 3]] {
        let e = message(run(&offsets, &[0, 1, 2], 4));
        assert!(e.contains("leave the 3 slots"), "{e}");
    }
    let e = message(run(&[0, 1, 2], &[0, 1], 2));
    assert!(e.contains("expected slots with dims [3], got [2]"), "{e}");
    Ok(())
}
