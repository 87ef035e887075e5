//! Compares the block with its definition, and its bits with each other.

use moe_layer::candle::{Result, Tensor};
use moe_layer::{
    CpuIsa, DType, Device, Exec, LocalExperts, NoEp, RouterConfig, SparseMoeBlock, StepContext, TensorView,
};
use proptest::prelude::*;

use crate::reference::{Problem, example, problem, problems};
use crate::{bits, floats, run};

/// Fails unless every element is within its bound.
fn assert_defined(p: &Problem, out: &Tensor) -> std::result::Result<(), TestCaseError> {
    prop_assert_eq!(out.dims(), [p.tokens, p.hidden]);
    let out = floats(out);
    for (token, row) in out.chunks_exact(p.hidden).enumerate() {
        for (column, (got, (want, bound))) in row.iter().zip(p.output(token)).enumerate() {
            let error = (f64::from(*got) - want).abs();
            prop_assert!(error <= bound, "row {token}, column {column}: {got}, expected {want} +- {bound}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_block_is_its_definition_in_both_formats(p in problems()) {
        // If f32 may order two experts in another way than f64, the definition does not apply.
        prop_assume!((0..p.tokens).all(|t| p.route(t).2 > 1e-5));
        let x = p.rows().unwrap();
        let standard = p.standard().unwrap().forward(&x).unwrap();
        prop_assert_eq!(standard.dtype(), p.dtype);
        assert_defined(&p, &standard)?;
        let batched = p.batched().unwrap().forward(&x).unwrap();
        prop_assert_eq!(bits(&standard), bits(&batched));
        let wide = run(&p.standard().unwrap(), &x, DType::F32, &mut Exec::cpu()).unwrap();
        assert_defined(&p, &wide)?;
    }

    #[test]
    fn a_row_does_not_depend_on_the_others(p in problems(), threads in 1usize..4) {
        let x = p.rows().unwrap();
        let block = p.standard().unwrap();
        let all = bits(&block.forward(&x).unwrap());
        let mut ex = Exec::cpu().with_threads(threads).unwrap();
        for t in 0..p.tokens {
            let one = run(&block, &x.narrow(0, t, 1).unwrap(), p.dtype, &mut ex).unwrap();
            prop_assert_eq!(&bits(&one)[..], &all[t * p.hidden..][..p.hidden]);
        }
    }
}

#[test]
fn rows_of_a_large_step_have_the_bits_of_a_small_one() -> Result<()> {
    // There are enough elements for zero and shared experts to be added by several threads.
    let config = RouterConfig { num_zero_experts: 3, correction_bias: true, ..RouterConfig::new(5, 3) };
    let p = problem((5, 136, 8, 300), config, Some((8, true)), DType::BF16, 3);
    let x = p.rows()?;
    let block = p.standard()?;
    let all = bits(&run(&block, &x, DType::BF16, &mut Exec::cpu().with_threads(3)?)?);
    for (start, len) in [(0, 1), (17, 5), (299, 1)] {
        let part = bits(&block.forward(&x.narrow(0, start, len)?)?);
        assert_eq!(part, all[start * 136..(start + len) * 136]);
    }
    assert_eq!(bits(&p.batched()?.forward(&x)?), all);
    Ok(())
}

#[test]
fn no_tokens_and_leading_dims() -> Result<()> {
    let p = example(DType::F16);
    for block in [p.standard()?, p.batched()?] {
        let none = Tensor::zeros((2, 0, p.hidden), DType::F16, &Device::Cpu)?;
        assert_eq!(block.forward(&none)?.dims(), [2, 0, p.hidden]);
        let rows = p.rows()?.narrow(0, 0, 4)?;
        let cube = block.forward(&rows.reshape((2, 2, p.hidden))?)?;
        assert_eq!(cube.dims(), [2, 2, p.hidden]);
        assert_eq!(bits(&cube), bits(&block.forward(&rows)?));
    }
    Ok(())
}

#[test]
fn the_observer_sees_the_logits_of_the_gate() -> Result<()> {
    let p = example(DType::F32);
    let x = p.rows()?;
    let block = p.standard()?;
    let mut out = moe_layer::Buffer::zeros(DType::F32, x.dims())?;
    let mut seen = Vec::new();
    let mut observe = |logits: moe_layer::View<'_>| {
        assert_eq!((logits.dims(), logits.dtype()), (&[5usize, 6][..], DType::F32));
        seen = logits.to_f32_vec()?;
        Ok(())
    };
    let x_view = TensorView::new(&x)?;
    block.forward_as(
        moe_layer::MoeForm::modular(moe_layer::Fusion::Nothing),
        moe_layer::SublayerIo::Store { x: x_view.view()?, out: out.view_mut() },
        &mut observe,
        &mut StepContext::default(),
        &mut Exec::cpu(),
    )?;
    for (t, logits) in seen.chunks(6).enumerate() {
        for (e, logit) in logits.iter().enumerate() {
            let row = |values: &[f64], r: usize| values[r * p.hidden..][..p.hidden].to_vec();
            let want: f64 = row(&p.x, t).iter().zip(row(&p.gate, e)).map(|(x, w)| x * w).sum();
            assert!((f64::from(*logit) - want).abs() < 1e-5, "{logit} {want}");
        }
    }
    Ok(())
}

/// Experts split over two ranks: each rank's part, added, is the whole.
#[test]
fn parts_of_two_ranks_add_up() -> Result<()> {
    let p = example(DType::F32);
    let x = p.rows()?;
    let w = p.weights()?;
    let part = |map: [i32; 6], ids: [u32; 3]| -> Result<Vec<f32>> {
        let ids = Tensor::new(&ids, &Device::Cpu)?;
        let weights = moe_layer::ExpertWeights::new(
            w.w13().to_tensor()?.index_select(&ids, 0)?,
            w.w2().to_tensor()?.index_select(&ids, 0)?,
            None,
            None,
        )?;
        let spec =
            moe_layer::ExpertsSpec { num_experts: 6, ..weights.spec(moe_layer::Activation::SwiGlu, 2) };
        let experts = moe_layer::build_experts(&moe_layer::select_backend(&spec, None)?, weights)?;
        let prepare = NoEp::new().with_local_experts(LocalExperts::from_map(&map, 3)?);
        let block = SparseMoeBlock::new(p.gate_weight()?, p.router()?, Box::new(prepare), experts, 0)?;
        Ok(floats(&block.forward(&x)?))
    };
    let first = part([0, -1, 1, -1, -1, 2], [0, 2, 5])?;
    let second = part([-1, 2, -1, 1, 0, -1], [4, 3, 1])?;
    let whole = floats(&p.standard()?.forward(&x)?);
    for ((a, b), whole) in first.iter().zip(&second).zip(&whole) {
        assert!((a + b - whole).abs() < 1e-4, "{a} + {b} != {whole}");
    }
    assert!(first.iter().any(|a| *a != 0.) && second.iter().any(|b| *b != 0.));
    Ok(())
}

#[test]
fn a_frozen_workspace_that_served_one_step_serves_the_next() -> Result<()> {
    let p = problem((6, 24, 16, 5), example(DType::BF16).config, Some((8, true)), DType::BF16, 9);
    let x = p.rows()?;
    let block = p.standard()?;
    let mut ex = Exec::cpu();
    let first = bits(&run(&block, &x, DType::BF16, &mut ex)?);
    ex.workspace().freeze(true);
    assert_eq!(bits(&run(&block, &x, DType::BF16, &mut ex)?), first);
    run(&block, &x.narrow(0, 0, 2)?, DType::BF16, &mut ex)?;
    Ok(())
}

#[test]
fn the_scalar_path_is_near_the_definition_too() -> Result<()> {
    let p = example(DType::F32);
    let mut ex = Exec::cpu().with_isa(CpuIsa::Scalar)?;
    let out = run(&p.standard()?, &p.rows()?, DType::F32, &mut ex)?;
    assert_defined(&p, &out).unwrap();
    Ok(())
}
