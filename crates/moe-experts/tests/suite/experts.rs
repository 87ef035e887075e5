//! Compares the CPU backends with the definition and with each other, and tests bad input.

use candle_core::{DType, Result};
use moe_experts::{
    ActivationFormat, Buffer, CpuIsa, Dispatched, Exec, ExpertWeights, Experts, GroupedExperts, NO_EXPERT,
    TensorView, View, ViewMut,
};
use moe_kernels::{ExpertGroups, grouped_down_into, grouped_gate_up_into, list_slots_into};
use proptest::prelude::*;

use crate::reference::{Problem, example, problems};

/// Returns the slot rows [T, K, H] of the Standard backend. The output is filled with NaN before.
fn standard(p: &Problem, weights: ExpertWeights, ex: &mut Exec) -> Result<Vec<f32>> {
    let experts = GroupedExperts::new(weights, p.activation)?;
    let rows = p.rows()?;
    let weights = vec![f32::NAN; p.ids.len()];
    let guard = TensorView::new(&rows)?;
    let dims = [p.tokens, p.top_k];
    let mut rows =
        Dispatched::standard(guard.view()?, View::new(&p.ids, &dims)?, View::new(&weights, &dims)?);
    rows.expert_map = p.map.as_ref().map(|m| View::new(m, &[m.len()])).transpose()?;
    let mut out = vec![f32::NAN; p.ids.len() * p.hidden];
    experts.apply(&rows, ViewMut::new(&mut out, &experts.out_dims(&rows)?)?, ex)?;
    Ok(out)
}

/// Returns the slots of each local expert in ascending order.
fn groups(p: &Problem) -> Vec<Vec<usize>> {
    (0..p.experts).map(|e| (0..p.ids.len()).filter(|s| p.local(*s) == Some(e)).collect()).collect()
}

/// Returns the slot rows [T, K, H] of the Batched backend, with `spare` unused rows per expert.
fn batched(p: &Problem, spare: usize, ex: &mut Exec) -> Result<Vec<f32>> {
    let experts =
        GroupedExperts::new(p.weights()?, p.activation)?.with_format(ActivationFormat::BatchedExperts);
    let groups = groups(p);
    let max = groups.iter().map(Vec::len).max().unwrap_or(0) + spare;
    // Unused rows contain NaN, so results would show it if they were read.
    let mut x = vec![f64::NAN; p.experts * max * p.hidden];
    for (e, group) in groups.iter().enumerate() {
        for (r, slot) in group.iter().enumerate() {
            let token = slot / p.top_k;
            x[(e * max + r) * p.hidden..][..p.hidden].copy_from_slice(&p.x[token * p.hidden..][..p.hidden]);
        }
    }
    let x = p.tensor(&x, &[p.experts, max, p.hidden])?;
    let counts: Vec<u32> = groups.iter().map(|g| g.len() as u32).collect();
    let guard = TensorView::new(&x)?;
    let weights = vec![0f32; p.ids.len()];
    let dims = [p.tokens, p.top_k];
    let ids = View::new(&p.ids, &dims)?;
    let counts = View::new(&counts, &[p.experts])?;
    let rows = Dispatched::batched(guard.view()?, counts, ids, View::new(&weights, &dims)?);
    let mut out = vec![f32::NAN; x.elem_count()];
    experts.apply(&rows, ViewMut::new(&mut out, &experts.out_dims(&rows)?)?, ex)?;

    let mut slots = vec![0f32; p.ids.len() * p.hidden];
    for (e, group) in groups.iter().enumerate() {
        for (r, slot) in group.iter().enumerate() {
            let row = &out[(e * max + r) * p.hidden..][..p.hidden];
            slots[slot * p.hidden..][..p.hidden].copy_from_slice(row);
        }
        let unused = &out[(e * max + group.len()) * p.hidden..(e + 1) * max * p.hidden];
        assert!(unused.iter().all(|v| v.is_nan()), "rows after the count of expert {e} were written");
    }
    Ok(slots)
}

/// Returns the slot rows [T, K, H] from rows in the Listed format. The output is filled with NaN before.
fn listed(p: &Problem, ex: &mut Exec) -> Result<Vec<f32>> {
    let experts = GroupedExperts::new(p.weights()?, p.activation)?.with_format(ActivationFormat::Listed);
    let rows = p.rows()?;
    let weights = vec![f32::NAN; p.ids.len()];
    let dims = [p.tokens, p.top_k];
    let guard = TensorView::new(&rows)?;
    let ids = View::new(&p.ids, &dims)?;
    let map = p.map.as_ref().map(|m| View::new(m, &[m.len()])).transpose()?;
    let mut counts = Buffer::zeros(DType::U32, &[p.experts])?;
    let mut slots = Buffer::zeros(DType::U32, &[p.experts, p.ids.len()])?;
    list_slots_into(ids, map, counts.view_mut(), slots.view_mut(), ex)?;
    let weights = View::new(&weights, &dims)?;
    let lists = (slots.view(), counts.view());
    let mut rows = Dispatched::listed(guard.view()?, lists, (ids, weights), ids, weights);
    rows.expert_map = map;
    let mut out = vec![f32::NAN; p.ids.len() * p.hidden];
    experts.apply(&rows, ViewMut::new(&mut out, &experts.out_dims(&rows)?)?, ex)?;
    Ok(out)
}

/// Generates the instruction sets of this machine.
fn isas() -> impl Strategy<Value = CpuIsa> {
    proptest::sample::select(CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()).collect::<Vec<_>>())
}

fn bits(rows: &[f32]) -> Vec<u32> {
    rows.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn every_slot_row_matches_the_definition(p in problems(), isa in isas()) {
        let ex = &mut Exec::cpu().with_isa(isa).unwrap();
        let out = standard(&p, p.weights().unwrap(), ex).unwrap();
        for (slot, got) in out.chunks(p.hidden).enumerate() {
            let Some(e) = p.local(slot) else {
                prop_assert!(got.iter().all(|v| v.to_bits() == 0), "slot {} is not zero: {:?}", slot, got);
                continue;
            };
            for (got, (want, bound)) in got.iter().zip(p.expert_row(slot / p.top_k, e)) {
                let error = (f64::from(*got) - want).abs();
                prop_assert!(error <= bound, "slot {}: got {}, want {} ± {}", slot, got, want, bound);
            }
        }
    }

    #[test]
    fn all_formats_agree_bit_for_bit(p in problems(), spare in 0usize..3, isa in isas()) {
        let ex = &mut Exec::cpu().with_isa(isa).unwrap();
        let want = standard(&p, p.weights().unwrap(), ex).unwrap();
        prop_assert_eq!(bits(&batched(&p, spare, ex).unwrap()), bits(&want));
        prop_assert_eq!(bits(&listed(&p, ex).unwrap()), bits(&want));
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch(p in problems()) {
        let ex = &mut Exec::cpu();
        let all = standard(&p, p.weights().unwrap(), ex).unwrap();
        for t in 0..p.tokens {
            let alone = Problem {
                tokens: 1,
                x: p.x[t * p.hidden..][..p.hidden].to_vec(),
                ids: p.ids[t * p.top_k..][..p.top_k].to_vec(),
                ..p.clone()
            };
            let row = p.top_k * p.hidden;
            let got = standard(&alone, p.weights().unwrap(), ex).unwrap();
            prop_assert_eq!(bits(&got), bits(&all[t * row..(t + 1) * row]));
        }
    }

    #[test]
    fn ranks_that_share_the_experts_add_up_to_one(p in problems(), split in 0usize..6) {
        let ex = &mut Exec::cpu();
        let want = standard(&p, p.weights().unwrap(), ex).unwrap();
        let split = split.min(p.experts);
        let map = p.map.clone().unwrap_or((0..p.experts as i32).collect());
        let mut sum = vec![0f32; want.len()];
        // A rank may have no expert.
        for range in [0..split, split..p.experts] {
            let first = range.start;
            let len = range.len();
            let local = |slot: &i32| if range.contains(&(*slot as usize)) { slot - first as i32 } else { -1 };
            let part = Problem { map: Some(map.iter().map(local).collect()), ..p.clone() };
            let weights = p.weights().unwrap();
            let cut = |t: &candle_core::Tensor| t.narrow(0, first, len).unwrap();
            let weights = ExpertWeights::new(
                cut(&weights.w13().to_tensor().unwrap()), cut(&weights.w2().to_tensor().unwrap()), weights.w13_bias().map(cut), weights.w2_bias().map(cut),
            ).unwrap();
            for (sum, v) in sum.iter_mut().zip(standard(&part, weights, ex).unwrap()) {
                *sum += v;
            }
        }
        prop_assert_eq!(sum, want);
    }
}

#[test]
fn threads_do_not_show_in_the_bits() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let p = example(dtype);
        let want = standard(&p, p.weights()?, &mut Exec::cpu().with_threads(1)?)?;
        for threads in [2, 5] {
            let ex = &mut Exec::cpu().with_threads(threads)?;
            assert_eq!(bits(&standard(&p, p.weights()?, ex)?), bits(&want));
            assert_eq!(bits(&batched(&p, 1, ex)?), bits(&want));
        }
    }
    Ok(())
}

/// Returns the bytes of scratch that the two products take for these groups.
fn kernel_bytes(p: &Problem) -> Result<usize> {
    let weights = p.weights()?;
    let slots = p.ids.len();
    let numbers: Vec<u32> = (0..slots as u32).collect();
    let offsets: Vec<u32> = (0..=p.experts).map(|e| (e * slots / p.experts) as u32).collect();
    let rows = View::new(&numbers, &[slots])?;
    let groups =
        ExpertGroups { offsets: View::new(&offsets, &[p.experts + 1])?, in_rows: rows, out_rows: rows };
    let x = Buffer::zeros(p.dtype, &[slots, p.hidden])?;
    let mut activated = Buffer::zeros(p.dtype, &[slots, p.width])?;
    let mut out = Buffer::zeros(DType::F32, &[slots, p.hidden])?;
    let w13 = weights.w13().read()?;
    let w2 = weights.w2().read()?;
    let ex = &mut Exec::cpu();
    grouped_gate_up_into(x.view(), &groups, w13.view()?, None, p.activation, activated.view_mut(), ex)?;
    grouped_down_into(activated.view(), &groups, w2.view()?, None, out.view_mut(), ex)?;
    Ok(ex.workspace().bytes())
}

#[test]
fn the_reservation_is_what_a_call_takes_besides_its_kernels() -> Result<()> {
    // Every expert gets three of the twelve slots, so that no reserved row stays unused.
    let ids = (0..12).map(|slot| slot % 4).collect();
    let p = example(DType::BF16);
    let p = Problem { tokens: 6, ids, x: vec![0.5; 6 * p.hidden], ..p };
    type Run = fn(&Problem, &mut Exec) -> Result<Vec<f32>>;
    let cases: [(Box<dyn Experts>, usize, Run); 2] = [
        (Box::new(GroupedExperts::new(p.weights()?, p.activation)?), 6, |p, ex| {
            standard(p, p.weights()?, ex)
        }),
        (
            Box::new(
                GroupedExperts::new(p.weights()?, p.activation)?
                    .with_format(ActivationFormat::BatchedExperts),
            ),
            3,
            |p, ex| batched(p, 0, ex),
        ),
    ];
    for (experts, max_tokens, run) in cases {
        let mut ex = Exec::cpu();
        let reservation = experts.workspace(max_tokens, p.top_k)?;
        reservation.reserve(ex.workspace())?;
        assert_eq!(ex.workspace().bytes(), reservation.bytes());
        run(&p, &mut ex)?;
        assert_eq!(ex.workspace().bytes() - reservation.bytes(), kernel_bytes(&p)?, "{}", experts.name());
        // After the largest call, the workspace can be frozen.
        ex.workspace().freeze(true);
        run(&p, &mut ex)?;
        run(&example(DType::BF16), &mut ex).map(drop)?;
        assert!(experts.workspace(usize::MAX / 2, 8).is_err());
    }
    Ok(())
}

#[test]
fn bad_routing_is_an_error() {
    let run = |change: fn(&mut Problem)| {
        let mut p = example(DType::F32);
        change(&mut p);
        standard(&p, example(DType::F32).weights().unwrap(), &mut Exec::cpu()).unwrap_err().to_string()
    };
    let e = run(|p| p.ids[3] = 4);
    assert!(e.contains("expert id 4 is out of range; expected 0..4"), "{e}");
    let e = run(|p| p.map = Some(vec![0, 1, -1]));
    assert!(e.contains("expert id 3 is out of range; expert_map holds 3"), "{e}");
    let e = run(|p| p.map = Some(vec![0, 1, 2, 9]));
    assert!(e.contains("expert_map sends expert 3 to local slot 9"), "{e}");
    let e = run(|p| p.dtype = DType::BF16);
    assert!(e.contains("cpu: expected rows of dtype f32, got bf16"), "{e}");
    let e = run(|p| (p.hidden, p.x) = (23, vec![0.; 5 * 23]));
    assert!(e.contains("cpu experts: expected rows of hidden size 24, got dims [5, 23]"), "{e}");
    let e = run(|p| (p.tokens, p.x) = (6, vec![0.; 6 * 24]));
    assert!(e.contains("dims [6, 2] need 12 elements, got 10"), "{e}");
}

#[test]
fn rows_of_the_wrong_format_or_dims_are_refused() -> Result<()> {
    let p = example(DType::F32);
    let x = vec![0f32; 4 * 2 * 24];
    let w = vec![0f32; 10];
    let ids = View::new(&p.ids, &[5, 2])?;
    let w = View::new(&w, &[5, 2])?;
    let mut out = vec![0f32; 5 * 2 * 24];
    let counts = [1u32, 3, 0, 0];
    let few = View::new(&counts[..3], &[3])?;
    let counts = View::new(&counts, &[4])?;
    let blocks = View::new(&x, &[4, 2, 24])?;
    let rows = View::new(&x[..5 * 24], &[5, 24])?;
    let cpu = GroupedExperts::new(p.weights()?, p.activation)?;
    let batched =
        GroupedExperts::new(p.weights()?, p.activation)?.with_format(ActivationFormat::BatchedExperts);
    let mut refused = |experts: &dyn Experts, rows: Dispatched, dims: &[usize]| {
        let out = ViewMut::new(&mut out[..dims.iter().product()], dims).unwrap();
        experts.apply(&rows, out, &mut Exec::cpu()).unwrap_err().to_string()
    };
    let dims = &[4, 2, 24][..];
    for (got, want) in [
        (
            refused(&cpu, Dispatched::batched(blocks, counts, ids, w), dims),
            "cpu experts: expected rows in the Standard format, got BatchedExperts",
        ),
        (
            refused(&batched, Dispatched::standard(rows, ids, w), dims),
            "cpu_batched experts: expected rows in the BatchedExperts format, got Standard",
        ),
        (
            refused(&cpu, Dispatched::standard(rows, ids, w), dims),
            "cpu: expected out with dims [5, 2, 24], got [4, 2, 24]",
        ),
        (
            refused(&cpu, Dispatched::standard(rows.narrow(0, 4)?, ids, w), dims),
            "cpu: expected topk_ids with dims [4, 2], got [5, 2]",
        ),
        (
            refused(&cpu, Dispatched::standard(blocks, ids, w), dims),
            "cpu: expected rows with 2 dimensions, got [4, 2, 24]",
        ),
        (
            refused(&batched, Dispatched::batched(blocks, counts, ids, w), dims),
            "number_rows: expert_num_tokens[1] is 3; expected at most max_tokens = 2",
        ),
        (
            refused(&batched, Dispatched::batched(blocks, few, ids, w), dims),
            "expected expert_num_tokens with dims [4], got [3]",
        ),
        (
            refused(&batched, Dispatched::batched(blocks.narrow(0, 3)?, few, ids, w), &[3, 2, 24]),
            "cpu_batched: expected rows with dims [4, 2, 24], got [3, 2, 24]",
        ),
        (
            refused(&batched, Dispatched::batched(blocks, counts, ids, w), &[8, 24]),
            "expected out with dims [4, 2, 24], got [8, 24]",
        ),
        (
            refused(&cpu, Dispatched::listed(rows, (ids, counts), (ids, w), ids, w), &[5, 2, 24]),
            "cpu experts: expected rows in the Standard format, got Listed",
        ),
        (
            refused(&batched, Dispatched::batched(rows, counts, ids, w), &[5, 2, 24]),
            "expected rows with 3 dimensions, got [5, 24]",
        ),
    ] {
        assert!(got.contains(want), "{got}");
    }
    Ok(())
}

#[test]
fn a_rank_without_experts_returns_zeros() -> Result<()> {
    let p = Problem {
        map: Some(vec![-1; 4]),
        ids: vec![0, 3, NO_EXPERT, 1, 2, 2, 0, 0, 1, 3],
        ..example(DType::F16)
    };
    let none = |t: &candle_core::Tensor| t.narrow(0, 0, 0);
    let weights = ExpertWeights::new(
        none(&p.weights()?.w13().to_tensor()?)?,
        none(&p.weights()?.w2().to_tensor()?)?,
        None,
        None,
    )?;
    let out = standard(&p, weights, &mut Exec::cpu())?;
    assert!(out.iter().all(|v| v.to_bits() == 0));
    Ok(())
}
