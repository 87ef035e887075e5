//! Modular and monolithic experts do not mix; builds match their specification.

use candle_core::{DType, Result, bail};
use moe_experts::{
    Activation, ActivationFormat, AnyExperts, Backend, BatchLimits, Buffer, Dispatched, Exec, Experts,
    ExpertsShape, ExpertsSpec, MonolithicExperts, Reason, Reservation, View, ViewMut, WeightAndReduce, build,
    build_batched, select,
};

use crate::reference::example;

/// A kernel with a router of its own.
struct Monolith;

impl MonolithicExperts for Monolith {
    fn name(&self) -> &str {
        "monolith"
    }

    fn shape(&self) -> ExpertsShape {
        ExpertsShape { num_local_experts: 4, hidden_size: 24, intermediate_size: 16, dtype: DType::F32 }
    }

    fn supports(&self, _: &ExpertsSpec) -> std::result::Result<(), Reason> {
        Err(Reason::Other("is a test".into()))
    }

    fn workspace(&self, _: usize, _: usize) -> Result<Reservation> {
        Ok(Reservation::new())
    }

    fn apply(&self, _: View, _: View, _: ViewMut, _: &mut Exec) -> Result<()> {
        bail!("never called")
    }
}

fn cpu() -> Result<AnyExperts> {
    let weights = example(DType::F32).weights()?;
    build(&select(&weights.spec(Activation::SwiGlu, 2), None)?, weights)
}

#[test]
fn mixing_the_families_names_both() -> Result<()> {
    let monolith: Box<dyn MonolithicExperts> = Box::new(Monolith);
    let e = AnyExperts::from(monolith).into_modular("no_ep").map(drop).unwrap_err().to_string();
    assert!(e.contains("monolithic experts `monolith`") && e.contains("modular `no_ep`"), "{e}");
    let e = cpu()?.into_monolithic("fused_block").map(drop).unwrap_err().to_string();
    assert!(e.contains("modular experts `cpu`") && e.contains("monolithic `fused_block`"), "{e}");
    assert_eq!(AnyExperts::Monolithic(Box::new(Monolith)).into_monolithic("block")?.name(), "monolith");
    Ok(())
}

#[test]
fn the_build_is_what_was_selected() -> Result<()> {
    let weights = example(DType::BF16).weights()?;
    for (format, backend) in [
        (ActivationFormat::Standard, Backend::Cpu),
        (ActivationFormat::Listed, Backend::Cpu),
        (ActivationFormat::BatchedExperts, Backend::CpuBatched),
    ] {
        let spec = ExpertsSpec { activation_format: format, ..weights.spec(Activation::Gelu, 2) };
        let experts = build(&select(&spec, Some(backend.name()))?, weights.clone())?.into_modular("test")?;
        assert_eq!((experts.name(), experts.activation_format()), (backend.name(), format));
        assert_eq!((experts.shape(), experts.supports(&spec)), (weights.shape(), Ok(())));
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
        build(&select(&spec, None).unwrap(), weights.clone()).unwrap_err().to_string()
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
fn batched_experts_state_their_limits_and_keep_them() -> Result<()> {
    let p = example(DType::F32);
    let spec = |activation_format| ExpertsSpec {
        activation_format,
        ..p.weights().unwrap().spec(Activation::SwiGlu, 2)
    };
    let limits = BatchLimits { max_num_tokens: 3, num_dispatchers: 2 };
    let batched = select(&spec(ActivationFormat::BatchedExperts), None)?;
    let free = build(&batched, p.weights()?)?.into_modular("test")?;
    assert_eq!((free.max_num_tokens(), free.num_dispatchers()), (None, None));
    let experts = build_batched(&batched, p.weights()?, limits)?.into_modular("test")?;
    assert_eq!((experts.max_num_tokens(), experts.num_dispatchers()), (Some(3), Some(2)));

    let apply = |experts: &dyn Experts, rows: usize| {
        let dims = [p.experts, rows, p.hidden];
        let (x, counts) = (Buffer::zeros(DType::F32, &dims)?, vec![rows as u32; p.experts]);
        let (ids, weights) = (View::new::<u32>(&[], &[0, 2])?, View::new::<f32>(&[], &[0, 2])?);
        let rows = Dispatched::batched(x.view(), View::new(&counts, &[p.experts])?, ids, weights);
        let mut out = Buffer::zeros(DType::F32, &dims)?;
        experts.apply(&rows, out.view_mut(), &mut Exec::cpu())
    };
    apply(experts.as_ref(), 6)?;
    apply(free.as_ref(), 7)?;
    let e = apply(experts.as_ref(), 7).unwrap_err().to_string();
    assert!(e.contains("got blocks of 7 rows, but were built for") && e.contains("max_num_tokens: 3"), "{e}");

    let standard = select(&spec(ActivationFormat::Standard), None)?;
    let e = build_batched(&standard, p.weights()?, limits).map(drop).unwrap_err().to_string();
    assert!(e.contains("cpu experts take the Standard format"), "{e}");
    Ok(())
}
