//! Both formats give the result of the layer's definition, and the same bits as each other.

mod common;

use common::{Problem, bits, expert, problems};
use moe_dispatch::candle::Result;
use moe_dispatch::{
    Exec, Lent, LocalExperts, NO_EXPERT, NoEp, PrepareFinalize, Tokens, View, ViewMut, WeightAndReduce,
};
use moe_kernels::half::{bf16, f16};
use moe_kernels::{CpuIsa, Float, with_float};
use proptest::prelude::*;

/// On the scalar path, which is the specification, both formats give the definition's bits. On every path both formats
/// agree.
fn both_formats<T: Float>(p: &Problem, room: usize) -> Result<()> {
    let definition = bits(&p.definition::<T>());
    let standard = NoEp::new().with_local_experts(p.experts()?);
    let batched = NoEp::batched(p.experts()?, p.most_rows() + room);
    for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let ex = &mut Exec::cpu().with_isa(isa)?;
        let want = match isa {
            CpuIsa::Scalar => definition.clone(),
            _ => bits(&p.run::<T>(&standard, ex)?),
        };
        for backend in [&standard as &dyn PrepareFinalize, &batched] {
            assert_eq!(bits(&p.run::<T>(backend, ex)?), want, "{}, {isa:?}", backend.name());
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn dispatch_experts_combine_equals_the_definition(p in problems(), room in 0usize..3) {
        for dtype in common::FLOATS {
            with_float!(dtype, "test", T => both_formats::<T>(&p, room)).unwrap();
        }
    }

    #[test]
    fn one_row_too_many_is_an_error(p in problems()) {
        let most = p.most_rows();
        prop_assume!(most > 0);
        let small = NoEp::batched(p.experts().unwrap(), most - 1);
        let e = p.run::<f32>(&small, &mut Exec::cpu()).unwrap_err().to_string();
        let want = format!("got {most} rows, expected at most max_num_tokens = {}", most - 1);
        prop_assert!(e.contains(&want), "{}", e);
    }

    #[test]
    fn router_weight_on_input(p in problems()) {
        prop_assume!(p.top_k == 1);
        let mut want = Vec::new();
        for t in 0..p.tokens {
            let row = &p.rows_as::<bf16>()[t * p.hidden..(t + 1) * p.hidden];
            let scaled: Vec<bf16> = row.iter().map(|x| bf16::from_f32(x.to_f32() * p.weights[t])).collect();
            let y = p.local(t).map_or(vec![0.; p.hidden], |e| expert(e, &scaled));
            want.extend(y.into_iter().map(|x| bf16::from_f32(0. + x)));
        }
        let standard = NoEp::new().with_local_experts(p.experts().unwrap()).with_router_weight_on_input(true);
        let batched = NoEp::batched(p.experts().unwrap(), p.most_rows()).with_router_weight_on_input(true);
        let ex = &mut Exec::cpu().with_isa(CpuIsa::Scalar).unwrap();
        prop_assert_eq!(bits(&p.run::<bf16>(&standard, ex).unwrap()), bits(&want));
        prop_assert_eq!(bits(&p.run::<bf16>(&batched, ex).unwrap()), bits(&want));
    }
}

#[test]
fn standard_rows_are_the_callers_own() -> Result<()> {
    let rows = vec![1., 2., 3., 4.];
    let p = Problem { rows, ids: vec![0, 1], weights: vec![2., 3.], ..Problem::ones(2, 2, 1, 2) };
    let backend = NoEp::new();
    let d = backend.prepare(p.inputs()?, None, &mut Exec::cpu())?;
    assert!(matches!(d.rows, Lent::Borrowed(_)), "prepare copied the rows");
    assert_eq!(d.rows.view().cpu::<f32>()?.as_ptr(), p.rows.as_ptr());
    assert!(!d.weights_applied);

    // With weights on the input the caller's rows stay unchanged.
    let backend = backend.with_router_weight_on_input(true);
    let d = backend.prepare(p.inputs()?, None, &mut Exec::cpu())?;
    assert_eq!(d.rows.view().cpu::<f32>()?, &[2., 4., 9., 12.]);
    assert_eq!(p.rows, [1., 2., 3., 4.]);
    assert!(d.weights_applied);
    Ok(())
}

#[test]
fn batched_rows_have_a_defined_layout() -> Result<()> {
    // There are three tokens. Physical expert 2 is in local slot 0, expert 0 is in slot 2, and slot 1 is unused.
    let ids = vec![2, 0, NO_EXPERT, 2, 1, 2];
    let p = Problem { rows: vec![1., 2., 3.], ids, ..Problem::ones(3, 1, 2, 3) };
    let backend = NoEp::batched(LocalExperts::from_map(&[2, -1, 0], 3)?, 4);
    let mut ex = Exec::cpu();
    for _ in 0..2 {
        // The second round reuses scratch memory that the first round has written.
        let d = backend.prepare(p.inputs()?, None, &mut ex)?;
        assert_eq!(d.rows.view().dims(), &[3, 4, 1]);
        assert_eq!(d.rows.view().cpu::<f32>()?, &[1., 2., 3., 0., 0., 0., 0., 0., 1., 0., 0., 0.]);
        assert_eq!(d.expert_num_tokens()?.cpu::<u32>()?, &[3, 0, 1]);
        ex.scratch(moe_dispatch::candle::DType::F32, &[64])?.view_mut().cpu_mut::<f32>()?.fill(f32::NAN);
    }
    Ok(())
}

#[test]
fn no_tokens_and_no_experts_are_legal() -> Result<()> {
    for (tokens, num_local) in [(0, 4), (3, 0), (0, 0)] {
        let map = if num_local == 0 { vec![-1; 4] } else { vec![0, 1, 2, 3] };
        let p = Problem { ids: vec![1; tokens * 2], map, num_local, ..Problem::ones(tokens, 2, 2, 4) };
        both_formats::<f16>(&p, 0)?;
        let d_is_empty = |backend: &dyn PrepareFinalize| -> Result<bool> {
            Ok(backend.prepare(p.inputs()?, None, &mut Exec::cpu())?.is_empty())
        };
        assert_eq!(d_is_empty(&NoEp::new())?, tokens == 0);
        assert_eq!(d_is_empty(&NoEp::batched(p.experts()?, 8))?, num_local == 0);
    }
    Ok(())
}

#[test]
fn experts_that_reduced_already_are_copied() -> Result<()> {
    let rows = [bf16::ONE; 4];
    let p = Problem { ids: vec![0, 1], weights: vec![0.3, 9.], ..Problem::ones(2, 2, 1, 2) };
    let reduced = [0.1f32, -0.0, 3.25, 1e9];
    let mut out = [bf16::ZERO; 4];
    let backend = NoEp::new();
    let ex = &mut Exec::cpu();
    let hidden = View::new(&rows, &[2, 2])?;
    let d = backend.prepare(Tokens { hidden, ..p.inputs()? }, None, ex)?;
    let out_view = ViewMut::new(&mut out, &[2, 2])?;
    backend.finalize(View::new(&reduced, &[2, 2])?, &d, WeightAndReduce::NoOp, out_view, ex)?;
    assert_eq!(bits(&out), bits(&reduced.map(bf16::from_f32)));
    Ok(())
}

#[test]
fn a_frozen_workspace_is_enough_after_the_first_call() -> Result<()> {
    let p = Problem { ids: vec![0, 1, 1, 0, 1, NO_EXPERT], ..Problem::ones(3, 4, 2, 2) };
    let expert_out = [1f32; 2 * 3 * 4];
    let backend = NoEp::batched(LocalExperts::all(2), 3);
    let mut ex = Exec::cpu();
    for round in 0..3 {
        for tokens in [3, 1, 2] {
            let d = backend.prepare(p.inputs()?.narrow(0, tokens)?, None, &mut ex)?;
            let mut out = vec![0f32; tokens * 4];
            let out = ViewMut::new(&mut out, &[tokens, 4])?;
            let y = View::new(&expert_out, &[2, 3, 4])?;
            backend.finalize(y, &d, WeightAndReduce::Delegate, out, &mut ex)?;
        }
        ex.workspace().freeze(true);
        assert!(ex.workspace().bytes() > 0, "round {round}");
    }
    Ok(())
}
