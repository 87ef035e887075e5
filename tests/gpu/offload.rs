//! Experts in host memory: the device chooses slots by the same rule as the CPU, and outputs and tokens are equal to
//! the outputs and tokens of experts that are all on the device.

use candle_core::DType;
use model_families::qwen3_moe;
use model_runtime::{CausalLm, Config, Decoder, DummyWeights, Geometry};
use moe_engine::engine::{Engine, EngineConfig};
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::cuda::{
    ExpertEpilogue, ExpertSlots, FusedExperts, fused_experts_into, slotted_experts_into,
};
use moe_kernels::{Buffer, Exec, NO_EXPERT, QuantGroup, QuantScheme, Residency, Weight, max_passes};
use moe_layer::{BlockContext, MoePath};

use crate::common::*;
use crate::engine::{CONFIG, requests, run};
use crate::packs::Packs;
use crate::quant::matrices::{fp8, int};

/// Ids [T, K]: different ids in a row, some absent. If `hot` is below `experts`, low ids are more frequent.
fn choose(rng: &mut Rng, (tokens, top_k): (usize, usize), experts: usize, hot: usize) -> Vec<u32> {
    let row = |rng: &mut Rng| {
        let reach = if rng.below(4) > 0 { hot.max(top_k) } else { experts };
        let mut ids: Vec<u32> = rng.permutation(reach)[..top_k].to_vec();
        if rng.below(5) == 0 {
            ids[rng.below(top_k)] = NO_EXPERT;
        }
        ids
    };
    (0..tokens).flat_map(|_| row(rng)).collect()
}

/// The weighted sums of x [T, H] over the chosen experts [T, K].
fn layer(
    packs: &[Weight; 2],
    slots: Option<&ExpertSlots>,
    [x, topk_ids, topk_weights]: [&Buffer; 3],
    ex: &mut Exec,
) -> Vec<f32> {
    let w13 = packs[0].read().unwrap();
    let w2 = packs[1].read().unwrap();
    let args = FusedExperts {
        x: x.view(),
        w13: w13.view().unwrap(),
        w2: w2.view().unwrap(),
        topk_ids: topk_ids.view(),
        topk_weights: topk_weights.view(),
        expert_map: None,
        lists: None,
        epilogue: ExpertEpilogue::PLAIN,
    };
    let mut out = ex.buffer_from_host(poisoned(DType::F32, x.dims()).view()).unwrap();
    match slots {
        Some(slots) => slotted_experts_into(slots, &args, out.view_mut(), ex).unwrap(),
        None => fused_experts_into(&args, out.view_mut(), ex).unwrap(),
    }
    ex.to_host(out.view()).unwrap().view().to_f32_vec().unwrap()
}

/// Experts, slots, K, H, I, and the numbers of tokens of the steps.
type Case = (usize, usize, usize, usize, usize, &'static [usize]);

const CASES: [Case; 8] = [
    (2, 1, 1, 64, 64, &[1, 3, 0, 1, 1]),
    (9, 4, 3, 128, 64, &[1, 1, 1, 4, 5, 7, 8, 33, 1, 0, 1]),
    (16, 12, 4, 192, 128, &[2, 3, 1, 64, 1, 1, 300, 2, 1]),
    (64, 8, 8, 64, 192, &[1, 1, 2, 1, 4, 1, 700, 1, 1]),
    (33, 32, 2, 128, 128, &[16, 1, 17, 40, 1, 8]),
    (128, 64, 8, 256, 128, &[1, 8, 1, 8, 1, 128, 8, 600, 1]),
    (513, 512, 8, 64, 64, &[1, 64, 8, 200, 1]),
    (2048, 100, 4, 64, 64, &[1, 16, 64, 0, 300, 1]),
];

/// Runs steps one after the other, exact or fast. Outputs must have the same bits, or agree within rounding, and there
/// must be as many fetches as the rule makes.
fn assert_outputs(rng: &mut Rng, case: Case, scheme: Option<QuantScheme>, exact: bool) {
    let (experts, slots, top_k, hidden, inter, steps) = case;
    let whole = Packs::new(rng, experts, [hidden, inter], scheme).weights;
    let mut ex = cuda().with_batch_invariant(exact);
    let (slotted, held) = ExpertSlots::split([&whole[0], &whole[1]], slots, &ex).unwrap();
    let mut rule = Residency::new(experts, slots).unwrap();
    let mut needed = 0;
    let mut fetched = 0;
    for &tokens in steps {
        let ids = choose(rng, (tokens, top_k), experts, experts / 3);
        let x = rng.floats(DType::BF16, &[tokens, hidden]);
        let topk_weights = rng.floats(DType::F32, &[tokens, top_k]);
        let topk_ids = words(ids.clone(), &[tokens, top_k]);
        let on_device = [x, topk_ids, topk_weights].map(|b| ex.buffer_from_host(b.view()).unwrap());
        let io = on_device.each_ref();
        let want = layer(&whole, None, io, &mut ex);
        let got = layer(&held, Some(&slotted), io, &mut ex);
        let name = format!("{scheme:?}, {experts} experts, {slots} slots, {tokens} tokens, exact {exact}");
        if exact {
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got) == bits(&want), "{name}");
        } else {
            let most = want.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
            let off = want.iter().zip(&got).fold(0f32, |off, (w, g)| off.max((w - g).abs()));
            assert!(off <= 0.02 * most, "{name}: off by {off} of {most}");
        }
        if tokens == 0 {
            continue;
        }
        needed += rule.begin(&ids) as u64;
        let mut map = Vec::new();
        for _ in 0..max_passes(experts, slots, ids.len()) {
            let pass = rule.pass();
            fetched += pass.exchanges.len() as u64;
            map = pass.map;
        }
        let device = ex.to_host(slotted.map()).unwrap();
        let map: Vec<i32> = map.into_iter().map(|slot| slot.map_or(-1, |slot| slot as i32)).collect();
        assert_eq!(device.view().cpu::<i32>().unwrap(), map, "{name}");
        let traffic = slotted.traffic(&ex).unwrap();
        assert_eq!((traffic.needed, traffic.fetched), (needed, fetched), "{name}");
    }
}

#[test]
fn outputs_are_those_of_experts_on_the_device() {
    let mut rng = Rng::new();
    for case in small(CASES, 64, |case| case.0) {
        for exact in [true, false] {
            assert_outputs(&mut rng, case, None, exact);
        }
    }
}

/// Integers, scales and zero points of quantised experts are copied separately.
#[test]
fn outputs_of_quantised_experts_are_those_on_the_device() {
    let mut rng = Rng::new();
    let block = fp8(QuantGroup::Block { n: 128, k: 128 });
    for scheme in [int(4, 128, true, false), int(4, 128, false, false), int(8, 128, true, false), block] {
        let case = (9, 4, 3, 256, 128, &[1, 1, 4, 0, 7, 33, 1, 300, 2][..]);
        assert_outputs(&mut rng, case, Some(scheme), true);
    }
}

#[test]
fn a_measurement_leaves_everything_in_its_place() {
    let mut rng = Rng::new();
    let ex = cuda();
    let whole = Packs::new(&mut rng, 12, [64, 64], None).weights;
    let (mut slots, held) = ExpertSlots::split([&whole[0], &whole[1]], 5, &ex).unwrap();
    let before: Vec<_> = held
        .iter()
        .map(|pack| ex.to_host(pack.read().unwrap().view().unwrap().rows("test").unwrap()).unwrap())
        .collect();
    assert!(slots.measure([&held[0], &held[1]], &ex).unwrap() > 0.0);
    for (pack, before) in held.iter().zip(before) {
        let after = ex.to_host(pack.read().unwrap().view().unwrap().rows("test").unwrap()).unwrap();
        assert_eq!(after.view().to_f32_vec().unwrap(), before.view().to_f32_vec().unwrap());
    }
    assert_eq!(slots.traffic(&ex).unwrap().fetched, 0);
    let refused = |slots| ExpertSlots::split([&whole[0], &whole[1]], slots, &ex).unwrap_err().to_string();
    assert!(refused(0).contains("expected 1 to 12, got 0"), "{}", refused(0));
    assert!(refused(12).contains("expected fewer slots than the 12 experts"), "{}", refused(12));
}

/// Bytes of one expert of each layer of the small model, together.
const ONE_OF_EACH: usize = 3 * 3 * 256 * 128 * 2;

/// The small model of the engine's tests, with `offloaded` of the 16 experts of each layer in host memory.
fn model(offloaded: usize) -> Decoder {
    let config = qwen3_moe::read(&Config::parse(CONFIG, "config.json").unwrap()).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    let vb = DummyWeights::new(layout.tensors, 7).var_builder(DType::BF16, cuda().device());
    let context = BlockContext { batch_invariant: true, ..BlockContext::default() };
    let expert_offload = Some(offloaded * ONE_OF_EACH).filter(|bytes| *bytes > 0);
    let options = LoadOptions { context, expert_offload, ..LoadOptions::default() };
    config.model.load(&options.decoder(MoePath::Fused), vb).unwrap().0
}

fn config(max_num_seqs: usize, max_num_batched_tokens: usize, enforce_eager: bool) -> EngineConfig {
    let kv_cache_memory = Some(64 << 20);
    let device = EngineConfig::for_device(&cuda());
    EngineConfig { max_num_seqs, max_num_batched_tokens, enforce_eager, kv_cache_memory, ..device }
}

/// Steps of few rows are one pass and run as graphs, steps of more rows are several passes and run as graphs, and
/// prompts are several passes.
#[test]
fn tokens_are_those_of_experts_on_the_device() {
    let ex = || cuda().with_batch_invariant(true);
    let all = model(0);
    assert_eq!(all.expert_traffic().unwrap(), None);
    let expected =
        run(&mut Engine::new(&all, ex(), None, &config(24, 4096, false)).unwrap(), requests(24, 24));
    for offloaded in [1, 8, 12] {
        let model = model(offloaded);
        for (seqs, rows, eager) in [(24, 4096, false), (1, 4096, false), (5, 7, false), (24, 4096, true)] {
            let before = model.expert_traffic().unwrap().unwrap();
            assert_eq!((before.num_experts, before.num_slots), (16, 16 - offloaded));
            let mut engine = Engine::new(&model, ex(), None, &config(seqs, rows, eager)).unwrap();
            assert_eq!(run(&mut engine, requests(24, 24)), expected, "{offloaded}: {seqs} {rows} {eager}");
            let graphs = engine.num_graph_steps();
            assert!(if eager { graphs == 0 } else { graphs >= 20 }, "{offloaded}: {graphs} steps by graphs");
            let after = model.expert_traffic().unwrap().unwrap();
            assert!(
                after.fetched > before.fetched
                    && after.needed - before.needed > after.fetched - before.fetched
            );
        }
    }
}

/// As with all experts on the device, a second run finds every buffer that it needs, and no graph is lost.
#[test]
fn steps_that_fetch_allocate_nothing() {
    let model = model(8);
    let ex = cuda();
    let mut engine = Engine::new(&model, ex.clone(), None, &config(16, 4096, false)).unwrap();
    let first = run(&mut engine, requests(16, 40));
    let bytes = ex.workspace().bytes();
    let free = ex.device_memory().unwrap().0;
    let steps = engine.num_graph_steps();
    assert_eq!(run(&mut engine, requests(16, 40)).len(), first.len());
    assert_eq!((ex.workspace().bytes(), ex.device_memory().unwrap().0), (bytes, free));
    assert!(engine.num_graph_steps() >= steps + 38);
}

#[test]
fn what_cannot_live_in_host_memory_is_refused_by_name() {
    let raw = Config::parse(CONFIG, "config.json").unwrap();
    let config = qwen3_moe::read(&raw).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    let load = |dtype, bytes, path, device: &candle_core::Device| {
        let vb = DummyWeights::new(layout.tensors.clone(), 7).var_builder(dtype, device);
        let options = LoadOptions { expert_offload: Some(bytes), ..LoadOptions::default() };
        format!("{:#}", config.model.load(&options.decoder(path), vb).map(drop).unwrap_err())
    };
    let gpu = cuda().device().clone();
    let bf16 = DType::BF16;
    for (dtype, bytes, path, device, said) in [
        (bf16, ONE_OF_EACH - 1, MoePath::Fused, &gpu, "expected at least"),
        (bf16, 13 * ONE_OF_EACH, MoePath::Fused, &gpu, "expected at most"),
        (bf16, ONE_OF_EACH, MoePath::Legacy, &gpu, "drop `moe_path` legacy"),
        (DType::F32, 2 * ONE_OF_EACH, MoePath::Fused, &gpu, "computes in bf16, but the activations are f32"),
        (bf16, ONE_OF_EACH, MoePath::Fused, &candle_core::Device::Cpu, "but this rank computes on the CPU"),
    ] {
        let error = load(dtype, bytes, path, device);
        assert!(error.contains(said), "{error}");
    }
}
