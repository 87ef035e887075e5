//! Gates in f32 next to rows in bf16 or f16: no digit of them is lost, and no launch that contains a router is chosen.

use candle_core::{DType, Device, Tensor};
use model_families::deepseek_v2;
use model_runtime::{Config, DummyWeights, Geometry, RankView};
use moe_engine::engine::Engine;
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::plan::{Form, RouterCall, RouterForm};
use moe_kernels::{Buffer, StepContext};
use moe_layer::{BlockContext, MoePath};
use moe_router::{GateInput, RouteOutput, Router, RouterConfig, RouterParams};

use crate::common::*;
use crate::deepseek::CONFIG;
use crate::definition::product;
use crate::engine::{config, requests, run};

/// Tokens, H, E, K: sizes that the launch with a router would take, sizes of the tier "any", no token, many tokens.
const SIZES: [[usize; 4]; 7] = [
    [1, 64, 8, 2],
    [5, 2560, 64, 6],
    [33, 42, 7, 3],
    [0, 64, 8, 2],
    [65, 320, 60, 6],
    [300, 7168, 256, 8],
    [1025, 128, 384, 8],
];

/// A gate in f32 whose experts come in pairs: the rows of a pair are equal in bf16.
fn paired(rng: &mut Rng, experts: usize, hidden: usize) -> Buffer {
    let by = (4.0 * (hidden as f32).powf(-0.5)).log2().round().exp2();
    let first: Vec<f32> = rng.floats(DType::BF16, &[experts, hidden]).view().to_f32_vec().unwrap();
    let value = |at: usize, rng: &mut Rng| {
        let (expert, column) = (at / hidden, at % hidden);
        let base = first[expert / 2 * 2 * hidden + column];
        base * (1.0 + rng.float() * 0.0015)
    };
    let values: Vec<f32> = (0..experts * hidden).map(|at| value(at, rng) * by).collect();
    Buffer::from_vec(values, &[experts, hidden]).unwrap()
}

/// The logits are the products of the definition, and the choices are the ones that the CPU makes for these logits.
#[test]
fn logits_keep_the_digits_of_a_gate_in_f32() {
    let mut rng = Rng::new();
    for [tokens, hidden, experts, top_k] in small(SIZES, 200_000, |size| size[0] * size[1] * size[2]) {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for invariant in [false, true] {
                let x = rng.floats(dtype, &[tokens, hidden]);
                let gate = paired(&mut rng, experts, hidden);
                let what =
                    format!("{dtype:?}, {tokens} tokens, H {hidden}, E {experts}, invariant: {invariant}");
                let config = RouterConfig { renormalize: true, ..RouterConfig::new(experts, top_k) };
                let router = Router::new(config, RouterParams::default()).unwrap();
                let mut p = Place::new(cuda().with_batch_invariant(invariant));
                let call = RouterCall { hidden, experts, top_k, dtype, gate: DType::F32 };
                assert_eq!(RouterForm::choose(&call, &p.ex.machine()), Some(RouterForm::Apart), "{what}");
                let rows = p.put(&x);
                let weight = p.put(&gate);
                let mut logits = p.out(DType::F32, &[tokens, experts]);
                let mut ids = p.out(DType::U32, &[tokens, top_k]);
                let mut weights = p.out(DType::F32, &[tokens, top_k]);
                let out = RouteOutput {
                    topk_ids: ids.view_mut(),
                    topk_weights: weights.view_mut(),
                    zero_expert_weights: None,
                };
                let input = GateInput::new(rows.view(), weight.view(), 0);
                let mut step = StepContext::default();
                let seen = Some(logits.view_mut());
                router.gate_and_route_into(&input, seen, out, &mut step, &mut p.ex).unwrap();

                let got = logits.floats(&p);
                let x = x.view().to_f32_vec().unwrap();
                let gate = gate.view().to_f32_vec().unwrap();
                let magnitudes = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
                let want = product(&x, &gate, hidden);
                let sizes = product(&magnitudes(&x), &magnitudes(&gate), hidden);
                for (at, ((got, want), size)) in got.iter().zip(&want).zip(&sizes).enumerate() {
                    let off = (f64::from(*got) - want).abs();
                    // Rounding the gate to bf16 moves a logit by about 1e-3 of this size.
                    assert!(off <= 2e-6 * size, "{what}: logit {at} is off by {off} of {size}");
                }
                let logits = Tensor::from_vec(got, (tokens, experts), &Device::Cpu).unwrap();
                let routed = router.route(&logits).unwrap();
                let chosen: Vec<u32> = routed.topk_ids.flatten_all().unwrap().to_vec1().unwrap();
                assert_eq!(values::<u32>(&ids.host(&p)), chosen, "{what}");
            }
        }
    }
}

/// Steps of a model whose gates are in f32 are captured, and give the tokens of eager steps.
#[test]
fn graphs_contain_a_gate_in_f32() {
    let spec = deepseek_v2::read(&Config::parse(CONFIG, "config.json").unwrap()).unwrap();
    let device = cuda().device().clone();
    let layout = spec.layout(&Geometry::default(), &|_| true).unwrap();
    let weights = DummyWeights::new(layout.tensors.clone(), 7).with_stored_dtype(DType::F32);
    let view = RankView::new(weights, layout.slices_for(&device));
    let context = BlockContext { batch_invariant: true, ..BlockContext::default() };
    let options = LoadOptions { moe_path: Some(MoePath::Fused), context, ..LoadOptions::default() };
    let model = spec.load(&options, view.var_builder(DType::BF16, &device)).unwrap().model;
    for batch in [1, 5, 17] {
        let mut eager = Engine::new(model.as_ref(), cuda(), None, &config(batch, true)).unwrap();
        let mut graphs = Engine::new(model.as_ref(), cuda(), None, &config(batch, false)).unwrap();
        let expected = run(&mut eager, requests(batch, 24));
        assert_eq!(run(&mut graphs, requests(batch, 24)), expected, "batch {batch}");
        assert!(graphs.num_graph_steps() >= 20, "batch {batch}: {}", graphs.num_graph_steps());
    }
}
