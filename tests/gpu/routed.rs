//! Launches that contain the ops after the router: router, experts, addition and norm have the bits of the separate
//! ops.

use candle_core::DType;
use moe_kernels::cuda::{
    FusedExperts, MonolithicExperts, fused_experts_into, gate_route_into, monolithic_experts_into,
};
use moe_kernels::plan::{ColumnOrder, Fp8Activations, MonolithicForm};
use moe_kernels::{Activation, Exec, PreNorm, QuantGroup, SublayerIo, add_rms_norm_into};

use crate::common::*;
use crate::gates::{Case, Rule};
use crate::packs::Packs;
use crate::quant::matrices::{fp8, int};
use crate::quant::order;

/// Tokens, routed experts, K, shared experts.
type Sizes = [usize; 4];

fn check(rng: &mut Rng, form: MonolithicForm, sizes: Sizes, packs: &Packs, ex: Exec) {
    let weights = &packs.weights;
    let epilogue = packs.epilogue();
    let [tokens, experts, top_k, shared] = sizes;
    let hidden = weights[1].dims()[1];
    let slots = top_k + shared;
    let mut p = Place::new(ex);
    let rows = rng.floats(DType::BF16, &[tokens, hidden]);
    let mut case = Case::new(rng, Rule::all()[0], rows, experts, top_k);
    case.shared = shared;
    let [w13, w2] = weights.each_ref().map(|weight| weight.read().unwrap());
    let x = p.put(&case.rows);
    let gain = p.put(&rng.floats(DType::BF16, &[hidden]));
    let start = rng.floats(DType::F32, &[tokens, hidden]);
    let of_rows = |dtype| p.out(dtype, &[tokens, hidden]);
    let mut want = [of_rows(DType::F32), p.put(&start), of_rows(DType::BF16)];
    let mut got = [of_rows(DType::F32), p.put(&start), of_rows(DType::BF16)];
    let mut logits = p.out(DType::F32, &[tokens, experts]);
    let mut ids = p.out(DType::U32, &[tokens, slots]);
    let mut shares = p.out(DType::F32, &[tokens, slots]);
    let what = format!("{form:?} {sizes:?} {:?}", weights[0].scheme());
    case.with_gate(false, &mut p, |gate, p| {
        let logits = logits.view_mut();
        let to_ids = ids.view_mut();
        gate_route_into(x.view(), gate, logits, to_ids, shares.view_mut(), &mut p.ex).unwrap();
        let x = x.view();
        let w13 = w13.view().unwrap();
        let w2 = w2.view().unwrap();
        let topk_ids = ids.view();
        let topk_weights = shares.view();
        let args =
            FusedExperts { x, w13, w2, topk_ids, topk_weights, expert_map: None, lists: None, epilogue };
        let [sums, residual, normed] = &mut want;
        fused_experts_into(&args, sums.view_mut(), &mut p.ex).unwrap();
        let to = (residual.view_mut(), normed.view_mut());
        add_rms_norm_into(sums.view(), gain.view(), 1e-6, to.0, to.1, &mut p.ex).unwrap();
        let args = MonolithicExperts { gate, w13, w2, expert_map: None, epilogue };
        let [sums, residual, normed] = &mut got;
        let io = SublayerIo::Store { x, out: sums.view_mut() };
        monolithic_experts_into(form, &args, io, &mut p.ex).unwrap();
        let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
        let residual = residual.view_mut();
        let out = normed.view_mut().into();
        let io = SublayerIo::AddNorm { x, residual, norm, out };
        monolithic_experts_into(form, &args, io, &mut p.ex).unwrap();
        // Experts with their own order of columns have no launch that contains their router.
        if weights[0].quantisation().is_some_and(|w13| w13.order == ColumnOrder::Sorted) && tokens <= 4 {
            let mut none = p.out(DType::F32, &[tokens, hidden]);
            let io = SublayerIo::Store { x, out: none.view_mut() };
            let refused = monolithic_experts_into(MonolithicForm::OneLaunch, &args, io, &mut p.ex);
            assert_error(refused, &["act-order"]);
        }
    });
    for (part, (want, got)) in ["sums", "residual", "norm"].iter().zip(want.iter().zip(&got)) {
        assert_same(&format!("{part} of {what}"), &want.host(&p), &got.host(&p));
    }
}

#[test]
fn experts_behind_their_router_are_the_ops_one_by_one() {
    use MonolithicForm::{Fp8, Tensor, Wide};
    let mut rng = Rng::new();
    // Cases with 2 of 9 experts shared, and with none shared.
    let floats = [
        (Tensor, 8, 3, [192, 64]),
        (Tensor, 33, 4, [320, 128]),
        (Wide, 300, 7, [64, 192]),
        (Wide, 1100, 2, [128, 64]),
    ];
    for (form, tokens, top_k, dims) in small(floats, 64, |case| case.1) {
        let plain = Packs::new(&mut rng, 9, dims, None);
        let activation = Activation::SwiGluOai { alpha: 1.702, limit: 7.0 };
        let biased = Packs::new(&mut rng, 9, dims, None).with_epilogue(&mut rng, [true, true], activation);
        for packs in [plain, biased] {
            for sizes in [[tokens, 9, top_k, 0], [tokens, 7, top_k, 2]] {
                check(&mut rng, form, sizes, &packs, cuda());
            }
        }
    }
    let block = fp8(QuantGroup::Block { n: 128, k: 128 });
    let packs = Packs::new(&mut rng, 8, [128, 128], Some(block));
    for tokens in small([300; 3], 0, |_| 0) {
        let ex = cuda().with_fp8_activations(Fp8Activations::On);
        check(&mut rng, Fp8, [tokens, 8, 2, 0], &packs, ex);
    }
    let ordered = order::Experts::new(&mut rng, (256, 128), (int(4, 128, true, true), false));
    let packs = ordered.with_meaning();
    for (form, tokens) in small([(Tensor, 1), (Tensor, 70), (Wide, 300)], 70, |case| case.1) {
        check(&mut rng, form, [tokens, order::EXPERTS, order::TOP_K, 0], &packs, cuda());
    }
}
