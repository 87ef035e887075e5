//! Experts that are built have the properties in their specification.

use candle_core::{DType, Result};
use moe_experts::{
    Activation, ActivationFormat, Backend, Buffer, Dispatched, Exec, Experts, ExpertsSpec, View,
    WeightAndReduce, build, build_batched, select,
};

use crate::reference::example;

#[test]
fn the_build_is_what_was_selected() -> Result<()> {
    let weights = example(DType::BF16).weights()?;
    for (format, backend) in [
        (ActivationFormat::Standard, Backend::Cpu),
        (ActivationFormat::Listed, Backend::Cpu),
        (ActivationFormat::BatchedExperts, Backend::CpuBatched),
    ] {
        let spec = ExpertsSpec { activation_format: format, ..weights.spec(Activation::Gelu, 2) };
        let experts = build(&select(&spec, Some(backend.name()))?, weights.clone())?;
        assert_eq!((experts.name(), experts.activation_format()), (backend.name(), format));
        assert_eq!(experts.shape(), weights.shape());
        assert_eq!(experts.weight_and_reduce(), WeightAndReduce::Delegate);
    }
    Ok(())
}

#[test]
fn weights_that_the_selection_did_not_describe_are_refused() -> Result<()> {
    let weights = example(DType::F32).weights()?;
    let refused = |change: fn(&mut ExpertsSpec)| {
        let mut spec = weights.spec(Activation::SwiGlu, 2);
        change(&mut spec);
        build(&select(&spec, None).unwrap(), weights.clone()).map(drop).unwrap_err().to_string()
    };
    for (got, want) in [
        (refused(|s| s.num_local_experts = 2), "cpu experts: expected weights of local experts 2, got 4"),
        (refused(|s| s.hidden_size = 32), "hidden size 32, got 24"),
        (refused(|s| s.intermediate_size = 8), "intermediate size 8, got 16"),
        (refused(|s| s.dtype = DType::BF16), "expected weights in bf16 without bias, got f32 without bias"),
        (refused(|s| s.has_bias = true), "expected weights in f32 with bias, got f32 without bias"),
    ] {
        assert!(got.contains(want), "{got}");
    }
    Ok(())
}

#[test]
fn batched_experts_state_their_rows_and_keep_to_them() -> Result<()> {
    let p = example(DType::F32);
    let spec = |activation_format| ExpertsSpec {
        activation_format,
        ..p.weights().unwrap().spec(Activation::SwiGlu, 2)
    };
    let batched = select(&spec(ActivationFormat::BatchedExperts), None)?;
    let free = build(&batched, p.weights()?)?;
    assert_eq!(free.max_rows(), None);
    let experts = build_batched(&batched, p.weights()?, 6)?;
    assert_eq!(experts.max_rows(), Some(6));

    let apply = |experts: &dyn Experts, rows: usize| {
        let dims = [p.experts, rows, p.hidden];
        let x = Buffer::zeros(DType::F32, &dims)?;
        let counts = vec![rows as u32; p.experts];
        let ids = View::new::<u32>(&[], &[0, 2])?;
        let weights = View::new::<f32>(&[], &[0, 2])?;
        let rows = Dispatched::batched(x.view(), View::new(&counts, &[p.experts])?, ids, weights);
        let mut out = Buffer::zeros(DType::F32, &dims)?;
        experts.apply(&rows, out.view_mut(), &mut Exec::cpu())
    };
    apply(experts.as_ref(), 6)?;
    apply(free.as_ref(), 7)?;
    let e = apply(experts.as_ref(), 7).unwrap_err().to_string();
    assert!(e.contains("got blocks of 7 rows, but were built for 6"), "{e}");

    let standard = select(&spec(ActivationFormat::Standard), None)?;
    let e = build_batched(&standard, p.weights()?, 6).map(drop).unwrap_err().to_string();
    assert!(e.contains("cpu experts take the Standard format"), "{e}");
    Ok(())
}
