//! Routing by every method gives the ids and weights of the CPU, bit for bit.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use moe_kernels::{
    Buffer, Exec, ExpertHeat, Log2Phy, NO_EXPERT, RoutedExperts, Spread, StepContext, View, ViewMut,
    physical_ids_into,
};
use moe_router::{
    GateInput, RouteInput, RouteOutput, Router, RouterConfig, RouterParams, RoutingFunction, Scoring,
    Selection,
};

use crate::common::*;

/// Ids are the token number and its successors; weights depend on the ids.
struct Rotation;

impl RoutingFunction for Rotation {
    fn name(&self) -> &str {
        "rotation"
    }

    fn select(
        &self,
        config: &RouterConfig,
        input: &RouteInput<'_>,
        ids: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let tokens = input.logits.rows();
        let k = config.top_k;
        let rows = (0..tokens * k).map(|i| ((i / k + i % k) % config.num_experts) as u32);
        ex.copy_from_host(words(rows.collect(), &[tokens, k]).view(), ids)
    }

    fn weigh(
        &self,
        _: &RouterConfig,
        _: &RouteInput<'_>,
        ids: View<'_>,
        weights: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let ids = ex.to_host(ids)?;
        let of = |id: u32| if id == NO_EXPERT { 9.0 } else { id as f32 + 0.5 };
        let rows: Vec<f32> = values::<u32>(&ids).into_iter().map(of).collect();
        ex.copy_from_host(Buffer::from_vec(rows, ids.dims())?.view(), weights)
    }
}

/// A router with these parameters, on the device where it runs.
fn router(config: &RouterConfig, bias: &[f32], table: &[u32], device: &Device) -> Router {
    let mut params = RouterParams::default();
    if config.correction_bias {
        params.correction_bias = Some(Tensor::new(&bias[..config.num_logits()], device).unwrap());
    }
    if let Selection::Hash { vocab_size } = config.selection {
        let table = table[..vocab_size * config.top_k].to_vec();
        params.hash_table = Some(Tensor::from_vec(table, (vocab_size, config.top_k), device).unwrap());
    }
    if config.selection == Selection::Custom {
        params.function = Some(Arc::new(Rotation));
    }
    Router::new(config.clone(), params).unwrap()
}

struct Case {
    config: RouterConfig,
    logits: Buffer,
    bias: Vec<f32>,
    table: Vec<u32>,
    step: StepContext,
}

/// The results of a call: ids, weights, identity weights, captured ids, heat.
type Outcome = (Vec<u32>, Vec<u32>, Vec<u32>, Option<Vec<u32>>, Option<Vec<u64>>);

impl Case {
    /// Layer 1, rows 2.. of the step.
    fn run(&self, mut ex: Exec) -> Outcome {
        let device = ex.device().clone();
        let router = router(&self.config, &self.bias, &self.table, &device);
        let mut context = self.step.clone();
        let tokens = self.logits.dims()[0];
        let slots = self.config.num_slots();
        let mut logits = ex.zeros(DType::F32, self.logits.dims()).unwrap();
        ex.copy_from_host(self.logits.view(), logits.view_mut()).unwrap();
        let mut ids = ex.zeros(DType::U32, &[tokens, slots]).unwrap();
        let mut weights = ex.zeros(DType::F32, &[tokens, slots]).unwrap();
        let mut identity = ex.zeros(DType::F32, &[tokens]).unwrap();
        let out = RouteOutput {
            topk_ids: ids.view_mut(),
            topk_weights: weights.view_mut(),
            zero_expert_weights: Some(identity.view_mut()),
        };
        let input = RouteInput { first_row: 2, ..RouteInput::new(logits.view(), 1) };
        router.route_into(&input, out, &mut context, &mut ex).unwrap();
        let bits = |b: &Buffer| {
            values::<f32>(&ex.to_host(b.view()).unwrap()).into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let ids = values::<u32>(&ex.to_host(ids.view()).unwrap());
        let capture = context.capture.as_ref().map(|c| c.ids().to_vec());
        let heat = context.heat.as_ref().map(|h| h.layer(1).to_vec());
        (ids, bits(&weights), bits(&identity), capture, heat)
    }

    fn check(&self) {
        let cpu = self.run(Exec::cpu());
        let gpu = self.run(cuda());
        let config = &self.config;
        assert_eq!(cpu.0, gpu.0, "ids of {config:?}");
        let floats = |bits: &[u32]| bits.iter().map(|b| f32::from_bits(*b)).collect::<Vec<_>>();
        assert_eq!(cpu.1, gpu.1, "weights of {config:?}: {:?} and {:?}", floats(&cpu.1), floats(&gpu.1));
        assert_eq!(cpu.2, gpu.2, "identity weights of {config:?}");
        assert_eq!((&cpu.3, &cpu.4), (&gpu.3, &gpu.4), "capture and heat of {config:?}");
    }
}

/// Logits of all kinds: spread, equal in groups (ties), some -inf.
fn logits(rng: &mut Rng, tokens: usize, width: usize) -> Buffer {
    let mut rows = Vec::with_capacity(tokens * width);
    for t in 0..tokens {
        for _ in 0..width {
            rows.push(match t % 4 {
                0 => rng.float() * 8.0,
                1 => rng.below(5) as f32 - 2.0,
                2 if rng.below(4) == 0 => f32::NEG_INFINITY,
                2 => rng.float() * 30.0,
                _ => rng.float() * 1e-3,
            });
        }
        if t % 4 == 2 {
            rows[t * width] = 1.0; // so that not all are -inf
        }
    }
    Buffer::from_vec(rows, &[tokens, width]).unwrap()
}

fn methods(experts: usize, top_k: usize) -> Vec<RouterConfig> {
    let base = RouterConfig::new(experts, top_k);
    let mut all = Vec::new();
    for scoring in [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus] {
        for renormalize in [false, true] {
            let with = RouterConfig { scoring, renormalize, routed_scaling_factor: 2.5, ..base.clone() };
            all.push(RouterConfig { routed_scaling_factor: 1.0, ..with.clone() });
            all.push(RouterConfig { correction_bias: true, num_zero_experts: 3, ..with.clone() });
            all.push(RouterConfig {
                selection: Selection::RawLogits,
                softcapping: Some(7.0),
                ..with.clone()
            });
            all.push(RouterConfig { num_fused_shared_experts: 2, fused_shared_weight: 0.3, ..with.clone() });
            all.push(RouterConfig { selection: Selection::Hash { vocab_size: 50 }, ..with.clone() });
            for (num_expert_group, topk_group) in [(1, 1), (4, 3)] {
                if experts.is_multiple_of(num_expert_group) && experts / num_expert_group >= 2.max(top_k) {
                    let selection = Selection::Grouped { num_expert_group, topk_group };
                    all.push(RouterConfig { selection: selection.clone(), ..with.clone() });
                    all.push(RouterConfig { selection, correction_bias: true, ..with.clone() });
                }
            }
        }
    }
    all.push(RouterConfig { selection: Selection::Custom, ..base.clone() });
    for strategy in ["uniform_random", "normal_routing"] {
        let selection = Selection::Simulated { strategy: strategy.into(), seed: 11 };
        all.push(RouterConfig { selection, ..base.clone() });
    }
    all
}

#[test]
fn every_method_routes_as_on_the_cpu() {
    let mut rng = Rng::new();
    let sizes = [(8, 2), (1, 1), (60, 4), (128, 8), (300, 40), (1500, 3)];
    for (experts, top_k) in small(sizes, 60, |size| size.0) {
        for config in methods(experts, top_k) {
            for tokens in [0, 1, 37] {
                check_with(&mut rng, &config, tokens, |_, _| {});
            }
        }
    }
}

fn check_with(
    rng: &mut Rng,
    config: &RouterConfig,
    tokens: usize,
    step: impl Fn(&mut Rng, &mut StepContext),
) {
    let mut context = StepContext { step: 5, ..StepContext::default() };
    context.token_ids = Some((0..tokens + 2).map(|_| rng.below(50) as u32).collect());
    step(rng, &mut context);
    let table = (0..50)
        .flat_map(|_| rng.permutation(config.num_experts).into_iter().take(config.top_k).collect::<Vec<_>>());
    let table = table.collect();
    let bias = (0..config.num_logits()).map(|_| rng.float() * 0.3).collect();
    let logits = logits(rng, tokens, config.num_logits());
    Case { config: config.clone(), logits, bias, table, step: context }.check();
}

#[test]
fn the_step_context_takes_part() {
    let mut rng = Rng::new();
    for config in methods(64, 6) {
        let experts = config.num_experts;
        let limit = config.num_logits();
        let tokens = 21;
        let recorded = |step: &mut StepContext| {
            step.capture = Some(RoutedExperts::empty(tokens + 2, 3, 6).unwrap());
            step.heat = Some(ExpertHeat::new(3, experts));
        };
        check_with(&mut rng, &config, tokens, |_, step| recorded(step));
        check_with(&mut rng, &config, tokens, |rng, step| {
            recorded(step);
            let mut replay = RoutedExperts::empty(tokens + 2, 3, 6).unwrap();
            for t in (0..tokens + 2).filter(|t| t % 3 != 0) {
                let mut ids: Vec<u32> = rng.permutation(limit).into_iter().take(6).collect();
                ids[t % 6] = NO_EXPERT;
                replay.set(t, 1, &ids).unwrap();
            }
            step.replay = Some(Arc::new(replay));
        });
        check_with(&mut rng, &config, tokens, |rng, step| {
            recorded(step);
            step.force_balance = Some(rng.bits());
        });
    }
}

#[test]
fn a_replay_with_bad_ids_is_refused() {
    let mut replay = RoutedExperts::empty(1, 1, 2).unwrap();
    replay.set(0, 0, &[1, 9]).unwrap();
    let mut ex = cuda();
    let mut context = StepContext { replay: Some(Arc::new(replay)), ..StepContext::default() };
    let router = Router::new(RouterConfig::new(4, 2), RouterParams::default()).unwrap();
    let logits = Tensor::zeros((1, 4), DType::F32, ex.device()).unwrap();
    let routed = router.route_step(&logits, None, 0, &mut context, &mut ex);
    assert_error(routed, &["replayed routing, row 0", "expert id 9"]);
}

/// A function that chooses one expert in every slot.
struct Constant(u32);

impl RoutingFunction for Constant {
    fn name(&self) -> &str {
        "constant"
    }

    fn select(&self, _: &RouterConfig, _: &RouteInput<'_>, ids: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let chosen = words(vec![self.0; ids.elem_count()], ids.dims());
        ex.copy_from_host(chosen.view(), ids)
    }

    fn weigh(
        &self,
        _: &RouterConfig,
        _: &RouteInput<'_>,
        _: View<'_>,
        weights: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let ones = Buffer::from_vec(vec![1f32; weights.elem_count()], weights.dims())?;
        ex.copy_from_host(ones.view(), weights)
    }
}

#[test]
fn a_routing_function_is_held_to_experts_that_exist() {
    let ex = cuda();
    let logits = Tensor::zeros((3, 4), DType::F32, ex.device()).unwrap();
    let route = |id, top_k| {
        let config = RouterConfig { selection: Selection::Custom, ..RouterConfig::new(4, top_k) };
        let params = RouterParams { function: Some(Arc::new(Constant(id))), ..Default::default() };
        Router::new(config, params).unwrap().route(&logits)
    };
    for id in [3, NO_EXPERT] {
        let ids = route(id, 1).unwrap().topk_ids.to_vec2::<u32>().unwrap();
        assert_eq!(ids, vec![vec![id]; 3]);
    }
    for id in [4, 5, NO_EXPERT - 1] {
        assert_error(
            route(id, 1),
            &["routing function `constant`, row 0", &format!("expert id {id} is out of range")],
        );
    }
    assert_error(route(2, 2), &["expert id 2 occurs twice"]);
}

/// Chosen experts are replaced by their copies, in the router's launch or after it, and the copies are the CPU's.
/// Weights stay unchanged.
#[test]
fn chosen_experts_become_their_copies() {
    let mut rng = Rng::new();
    // Sizes for the single launch, for a launch of each part, no token, and sizes of the tier "any".
    let sizes = [
        (DType::BF16, [5, 128, 16, 4]),
        (DType::BF16, [600, 64, 60, 6]),
        (DType::BF16, [0, 64, 8, 2]),
        (DType::F32, [33, 42, 7, 3]),
    ];
    for (dtype, [tokens, hidden, experts, top_k]) in sizes {
        let mut p = Place::new(cuda());
        let x = p.put(&rng.floats(dtype, &[tokens, hidden]));
        let gate = p.put(&rng.floats(dtype, &[experts, hidden]));
        let config = RouterConfig { renormalize: true, ..RouterConfig::new(experts, top_k) };
        let router = Router::new(config, RouterParams::default()).unwrap();
        let route = |log2phy: Option<Log2Phy<'_>>, p: &mut Place| {
            let mut ids = p.out(DType::U32, &[tokens, top_k]);
            let mut weights = p.out(DType::F32, &[tokens, top_k]);
            let out = RouteOutput {
                topk_ids: ids.view_mut(),
                topk_weights: weights.view_mut(),
                zero_expert_weights: None,
            };
            let input = GateInput { log2phy, ..GateInput::new(x.view(), gate.view(), 0) };
            let mut context = StepContext::default();
            router.gate_and_route_into(&input, None, out, &mut context, &mut p.ex).unwrap();
            (ids.host(p), weights.host(p))
        };
        let (chosen, weights) = route(None, &mut p);
        for (width, spread) in [(1, Spread::InTurns), (3, Spread::Hashed), (9, Spread::InTurns)] {
            let mut table = vec![-1; experts * width];
            for (expert, row) in table.chunks_mut(width).enumerate() {
                let copies = 1 + rng.below(width);
                row[..copies].iter_mut().enumerate().for_each(|(i, id)| *id = (expert * width + i) as i32);
            }
            let table = Buffer::from_vec(table, &[experts, width]).unwrap();
            let placed = p.put(&table);
            let of = |ids| Log2Phy { ids, spread, first_row: 3 };
            let (got, same) = route(Some(of(placed.view())), &mut p);
            let mut want = Buffer::zeros(DType::U32, &[tokens, top_k]).unwrap();
            physical_ids_into(chosen.view(), &of(table.view()), want.view_mut(), &mut Exec::cpu()).unwrap();
            let name = format!("{dtype:?}, {tokens} tokens, {experts} experts, at most {width} copies");
            assert_same(&name, &want, &got);
            assert_same(&name, &weights, &same);
        }
    }
}
