//! Parts that do not fit each other are refused when a block is built, with names and sizes.

use moe_layer::candle::{Result, Tensor};
use moe_layer::{
    Activation, DType, Device, Experts, GatedMlp, LocalExperts, NoEp, PrepareFinalize, Router, RouterConfig,
    RouterParams, SharedExperts, SparseMoeBlock, build_batched_experts, select_backend,
};

use crate::reference::{Problem, example};
use crate::{bits, message};

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()
}

/// The parts of a valid block. Each test replaces some of them.
struct Parts {
    gate: Tensor,
    router: RouterConfig,
    prepare: Box<dyn PrepareFinalize>,
    experts: Box<dyn Experts>,
}

impl Parts {
    fn standard(p: &Problem) -> Self {
        Self {
            gate: p.gate_weight().unwrap(),
            router: p.config.clone(),
            prepare: Box::new(NoEp::new()),
            experts: p.standard_experts().unwrap(),
        }
    }

    fn batched(p: &Problem, room: usize, limit: Option<usize>) -> Self {
        let prepare = Box::new(NoEp::batched(LocalExperts::all(p.packed()), room));
        Self { prepare, experts: p.batched_experts(limit).unwrap(), ..Self::standard(p) }
    }

    fn build(self) -> Result<SparseMoeBlock> {
        let router = Router::new(self.router, RouterParams::default())?;
        SparseMoeBlock::new(self.gate, router, self.prepare, self.experts, 0)
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let p = example(DType::F32);
    let standard = || Parts::standard(&p);
    let config = |num_experts| RouterConfig::new(num_experts, 1);
    let on_input = || RouterConfig { apply_router_weight_on_input: true, ..config(6) };
    let map = |map: &[i32], local| LocalExperts::from_map(map, local).unwrap();
    let no_ep = |experts| Box::new(NoEp::new().with_local_experts(experts));
    assert!(standard().build().is_ok());
    assert!(Parts::batched(&p, 5, Some(5)).build().is_ok());
    assert!(Parts::batched(&p, 5, Some(6)).build().is_ok());
    let cases: Vec<(Parts, &[&str])> = vec![
        // Faults of the activation formats.
        (
            Parts { experts: p.batched_experts(Some(5)).unwrap(), ..standard() },
            &["NoEp hands over the Standard format, but cpu_batched takes BatchedExperts"],
        ),
        (
            Parts { experts: p.standard_experts().unwrap(), ..Parts::batched(&p, 5, Some(5)) },
            &["NoEp batched hands over the BatchedExperts format, but cpu takes Standard"],
        ),
        // Faults of the row limits.
        (
            Parts::batched(&p, 5, None),
            &["cpu_batched takes the BatchedExperts format and must be told the most rows"],
        ),
        (Parts::batched(&p, 5, Some(4)), &["NoEp batched fills up to 5 rows", "cpu_batched was built for 4"]),
        // Faults of the part that applies the router weight.
        (
            Parts { router: on_input(), ..standard() },
            &["the router has apply_router_weight_on_input = true, but NoEp = false"],
        ),
        (
            Parts {
                router: config(6),
                prepare: Box::new(NoEp::new().with_router_weight_on_input(true)),
                ..standard()
            },
            &["the router has apply_router_weight_on_input = false, but NoEp = true"],
        ),
        (
            Parts { router: on_input(), ..Parts::batched(&p, 5, Some(5)) },
            &["the router has apply_router_weight_on_input = true, but NoEp batched = false"],
        ),
        // Faults of the number of experts.
        (
            Parts { router: config(5), gate: zeros(&[5, 24], DType::F32), ..standard() },
            &["the router chooses among 5 experts (5 routed + 0 fused shared), but cpu has 6"],
        ),
        (
            Parts { router: RouterConfig { num_fused_shared_experts: 1, ..config(6) }, ..standard() },
            &["the router chooses among 7 experts (6 routed + 1 fused shared), but cpu has 6"],
        ),
        (
            Parts { prepare: no_ep(map(&[0, 1, 2, 3, 4, 5, -1], 6)), ..standard() },
            &["the router chooses among 6 experts", "but NoEp has 7"],
        ),
        (
            Parts { prepare: no_ep(map(&[0, 1, 2, -1, -1, -1], 3)), ..standard() },
            &["NoEp sends rows to 3 local experts, but cpu has weights of 6"],
        ),
        (
            Parts {
                prepare: Box::new(NoEp::batched(LocalExperts::all(8), 5)),
                ..Parts::batched(&p, 5, Some(5))
            },
            &["NoEp batched sends rows to 8 local experts, but cpu_batched has weights of 6"],
        ),
        // Faults of the gate.
        (
            Parts { gate: zeros(&[7, 24], DType::F32), ..standard() },
            &["router gate: expected weight [6, 24] of dtype f32, got [7, 24] of f32"],
        ),
        (Parts { gate: zeros(&[6, 23], DType::F32), ..standard() }, &["[6, 24] of dtype f32, got [6, 23]"]),
        (Parts { gate: zeros(&[144], DType::F32), ..standard() }, &["[6, 24] of dtype f32, got [144]"]),
        (Parts { gate: zeros(&[6, 24], DType::BF16), ..standard() }, &["of dtype f32, got [6, 24] of bf16"]),
        (
            Parts { gate: zeros(&[6, 24], DType::F16), ..Parts::standard(&example(DType::BF16)) },
            &["of dtype bf16 or f32, got [6, 24] of f16"],
        ),
    ];
    for (parts, wanted) in cases {
        let got = message(parts.build());
        for want in wanted {
            assert!(got.contains(want), "expected {want:?} in {got:?}");
        }
    }
}

fn mlp(hidden: usize, dtype: DType) -> Result<GatedMlp> {
    GatedMlp::new(zeros(&[8, hidden], dtype), zeros(&[hidden, 4], dtype), Activation::SwiGlu)
}

#[test]
fn shared_experts_must_fit_the_block_and_their_gate() -> Result<()> {
    let p = example(DType::F32);
    let refused = |mlp: Result<GatedMlp>| -> Result<String> {
        Ok(message(p.standard()?.with_shared_experts(SharedExperts::new(mlp?, None)?)))
    };
    let hidden = refused(mlp(23, DType::F32))?;
    assert!(
        hidden.contains("expected hidden size 24 and dtype f32 like the router gate, got 23 and f32"),
        "{hidden}"
    );
    let dtype = refused(mlp(24, DType::BF16))?;
    assert!(dtype.contains("got 24 and bf16"), "{dtype}");
    for (gate, want) in [
        (zeros(&[1, 23], DType::F32), "a gate weight [1, 24] of dtype f32 like the MLP, got [1, 23] of f32"),
        (zeros(&[2, 24], DType::F32), "got [2, 24] of f32"),
        (zeros(&[1, 24], DType::F16), "a gate weight [1, 24] of dtype f32 like the MLP, got [1, 24] of f16"),
    ] {
        let e = message(SharedExperts::new(mlp(24, DType::F32)?, Some(gate)));
        assert!(e.contains(want), "{e}");
    }
    Ok(())
}

#[test]
fn an_mlp_of_two_shapes_or_dtypes_is_refused() {
    let new = |w13: &[usize], w2: &[usize], dtype| {
        message(GatedMlp::new(zeros(w13, DType::F32), zeros(w2, dtype), Activation::SwiGlu))
    };
    assert!(new(&[8, 5], &[5, 3], DType::F32).contains("w13 [2I, H] and w2 [H, I], got [8, 5] and [5, 3]"));
    assert!(new(&[8, 5], &[6, 4], DType::F32).contains("got [8, 5] and [6, 4]"));
    assert!(new(&[8, 5], &[5, 4], DType::F16).contains("w13 is f32 but w2 is f16"));
}

#[test]
fn inputs_that_do_not_fit_are_refused() -> Result<()> {
    let p = example(DType::F32);
    let block = p.standard()?;
    for x in [zeros(&[2, 23], DType::F32), zeros(&[2, 24], DType::BF16), zeros(&[], DType::F32)] {
        assert!(block.forward(&x).is_err(), "{:?} {:?}", x.dims(), x.dtype());
    }
    let columns = Tensor::arange(0f32, 48., &Device::Cpu)?.reshape((24, 2))?.t()?;
    assert_eq!(bits(&block.forward(&columns)?), bits(&block.forward(&columns.contiguous()?)?));
    // A batched block has room for this number of tokens at once. More tokens are cut.
    let batched = Parts::batched(&p, 1, Some(1)).build()?;
    let same = Tensor::ones((2, 24), DType::F32, &Device::Cpu)?;
    assert_eq!(bits(&batched.forward(&same)?), bits(&block.forward(&same)?));
    Ok(())
}

#[test]
fn standard_experts_cannot_be_given_a_limit() -> Result<()> {
    let p = example(DType::F32);
    let selection = select_backend(&p.weights()?.spec(Activation::SwiGlu, 2), None)?;
    let e = message(build_batched_experts(&selection, p.weights()?, 8));
    assert!(e.contains("cpu experts take the Standard format, whose rows have no limit"), "{e}");
    Ok(())
}
