//! Steps whose routing is watched or forced run as graphs, with the tokens of steps without watching.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use model_families::qwen3_moe;
use model_runtime::{
    CausalLm, Config, Decoder, DummyWeights, Exec, Geometry, LogitsRows, RoutedExperts, SequenceStep, Step,
    StepContext, run_step,
};
use moe_comm::{Communicator, SelfComm};
use moe_engine::engine::{DpEngine, Engine, EngineConfig, Request, Stats};
use moe_engine::{LoadOptions, ModelSpec};
use moe_layer::{ExpertHeat, MoePath};

use crate::common::{Rng, cuda};
use crate::engine::{CONFIG, config, requests};

const LAYERS: usize = 3;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;

fn model_on(device: &Device, text: &str) -> Decoder {
    let config = qwen3_moe::read(&Config::parse(text, "config.json").unwrap()).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    let vb = DummyWeights::new(layout.tensors, 7).var_builder(DType::BF16, device);
    config.model.load(&LoadOptions::default().decoder(MoePath::Fused), vb).unwrap().0
}

/// The results of a run.
struct Run {
    tokens: Vec<Vec<u32>>,
    routed: Vec<Option<RoutedExperts>>,
    graph_steps: u64,
    stats: Stats,
}

fn run(model: &Decoder, config: &EngineConfig, all: Vec<Request>) -> Run {
    let mut engine = Engine::new(model, cuda(), None, config).unwrap();
    let mut tokens = BTreeMap::<_, Vec<u32>>::new();
    let mut routed = BTreeMap::new();
    all.into_iter().map(|request| engine.add(request)).collect::<Result<Vec<_>, _>>().unwrap();
    let collect = |output: moe_engine::engine::Output| {
        tokens.entry(output.request).or_default().extend(output.token_id);
        if output.finish.is_some() {
            routed.insert(output.request, output.routed_experts);
        }
    };
    engine.run(collect).unwrap();
    let graph_steps = engine.num_graph_steps();
    let stats = engine.stats();
    Run { tokens: tokens.into_values().collect(), routed: routed.into_values().collect(), graph_steps, stats }
}

/// How often each expert occurs in recordings, by MoE layer.
fn counted<'a>(routed: impl Iterator<Item = &'a RoutedExperts>) -> Vec<Vec<u64>> {
    let mut heat = ExpertHeat::new(LAYERS, EXPERTS);
    for routed in routed {
        for (token, layer) in (0..routed.tokens()).flat_map(|t| (0..LAYERS).map(move |layer| (t, layer))) {
            heat.record(layer, routed.get(token, layer).unwrap());
        }
    }
    (0..LAYERS).map(|layer| heat.layer(layer).to_vec()).collect()
}

/// Batches for every kind of launch: one launch, streamed, warpgroup products; also prompts with more rows than the
/// router's single launch takes.
#[test]
fn recording_and_counting_change_nothing() {
    let model = model_on(cuda().device(), CONFIG);
    for (batch, prompt) in [(1, 3), (2, 3), (4, 3), (7, 3), (16, 3), (40, 3), (70, 5), (3, 400)] {
        let all = |capture| {
            let long = |(i, mut request): (usize, Request)| {
                request.prompt = (0..prompt + i % 3).map(|j| (i * 31 + j * 7) as u32 % 1000).collect();
                request.capture_routing = capture;
                request
            };
            requests(batch, 20).into_iter().enumerate().map(long).collect::<Vec<_>>()
        };
        let plain = run(&model, &config(batch, false), all(false));
        let counting = EngineConfig { count_experts: true, ..config(batch, false) };
        let watched = run(&model, &counting, all(true));
        assert_eq!(watched.tokens, plain.tokens, "batch {batch}");
        assert_eq!(watched.graph_steps, plain.graph_steps, "batch {batch}");
        assert!(plain.graph_steps >= 16 && plain.stats.expert_load.is_empty());
        let routed: Vec<_> = watched.routed.iter().flatten().collect();
        assert_eq!(routed.len(), batch);
        for (i, routed) in routed.iter().enumerate() {
            assert_eq!(
                (routed.tokens(), routed.layers(), routed.top_k()),
                (prompt + i % 3 + 19, LAYERS, TOP_K)
            );
            routed.check(routed.tokens(), LAYERS, TOP_K, EXPERTS).unwrap();
        }
        assert_eq!(watched.stats.expert_load, counted(routed.iter().copied()), "batch {batch}");
        for counts in &watched.stats.expert_load {
            assert_eq!(
                counts.iter().sum::<u64>(),
                watched.stats.rows * TOP_K as u64,
                "padding is not counted"
            );
        }
    }
}

/// A replay returns the experts that it was given and gives their tokens; other requests in the same batch route
/// freely.
#[test]
fn a_replay_runs_as_graphs() {
    let model = model_on(cuda().device(), CONFIG);
    let mut rng = Rng::new();
    let mut replayed = 0;
    let mut unmoved = 0;
    for batch in [1, 3, 8, 40] {
        let config = config(batch, false);
        let mut recording = requests(batch, 16);
        recording.iter_mut().for_each(|request| request.capture_routing = true);
        let recorded = run(&model, &config, recording.clone());
        let replaying = |routed: &[RoutedExperts]| {
            let forced = recording.iter().zip(routed).enumerate().map(|(i, (request, routed))| {
                let replay_routing = (i % 4 != 2).then(|| Arc::new(routed.clone()));
                Request { replay_routing, ..request.clone() }
            });
            run(&model, &config, forced.collect())
        };
        let own: Vec<_> = recorded.routed.iter().flatten().cloned().collect();
        let again = replaying(&own);
        assert_eq!(again.tokens, recorded.tokens, "batch {batch}");
        assert_eq!(again.routed, recorded.routed, "batch {batch}");
        assert_eq!(again.graph_steps, recorded.graph_steps, "batch {batch}");
        let random = own.iter().map(|routed| {
            let rows = (0..routed.tokens() * LAYERS)
                .flat_map(|_| rng.permutation(EXPERTS).into_iter().take(TOP_K).collect::<Vec<_>>());
            RoutedExperts::from_ids(routed.tokens(), LAYERS, TOP_K, rows.collect()).unwrap()
        });
        let random: Vec<_> = random.collect();
        let other = replaying(&random);
        for (i, (got, want)) in other.routed.iter().zip(&random).enumerate().filter(|(i, _)| i % 4 != 2) {
            assert_eq!(got.as_ref().unwrap(), want, "batch {batch}, request {i}");
            replayed += 1;
            unmoved += usize::from(other.tokens[i] == recorded.tokens[i]);
        }
        assert_eq!(other.graph_steps, recorded.graph_steps);
    }
    // Other experts give another text, but one text in 200 is the same by chance (20 of 4,000 on the CPU).
    assert!(10 * unmoved <= replayed, "{unmoved} of {replayed} texts are those of other experts");
}

/// Every expert gets its share, in graphs, and the ids equal the CPU's even spread for the same rows and step.
#[test]
fn an_even_spread_runs_as_graphs() {
    let model = model_on(cuda().device(), CONFIG);
    for batch in [1, 4, 16, 64] {
        let config = EngineConfig { force_balance: Some(3), count_experts: true, ..config(batch, false) };
        let spread = run(&model, &config, requests(batch, 40));
        assert!(spread.graph_steps >= 36, "batch {batch}: {}", spread.graph_steps);
        let worst = spread.stats.hottest_expert_over_mean().into_iter().fold(0., f64::max);
        let chosen = (spread.stats.rows as usize * TOP_K / EXPERTS) as f64;
        assert!(worst < 1. + 5. / chosen.sqrt(), "batch {batch}: {worst}");
    }
    // The same step also runs on the CPU.
    let ids = |model: &Decoder, mut ex: Exec| {
        let tokens: Vec<u32> = (0..9).collect();
        let mut kv = model_runtime::KvCache::new_on(ex.device(), &model.info().states, 2, 16).unwrap();
        let mut context = StepContext {
            force_balance: Some(9),
            step: 5,
            capture: Some(RoutedExperts::empty(9, LAYERS, TOP_K).unwrap()),
            heat: Some(ExpertHeat::new(LAYERS, EXPERTS)),
            ..StepContext::default()
        };
        run_step(model, &one(&tokens), &mut kv, None, &mut context, &mut ex).unwrap();
        (context.capture.unwrap(), context.heat.unwrap())
    };
    assert_eq!(ids(&model, cuda()), ids(&model_on(&Device::Cpu, CONFIG), Exec::cpu()));
}

/// A step of one prompt.
fn one(tokens: &[u32]) -> Step {
    let sequence = SequenceStep {
        token_ids: tokens,
        start: 0,
        prompt_len: tokens.len(),
        blocks: &[0, 1],
        logits: LogitsRows::All,
        scored: &[],
    };
    Step::new([sequence], 16).unwrap()
}

/// The counts match the choices. If routing is forced, choices and counts are the CPU's. Free choices are not compared,
/// because random weights are made on the device and differ.
#[test]
fn choices_and_counts_are_those_of_the_cpu() {
    let gpu = model_on(cuda().device(), CONFIG);
    let cpu = model_on(&Device::Cpu, CONFIG);
    let mut rng = Rng::new();
    for rows in [1, 4, 8, 31] {
        let tokens: Vec<u32> = (0..rows).map(|_| rng.below(1000) as u32).collect();
        let seen = |model: &Decoder, mut ex: Exec, replay: Option<Arc<RoutedExperts>>| {
            let mut kv = model_runtime::KvCache::new_on(ex.device(), &model.info().states, 2, 16).unwrap();
            let mut context = StepContext {
                replay,
                capture: Some(RoutedExperts::empty(rows, LAYERS, TOP_K).unwrap()),
                heat: Some(ExpertHeat::new(LAYERS, EXPERTS)),
                ..StepContext::default()
            };
            run_step(model, &one(&tokens), &mut kv, None, &mut context, &mut ex).unwrap();
            (context.capture.unwrap(), context.heat.unwrap())
        };
        let (ours, our_heat) = seen(&gpu, cuda(), None);
        let (theirs, _) = seen(&cpu, Exec::cpu(), None);
        let counts = counted([&ours].into_iter());
        assert!((0..LAYERS).all(|layer| our_heat.layer(layer) == counts[layer]));
        let forced = Some(Arc::new(theirs));
        assert_eq!(seen(&gpu, cuda(), forced.clone()), seen(&cpu, Exec::cpu(), forced));
    }
}

/// The settings for recording and forcing are still in the context after an error.
#[test]
fn a_step_that_is_refused_leaves_its_context() {
    let model = model_on(cuda().device(), CONFIG);
    let mut ex = cuda();
    let mut kv = model_runtime::KvCache::new_on(ex.device(), &model.info().states, 2, 16).unwrap();
    let asked = StepContext {
        // This is a recording of another step.
        replay: Some(Arc::new(RoutedExperts::empty(2, LAYERS, TOP_K).unwrap())),
        capture: Some(RoutedExperts::empty(3, LAYERS, TOP_K).unwrap()),
        heat: Some(ExpertHeat::new(LAYERS, EXPERTS)),
        ..StepContext::default()
    };
    let mut context = asked.clone();
    let refused = run_step(&model, &one(&[1, 2, 3]), &mut kv, None, &mut context, &mut ex);
    assert!(refused.err().unwrap().to_string().contains("replayed routing: expected [3, "));
    assert_eq!(context.replay, asked.replay);
    assert_eq!((context.capture, context.heat), (asked.capture, asked.heat));
}

/// Measures a table of the costs of steps that are counted, traced, recorded or forced: Qwen3-30B-A3B's sizes, random
/// weights. `CONFIG` is its config.json; the weights take 61 GB.
#[test]
#[ignore = "measures"]
fn measure_watched_steps() {
    let text = std::fs::read_to_string(std::env::var("CONFIG").unwrap()).unwrap();
    let model = model_on(cuda().device(), &text);
    let moe = model.info().moe.clone().unwrap();
    let trace = std::env::temp_dir().join("watched-heat.jsonl");
    let names = ["plain", "counted", "traced", "recorded", "replayed", "spread"];
    println!("us per decode step{}", names.map(|name| format!("{name:>11}")).concat());
    for batch in [1, 64, 256] {
        let timed = |name: &str, recorded: &[RoutedExperts]| {
            let config = EngineConfig {
                max_num_seqs: batch,
                max_model_len: Some(256),
                count_experts: name == "counted",
                expert_heat: (name == "traced").then(|| trace.clone()),
                force_balance: (name == "spread").then_some(1),
                kv_cache_memory: Some(batch * 256 * model.info().states.bytes_per_token().unwrap()),
                ..EngineConfig::for_device(&cuda())
            };
            let mut all = requests(batch, 160);
            for (i, request) in all.iter_mut().enumerate() {
                request.capture_routing = matches!(name, "recorded" | "replayed");
                request.replay_routing =
                    recorded.get(i).filter(|_| name == "replayed").cloned().map(Arc::new);
            }
            time_steps(&model, &config, all)
        };
        let (_, recorded) = timed("recorded", &[]);
        let mut times = [f64::MAX; 6];
        for _ in 0..2 {
            for (name, best) in names.iter().zip(&mut times) {
                *best = best.min(timed(name, &recorded).0.as_secs_f64() * 1e6);
            }
        }
        println!("{batch:<18}{}", times.map(|us| format!("{us:11.1}")).concat());
        println!("{:18}{}", "", times.map(|us| format!("{:+10.2}%", 100. * (us / times[0] - 1.))).concat());
    }
    println!("{} layers, {} experts", moe.layers.len(), moe.num_experts);
    let _ = std::fs::remove_file(trace);
}

/// The median of the times of 100 steps, measured five at a time, once all sequences decode; and the recordings.
fn time_steps(model: &Decoder, config: &EngineConfig, all: Vec<Request>) -> (Duration, Vec<RoutedExperts>) {
    let world: Arc<dyn Communicator> = Arc::new(SelfComm::new());
    let replica = (model as &dyn CausalLm, cuda(), world);
    let mut engine = DpEngine::new(replica, Vec::new(), None, config).unwrap();
    all.into_iter().map(|request| engine.add(request)).collect::<Result<Vec<_>, _>>().unwrap();
    for _ in 0..30 {
        engine.step().unwrap();
    }
    let mut times: Vec<Duration> = (0..20)
        .map(|_| {
            let start = Instant::now();
            (0..5).for_each(|_| drop(engine.step().unwrap()));
            start.elapsed() / 5
        })
        .collect();
    times.sort();
    let mut routed = BTreeMap::new();
    engine.run(|output| routed.extend(output.routed_experts.map(|ids| (output.request, ids)))).unwrap();
    (times[times.len() / 2], routed.into_values().collect())
}
