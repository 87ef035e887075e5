//! Tests of validation, construction, loading, checks of arguments, and the tags of methods.

use std::collections::HashMap;

use moe_router::candle::{DType, Device, Result, Tensor};
use moe_router::{
    Exec, RouteInput, RouteOutput, Router, RouterConfig, RouterParams, RoutingMethod, Scoring, Selection,
    StepContext, VarBuilder, View, ViewMut,
};

use crate::{logits, message, router, some_logits};

fn biased(num_experts: usize) -> RouterConfig {
    RouterConfig { correction_bias: true, scoring: Scoring::Sigmoid, ..RouterConfig::new(num_experts, 2) }
}

fn grouped(num_expert_group: usize, topk_group: usize) -> Selection {
    Selection::Grouped { num_expert_group, topk_group }
}

#[test]
fn invalid_configurations() {
    let new = RouterConfig::new(8, 2);
    let table = [
        (RouterConfig::new(8, 0), "top_k must be at least 1, got 0"),
        (RouterConfig::new(0, 2), "num_experts must be at least 1, got 0"),
        (RouterConfig::new(8, 9), "top_k = 9 exceeds the 8 experts of the router"),
        (
            RouterConfig { selection: grouped(4, 1), top_k: 3, ..new.clone() },
            "top_k = 3 exceeds the 2 experts that 1 groups of 2 leave",
        ),
        (
            RouterConfig { selection: grouped(0, 1), ..new.clone() },
            "num_expert_group must be at least 1, got 0",
        ),
        (RouterConfig { selection: grouped(2, 0), ..new.clone() }, "topk_group must be at least 1, got 0"),
        (
            RouterConfig { selection: Selection::Hash { vocab_size: 0 }, ..new.clone() },
            "vocab_size must be at least 1, got 0",
        ),
        (
            RouterConfig { selection: Selection::Custom, ..biased(8) },
            "a correction bias has no effect on custom selection; remove one of the two",
        ),
        (
            RouterConfig { selection: Selection::Hash { vocab_size: 5 }, ..biased(8) },
            "a correction bias has no effect on hash selection; remove one of the two",
        ),
        (
            RouterConfig { selection: grouped(4, 2), num_zero_experts: 1, ..biased(8) },
            "1 zero experts need plain top-k selection with a correction bias, got grouped selection with \
             correction_bias = true",
        ),
        (
            RouterConfig { fused_shared_weight: f32::NAN, ..new.clone() },
            "fused_shared_weight must be finite, got NaN",
        ),
        (
            RouterConfig { softcapping: Some(f32::INFINITY), ..new.clone() },
            "softcapping must be finite and above 0, got inf",
        ),
        (
            RouterConfig {
                apply_router_weight_on_input: true,
                num_fused_shared_experts: 1,
                ..RouterConfig::new(8, 1)
            },
            "apply_router_weight_on_input is only implemented for top_k = 1, got 2 slots per token (1 routed, 1 \
             fused shared)",
        ),
        (
            RouterConfig { num_zero_experts: usize::MAX, ..biased(8) },
            "8 experts, 18446744073709551615 zero experts and 0 fused shared experts are more than the \
             2147483647 that expert ids can name",
        ),
    ];
    for (config, want) in table {
        assert_eq!(message(config.validate()), want);
        // Construction reports the same error.
        assert_eq!(message(Router::new(config, RouterParams::default())), want);
    }
    // Groups of one expert are allowed if the group score is the maximum.
    assert_eq!(RouterConfig { selection: grouped(8, 3), ..new }.validate(), Ok(()));
}

#[test]
fn parameters_must_fit_the_configuration() -> Result<()> {
    let tensor = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    let with_bias = |config: RouterConfig, bias: Option<Tensor>| {
        message(Router::new(config, RouterParams { correction_bias: bias, ..Default::default() }))
    };
    assert_eq!(
        with_bias(biased(4), None),
        "the router selects on score + bias, but no e_score_correction_bias was given"
    );
    assert_eq!(
        with_bias(RouterConfig::new(4, 2), Some(tensor(&[4])?)),
        "an e_score_correction_bias was given, but the router is configured without one"
    );
    assert_eq!(
        with_bias(biased(4), Some(tensor(&[4])?.to_dtype(DType::BF16)?)),
        "e_score_correction_bias must be f32, because a rounded bias changes routing; got bf16"
    );
    assert_eq!(
        with_bias(biased(4), Some(tensor(&[5])?)),
        "expected e_score_correction_bias with dims [4], got [5]"
    );
    assert_eq!(
        with_bias(biased(4), Some(Tensor::new(&[0f32, 0., f32::NAN, 0.], &Device::Cpu)?)),
        "e_score_correction_bias of expert 2 is NaN; it must be finite"
    );

    let hash = RouterConfig { selection: Selection::Hash { vocab_size: 2 }, ..RouterConfig::new(4, 2) };
    let with_table = |config: &RouterConfig, table: Option<Tensor>| {
        message(Router::new(config.clone(), RouterParams { hash_table: table, ..Default::default() }))
    };
    let table = |ids: [[i64; 2]; 2]| Tensor::new(&ids, &Device::Cpu);
    assert_eq!(with_table(&hash, None), "hash selection needs a hash table");
    assert_eq!(
        with_table(&RouterConfig::new(4, 2), Some(table([[0, 1], [2, 3]])?)),
        "top-k selection does not use the hash table that was given"
    );
    assert_eq!(with_table(&hash, Some(tensor(&[2, 2])?)), "the hash table must hold integers, got dtype f32");
    assert_eq!(
        with_table(&hash, Some(table([[0, 1], [2, 3]])?.narrow(0, 0, 1)?)),
        "expected a hash table with dims [2, 2], got [1, 2]"
    );
    assert_eq!(
        with_table(&hash, Some(table([[0, 1], [3, 3]])?)),
        "hash table, token 1: expert id 3 occurs twice"
    );
    for bad in [4, -1, i64::from(u32::MAX), 1 << 40] {
        let e = with_table(&hash, Some(table([[0, bad], [2, 3]])?));
        assert!(e.starts_with(&format!("hash table, token 0: expert id {bad} is out of range")), "{e}");
    }
    let custom = RouterConfig { selection: Selection::Custom, ..RouterConfig::new(4, 2) };
    assert_eq!(with_table(&custom, None), "custom selection needs a routing function");
    Ok(())
}

fn var_builder(tensors: &[(&str, Tensor)], dtype: DType) -> VarBuilder<'static> {
    let tensors: HashMap<String, Tensor> = tensors.iter().map(|(n, t)| (n.to_string(), t.clone())).collect();
    VarBuilder::from_tensors(tensors, dtype, &Device::Cpu)
}

#[test]
fn loading_keeps_the_bias_in_f32() -> Result<()> {
    // In bf16, 1 and 1 + 2^-12 are the same number.
    let bias = Tensor::new(&[1f32, 1.000_244_1, 0.0], &Device::Cpu)?;
    let vb = var_builder(&[("mlp.gate.e_score_correction_bias", bias)], DType::BF16);
    let config = RouterConfig { top_k: 1, ..biased(3) };
    let router = Router::load(&config, vb.pp("mlp.gate"))?;
    let routed = router.route(&logits(&[vec![0.0; 3]], 3)?)?;
    assert_eq!(routed.topk_ids.to_vec2::<u32>()?, [[1]]);
    assert_eq!(router.config(), &config);

    let e = message(Router::load(&config, vb.pp("mlp.router")));
    let want = "the router's configuration calls for `mlp.router.e_score_correction_bias` [3]: ";
    assert!(e.starts_with(want) && e.contains("cannot find tensor"), "{e}");
    let e = message(Router::load(&RouterConfig { num_experts: 4, ..config }, vb.pp("mlp.gate")));
    assert!(e.contains("e_score_correction_bias` [4]: ") && e.contains("[3]"), "{e}");
    // Without a bias in the configuration no tensor is read.
    Router::load(&RouterConfig::new(3, 1), var_builder(&[], DType::F32))?;
    Ok(())
}

#[test]
fn loading_reads_the_hash_table() -> Result<()> {
    let table = Tensor::new(&[[2i64], [0]], &Device::Cpu)?;
    let vb = var_builder(&[("gate.tid2eid", table)], DType::BF16);
    let selection = Selection::Hash { vocab_size: 2 };
    let router = Router::load(&RouterConfig { selection, ..RouterConfig::new(3, 1) }, vb.pp("gate"))?;
    let mut context = StepContext { token_ids: Some([1, 0].into()), ..StepContext::default() };
    let input = logits(&some_logits(2, 3, 1), 3)?;
    let routed = router.route_step(&input, None, 0, &mut context, &mut Exec::cpu())?;
    assert_eq!(routed.topk_ids.to_vec2::<u32>()?, [[0], [2]]);
    Ok(())
}

#[test]
fn errors_name_the_wrong_argument() -> Result<()> {
    let router = router(RouterConfig::new(4, 2), None)?;
    let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu);
    let run = |t: Tensor| message(router.route(&t));
    assert_eq!(
        run(tensor(&[3, 5], DType::F32)?),
        "route: expected router_logits with dims [3, 4], got [3, 5]"
    );
    assert_eq!(run(tensor(&[3, 4], DType::BF16)?), "route: expected router_logits of dtype f32, got bf16");
    assert_eq!(run(tensor(&[12], DType::F32)?), "route: expected router_logits with 2 dimensions, got [12]");
    // No view has five dimensions or holds f64, so these are refused before there is one.
    let deep = tensor(&[1, 1, 1, 3, 4], DType::F32)?;
    assert_eq!(run(deep), "route: expected router_logits with 2 dimensions, got [1, 1, 1, 3, 4]");
    assert_eq!(run(tensor(&[3, 4], DType::F64)?), "route: expected router_logits of dtype f32, got f64");
    let gated = |hidden: Tensor, weight: Tensor, bias: Option<Tensor>| {
        let mut context = StepContext::default();
        message(router.gate_and_route(&hidden, &weight, bias.as_ref(), 0, &mut context, &mut Exec::cpu()))
    };
    let hidden = || tensor(&[3, 8], DType::F32);
    let weight = || tensor(&[4, 8], DType::F32);
    assert_eq!(
        gated(tensor(&[3, 8], DType::F64)?, weight()?, None),
        "gate_and_route: expected hidden_states of dtype f32, bf16 or f16, got f64"
    );
    assert_eq!(
        gated(hidden()?, tensor(&[4, 8], DType::F16)?, None),
        "gate_and_route: expected gate weight of dtype f32, got f16"
    );
    assert_eq!(
        gated(hidden()?, weight()?, Some(tensor(&[5], DType::F32)?)),
        "gate_and_route: expected gate bias with dims [4], got [5]"
    );

    let data = [0f32; 8];
    let call = |ids: ViewMut<'_>, weights: ViewMut<'_>, zero: Option<ViewMut<'_>>, first_row, hidden| {
        let input =
            RouteInput { hidden, first_row, ..RouteInput::new(View::new(&data, &[2, 4]).unwrap(), 0) };
        let out = RouteOutput { topk_ids: ids, topk_weights: weights, zero_expert_weights: zero };
        message(router.route_into(&input, out, &mut StepContext::default(), &mut Exec::cpu()))
    };
    let mut ids = [0u32; 4];
    let mut weights = [0f32; 4];
    let mut zero = [0f32; 4];
    let e = call(ViewMut::new(&mut ids, &[4, 1])?, ViewMut::new(&mut weights, &[2, 2])?, None, 0, None);
    assert_eq!(e, "route: expected topk_ids with dims [2, 2], got [4, 1]");
    let e = call(ViewMut::new(&mut zero, &[2, 2])?, ViewMut::new(&mut weights, &[2, 2])?, None, 0, None);
    assert_eq!(e, "route: expected topk_ids of dtype u32, got f32");
    let e = call(ViewMut::new(&mut ids, &[2, 2])?, ViewMut::new(&mut weights, &[1, 4])?, None, 0, None);
    assert_eq!(e, "route: expected topk_weights with dims [2, 2], got [1, 4]");
    let a = ViewMut::new(&mut ids, &[2, 2])?;
    let b = ViewMut::new(&mut weights, &[2, 2])?;
    let e = call(a, b, Some(ViewMut::new(&mut zero, &[4])?), 0, None);
    assert_eq!(e, "route: expected zero_expert_weights with dims [2], got [4]");
    let a = ViewMut::new(&mut ids, &[2, 2])?;
    let b = ViewMut::new(&mut weights, &[2, 2])?;
    let e = call(a, b, None, usize::MAX, None);
    assert_eq!(e, "route: rows 18446744073709551615 + 2 overflow");
    let a = ViewMut::new(&mut ids, &[2, 2])?;
    let b = ViewMut::new(&mut weights, &[2, 2])?;
    let e = call(a, b, None, 0, Some(View::new(&data, &[8, 1])?));
    assert_eq!(e, "route: expected hidden_states with dims [2, 1], got [8, 1]");
    Ok(())
}

#[test]
fn the_identity_output_is_required_only_with_zero_experts() -> Result<()> {
    let run = |config: RouterConfig, bias: Option<&[f32]>, zero: Option<&mut [f32]>| -> Result<()> {
        let data = vec![0f32; config.num_logits()];
        let mut ids = [0u32];
        let mut weights = [0f32];
        let out = RouteOutput {
            topk_ids: ViewMut::new(&mut ids, &[1, 1])?,
            topk_weights: ViewMut::new(&mut weights, &[1, 1])?,
            zero_expert_weights: zero.map(|z| ViewMut::new(z, &[1])).transpose()?,
        };
        let input = RouteInput::new(View::new(&data, &[1, data.len()])?, 0);
        router(config, bias)?.route_into(&input, out, &mut StepContext::default(), &mut Exec::cpu())
    };
    let zeros = RouterConfig { num_zero_experts: 1, correction_bias: true, ..RouterConfig::new(2, 1) };
    let e = message(run(zeros.clone(), Some(&[0.0, 0.0, 1.0]), None));
    assert_eq!(e, "route: a router with 1 zero experts needs the output zero_expert_weights [1] f32");
    let mut out = [7f32];
    run(zeros, Some(&[0.0, 0.0, 1.0]), Some(&mut out))?;
    assert!((out[0] - 1.0 / 3.0).abs() < 1e-6, "{out:?}");
    run(RouterConfig::new(2, 1), None, Some(&mut out))?;
    assert_eq!(out, [0.0]);
    Ok(())
}

#[test]
fn meaningless_logits_name_the_first_row() -> Result<()> {
    // There are enough rows to divide them over threads. The error names the first bad row in order, and not the first
    // that a thread finds.
    let mut input = some_logits(3000, 16, 3);
    (input[2900][0], input[1700][3], input[1701][1]) = (f32::NAN, f32::NAN, f32::NAN);
    let router = router(RouterConfig::new(16, 2), None)?;
    let mut ex = Exec::cpu().with_threads(4)?;
    let mut run = |input: &[Vec<f32>]| {
        message(router.route_step(&logits(input, 16).unwrap(), None, 7, &mut StepContext::default(), &mut ex))
    };
    assert_eq!(run(&input), "router_logits, row 1700 of MoE layer 7: the logit of expert 3 is NaN");
    assert_eq!(
        run(&[vec![f32::NEG_INFINITY; 16]]),
        "router_logits, row 0 of MoE layer 7: every logit is -inf"
    );
    assert_eq!(
        run(&[vec![f32::INFINITY; 16]]),
        "router_logits, row 0 of MoE layer 7: the logit of expert 0 is inf"
    );
    Ok(())
}

/// The faulty rows get existing experts and weights that are NaN; all other rows keep their bits.
#[test]
fn a_step_that_isolates_faults_loses_the_faulty_rows_alone() -> Result<()> {
    use moe_router::RoutedExperts;

    let sound = some_logits(3000, 16, 3);
    let mut faulty = sound.clone();
    (faulty[1700][3], faulty[2900][0]) = (f32::NAN, f32::INFINITY);
    faulty[5].fill(f32::NEG_INFINITY);
    let grouped = Selection::Grouped { num_expert_group: 4, topk_group: 2 };
    for selection in [Selection::TopK, Selection::RawLogits, grouped] {
        let router = router(RouterConfig { selection, renormalize: true, ..RouterConfig::new(16, 2) }, None)?;
        let mut ex = Exec::cpu().with_threads(4)?;
        let mut context = StepContext {
            isolate_faults: true,
            capture: Some(RoutedExperts::empty(3000, 1, 2)?),
            ..StepContext::default()
        };
        let want = crate::bits(&router.route(&logits(&sound, 16)?)?)?;
        let routed = router.route_step(&logits(&faulty, 16)?, None, 0, &mut context, &mut ex)?;
        let got = crate::bits(&routed)?;
        for (t, (ids, weights)) in crate::rows(&routed)?.into_iter().enumerate() {
            assert_eq!(context.capture.as_ref().unwrap().get(t, 0)?, ids);
            match [5, 1700, 2900].contains(&t) {
                true => assert!(ids == [0, 1] && weights.iter().all(|w| w.is_nan()), "row {t}: {weights:?}"),
                false => assert_eq!(got[t], want[t], "row {t}"),
            }
        }
    }
    Ok(())
}

#[test]
fn tags_of_methods() {
    use RoutingMethod as M;
    let new = RouterConfig::new(8, 2);
    let sigmoid = RouterConfig { scoring: Scoring::Sigmoid, ..new.clone() };
    let renorm = |config: &RouterConfig| RouterConfig { renormalize: true, ..config.clone() };
    let scaled = |config: &RouterConfig| RouterConfig { routed_scaling_factor: 2.0, ..config.clone() };
    let groups = |config: &RouterConfig, n| RouterConfig { selection: grouped(n, 1), ..config.clone() };
    let raw = |config: &RouterConfig| RouterConfig { selection: Selection::RawLogits, ..config.clone() };
    let softplus = RouterConfig { scoring: Scoring::SqrtSoftplus, ..new.clone() };
    let soft_bias = RouterConfig { scoring: Scoring::Softmax, ..biased(8) };
    let table = [
        (new.clone(), M::Default),
        (renorm(&new), M::RenormalizeNaive),
        (scaled(&new), M::Unspecified),
        (groups(&new, 1), M::Default),
        (groups(&new, 4), M::Unspecified),
        (sigmoid.clone(), M::Sigmoid),
        (renorm(&sigmoid), M::SigmoidRenorm),
        (renorm(&biased(8)), M::MiniMax2),
        (scaled(&renorm(&biased(8))), M::Unspecified),
        (biased(8), M::Unspecified),
        (soft_bias, M::Unspecified),
        (groups(&renorm(&biased(8)), 1), M::DeepSeekV3),
        (scaled(&groups(&renorm(&biased(8)), 4)), M::DeepSeekV3),
        (groups(&biased(8), 4), M::Unspecified),
        (scaled(&renorm(&softplus)), M::DeepSeekV4),
        (softplus.clone(), M::Unspecified),
        (raw(&new), M::Renormalize),
        (raw(&RouterConfig { top_k: 1, ..sigmoid.clone() }), M::Llama4),
        (raw(&sigmoid), M::Unspecified),
        (RouterConfig { softcapping: Some(5.0), ..new.clone() }, M::Unspecified),
        (RouterConfig { num_fused_shared_experts: 1, ..new.clone() }, M::Unspecified),
        (RouterConfig { num_zero_experts: 1, ..renorm(&biased(8)) }, M::Unspecified),
        (RouterConfig { selection: Selection::Hash { vocab_size: 2 }, ..renorm(&softplus) }, M::Unspecified),
    ];
    for (config, want) in table {
        assert_eq!(config.validate(), Ok(()), "{config:?}");
        assert_eq!(config.routing_method(), want, "{config:?}");
    }
}
