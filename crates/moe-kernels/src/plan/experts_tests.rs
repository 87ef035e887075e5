//! Tests of the choice among the experts' kernels.

use candle_core::DType;

use super::*;
use crate::plan::{EpilogueCall, Gpu};
use crate::scheme::{QuantGroup, QuantScheme};
use crate::tags::Activation;

const QWEN3_30B: ExpertsCall = ExpertsCall {
    tokens: 1,
    top_k: 8,
    num_ids: 128,
    num_local: 128,
    hidden: 2048,
    inter: 768,
    quant: None,
    passes: 1,
    epilogue: EpilogueCall::PLAIN,
};

fn hopper() -> Machine {
    Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() }
}

#[test]
fn rows_choose_the_kernel() {
    let form = |tokens, machine: &Machine| {
        ExpertsForm::choose(&ExpertsCall { tokens, ..QWEN3_30B }, machine).map(Form::name)
    };
    for (tokens, kernel) in [
        (1, "layer_stream"),
        (4, "layer_stream"),
        (5, "experts_stream"),
        (8, "experts_tensor"),
        (511, "experts_tensor"),
        (512, "experts_wide"),
        (9000, "experts_wide"),
    ] {
        assert_eq!(form(tokens, &hopper()), Some(kernel), "{tokens} tokens");
    }
    let invariant = Machine { batch_invariant: true, ..hopper() };
    assert_eq!(
        (form(1, &invariant), form(9000, &invariant)),
        (Some("experts_tensor"), Some("experts_tensor"))
    );
    let ampere = Gpu::ampere();
    let ampere = Machine { gpu: Some(ampere), ..Machine::default() };
    assert_eq!((form(4, &ampere), form(256, &ampere)), (Some("experts_stream"), Some("experts_grouped")));
    assert_eq!(form(4, &Machine::default()), None);
}

#[test]
fn experts_that_come_in_passes_take_the_products_over_lists() {
    for (tokens, kernel) in
        [(1, "experts_tensor"), (7, "experts_tensor"), (64, "experts_tensor"), (512, "experts_wide")]
    {
        let call = ExpertsCall { tokens, num_local: 16, passes: 2, ..QWEN3_30B };
        assert_eq!(ExpertsForm::choose(&call, &hopper()).map(Form::name), Some(kernel), "{tokens} tokens");
        let ampere = Gpu::ampere();
        assert_eq!(ExpertsForm::choose(&call, &Machine { gpu: Some(ampere), ..Machine::default() }), None);
    }
    let said = ExpertsCall { passes: 2, ..QWEN3_30B }.fits_one_launch(&hopper()).unwrap_err();
    assert!(said.to_string().contains("come to the device in 2 passes"), "{said}");
}

#[test]
fn what_keeps_prompts_from_wide_tiles_is_said() {
    let fits = |call: ExpertsCall| call.fits_wide(&hopper()).map_err(|reason| reason.to_string());
    let prompt = ExpertsCall { tokens: 512, ..QWEN3_30B };
    assert_eq!(fits(prompt), Ok(()));
    // A rank with a part of the experts gets its part of the slots.
    assert_eq!(fits(ExpertsCall { num_local: 16, ..prompt }), Ok(()));
    let refused = |call, why: &str| assert_eq!(fits(call), Err(why.to_string()));
    refused(ExpertsCall { tokens: 511, ..prompt }, "computes at least 512 rows at once, got 511");
    refused(ExpertsCall { num_ids: 129, ..prompt }, "computes at least 516 rows at once, got 512");
    refused(ExpertsCall { num_local: 0, ..prompt }, "needs an expert on this rank, but it has none");
    refused(
        ExpertsCall { inter: 96, ..prompt },
        "needs a intermediate_size that is a multiple of 64, got 96",
    );
    let many = ExpertsCall { tokens: 9000, num_ids: 2000, num_local: 2000, ..prompt };
    refused(many, "takes a number of local experts of at most 1024, got 2000");
}

fn int(bits: u8, group: usize, act_order: bool) -> QuantScheme {
    QuantScheme::int(bits, QuantGroup::Size(group)).with_zero_points(true).with_act_order(act_order)
}

/// w13 and w2.
fn packs(scheme: QuantScheme, scales: DType, orders: [ColumnOrder; 2]) -> [QuantWeights; 2] {
    let weights = |gate_up, order| QuantWeights { scheme, scales, gate_up, in_blocks: false, order };
    [weights(true, orders[0]), weights(false, orders[1])]
}

#[test]
fn quantised_experts_take_the_fast_kernels_where_these_read_them() {
    let call = |tokens, scheme, scales| ExpertsCall {
        tokens,
        quant: Some(packs(scheme, scales, [ColumnOrder::Input; 2])),
        ..QWEN3_30B
    };
    let kernel =
        |call: &ExpertsCall, machine| ExpertsForm::choose(call, &machine).map(|form| form.kernel(call));
    let block = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 });
    let fp4 = |group| QuantScheme::fp4(QuantGroup::Size(group));
    let q4k = int(4, 32, false).with_minima().with_shared_scales(8);
    for (scheme, scales) in [
        (int(4, 128, false), DType::F16),
        (int(8, 32, false), DType::BF16),
        (block, DType::F32),
        (fp4(32), DType::U8),
        (fp4(16).with_fp8_scales(), DType::U8),
        (q4k, DType::U8),
    ] {
        for (tokens, want) in [
            (1, "quant_layer_stream"),
            (6, "quant_experts_tensor"),
            (1023, "quant_experts_tensor"),
            (1024, "quant_experts_wide"),
        ] {
            assert_eq!(kernel(&call(tokens, scheme, scales), hopper()).as_deref(), Some(want), "{scheme}");
        }
        let invariant = Machine { batch_invariant: true, ..hopper() };
        assert_eq!(kernel(&call(1, scheme, scales), invariant).as_deref(), Some("quant_experts_tensor"));
        let ampere = Machine { gpu: Some(Gpu::ampere()), ..Machine::default() };
        assert_eq!(kernel(&call(1, scheme, scales), ampere).as_deref(), Some("any_quant_experts"));
    }
    let group = int(4, 48, false);
    for (scheme, scales) in [
        (group, DType::F16),
        (int(4, 128, false), DType::F32),
        (fp4(64), DType::U8),
        (fp4(32).with_fp8_scales(), DType::U8),
    ] {
        assert_eq!(kernel(&call(1, scheme, scales), hopper()).as_deref(), Some("any_quant_experts"));
    }
    // The products of one launch have weights of one format.
    let mut mixed = call(1, fp4(32), DType::U8);
    mixed.quant.as_mut().unwrap()[1].scheme = fp4(16).with_fp8_scales();
    assert_eq!(kernel(&mixed, hopper()).as_deref(), Some("any_quant_experts"));
    let mut mixed = call(1, q4k, DType::U8);
    mixed.quant.as_mut().unwrap()[1] = packs(int(4, 32, false), DType::F16, [ColumnOrder::Input; 2])[1];
    assert_eq!(kernel(&mixed, hopper()).as_deref(), Some("any_quant_experts"));
}

/// Its hidden and intermediate size, 2880, are 22.5 steps of 128 columns.
#[test]
fn gpt_oss_takes_the_fast_kernels() {
    let scheme = QuantScheme::fp4(QuantGroup::Size(32));
    let call = |tokens| ExpertsCall {
        tokens,
        top_k: 4,
        num_ids: 32,
        num_local: 32,
        hidden: 2880,
        inter: 2880,
        quant: Some(packs(scheme, DType::U8, [ColumnOrder::Input; 2])),
        ..QWEN3_30B
    };
    for (tokens, want) in [
        (1, ExpertsForm::OneLaunch),
        (4, ExpertsForm::OneLaunch),
        (5, ExpertsForm::Tensor),
        (511, ExpertsForm::Tensor),
        (512, ExpertsForm::Wide),
    ] {
        assert_eq!(ExpertsForm::choose(&call(tokens), &hopper()), Some(want), "{tokens}");
    }
}

#[test]
fn experts_with_act_order_take_rows_in_the_order_of_their_columns() {
    use ColumnOrder::{Filled, Input, Sorted};
    let call = |tokens, orders| ExpertsCall {
        tokens,
        quant: Some(packs(int(4, 128, true), DType::F16, orders)),
        ..QWEN3_30B
    };
    let kernel = |call: ExpertsCall, machine: &Machine| {
        ExpertsForm::choose(&call, machine).map(|form| form.kernel(&call)).unwrap_or_default()
    };
    for (tokens, orders, want) in [
        (1, [Sorted, Input], "order_rows + quant_experts_tensor"),
        (1023, [Sorted, Input], "order_rows + quant_experts_tensor"),
        (1024, [Sorted, Input], "order_rows + quant_experts_wide"),
        // Only the columns of down had an order, and gate and up rows have been put into it.
        (1, [Input, Input], "quant_layer_stream"),
        (64, [Sorted, Filled], "any_quant_experts"),
        (64, [Filled, Input], "any_quant_experts"),
        (64, [Sorted, Sorted], "any_quant_experts"),
    ] {
        assert_eq!(kernel(call(tokens, orders), &hopper()), want, "{tokens} tokens, {orders:?}");
    }
    let invariant = Machine { batch_invariant: true, ..hopper() };
    assert_eq!(kernel(call(1, [Sorted, Input]), &invariant), "order_rows + quant_experts_tensor");
    let ampere = Gpu::ampere();
    let ampere = Machine { gpu: Some(ampere), ..Machine::default() };
    assert_eq!(kernel(call(1, [Sorted, Input]), &ampere), "any_quant_experts");
    let why = |form: ExpertsForm, orders| form.fits(&call(4, orders), &hopper()).unwrap_err().to_string();
    for form in [ExpertsForm::OneLaunch, ExpertsForm::Stream] {
        assert_eq!(why(form, [Sorted, Input]), "does not read columns that are sorted by group (act-order)");
    }
    assert_eq!(
        why(ExpertsForm::Tensor, [Sorted, Filled]),
        "does not read columns that are sorted by groups that are filled up (act-order; a rank's part of each group, or \
         a last one that is shorter)"
    );
}

#[test]
fn sizes_that_fit_no_shared_memory_say_so() {
    let wide = ExpertsCall { tokens: 4, hidden: 28_672, ..QWEN3_30B };
    let reason = wide.fits_one_launch(&hopper()).unwrap_err();
    assert!(matches!(reason, Reason::SharedMemory { .. }), "{reason}");
    let none = ExpertsCall { tokens: 1, num_local: 0, ..QWEN3_30B };
    assert_eq!(none.fits_one_launch(&hopper()), Err(Reason::NoLocalExperts));
    let many = ExpertsCall { tokens: 8, ..none };
    assert_eq!(many.fits_tensor(&hopper()), Err(Reason::NoLocalExperts));
}
#[test]
fn deepseeks_experts_take_the_fast_kernels() {
    // The sizes of DeepSeek-V2-Lite and of DeepSeek-V2.
    for (num_local, hidden, inter) in [(64, 2048, 1408), (160, 5120, 1536)] {
        let call = |tokens| ExpertsCall {
            tokens,
            top_k: 6,
            num_ids: num_local,
            num_local,
            hidden,
            inter,
            quant: None,
            passes: 1,
            epilogue: EpilogueCall::PLAIN,
        };
        let form = |tokens| ExpertsForm::choose(&call(tokens), &hopper());
        assert_eq!(form(1), Some(ExpertsForm::OneLaunch));
        assert_eq!(form(6), Some(ExpertsForm::Stream));
        assert_eq!(form(64), Some(ExpertsForm::Tensor));
        assert_eq!(form(8192), Some(ExpertsForm::Wide));
    }
}

#[test]
fn biases_and_the_clamped_activation_have_kernels() {
    let oai = EpilogueCall { bias: true, activation: Activation::SwiGluOai { alpha: 1.702, limit: 7.0 } };
    let weights = |gate_up| QuantWeights {
        scheme: QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 }),
        scales: DType::F32,
        gate_up,
        in_blocks: true,
        order: ColumnOrder::Input,
    };
    let call = |tokens, quant: Option<[QuantWeights; 2]>| ExpertsCall {
        tokens,
        top_k: 4,
        num_ids: 32,
        num_local: 32,
        hidden: 2880,
        inter: 2880,
        quant,
        epilogue: oai,
        ..QWEN3_30B
    };
    let fp8 = Some([weights(true), weights(false)]);
    let name = |call: &ExpertsCall| ExpertsForm::choose(call, &hopper()).map(Form::name);
    for (tokens, floats, quantised) in [
        (1, "layer_stream", "layer_stream"),
        (4, "layer_stream", "layer_stream"),
        (5, "experts_stream", "experts_tensor"),
        (8, "experts_tensor", "experts_tensor"),
        (255, "experts_tensor", "experts_tensor"),
        (256, "experts_wide", "experts_tensor"),
        (8192, "experts_wide", "experts_wide"),
    ] {
        assert_eq!(name(&call(tokens, None)), Some(floats), "{tokens} tokens");
        assert_eq!(name(&call(tokens, fp8)), Some(quantised), "{tokens} tokens, quantised");
    }
    let eight = Machine { gpu: Some(Gpu::ampere()), ..Machine::default() };
    let said = |form: ExpertsForm, call: ExpertsCall, machine| form.fits(&call, machine).unwrap_err().check();
    assert_eq!(said(ExpertsForm::Grouped, call(512, None), &eight), "activation");
    let activation = Activation::SwiGlu;
    let biased = ExpertsCall { epilogue: EpilogueCall { activation, ..oai }, ..call(512, None) };
    assert_eq!(said(ExpertsForm::Grouped, biased, &eight), "bias");
    assert_eq!(ExpertsForm::choose(&biased, &eight), None, "the oracle takes other experts there");
    let gelu = ExpertsCall { epilogue: EpilogueCall { activation: Activation::Gelu, ..oai }, ..biased };
    assert_eq!(ExpertsForm::choose(&gelu, &hopper()), None);
}
