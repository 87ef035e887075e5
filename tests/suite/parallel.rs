//! Numerics invariant 4 on whole models: any tensor, data and expert parallelism, any backend and
//! any chunk size give the bits of one rank.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::sync::{Mutex, OnceLock};

use candle_core::{DType, Device, Result};
use model_qwen3moe::{Qwen3MoeConfig, Qwen3MoeFamily};
use model_runtime::{
    CausalLm, Checkpoint, Exec, KvCache, ModelInfo, Observer, RankView, StepViews, TensorSlice, ViewMut,
};
use moe_comm::{DeepEpMode, EpBackend, ExpertPlacement, ParallelConfig};
use moe_engine::engine::{DpEngine, EngineConfig, Request};
use moe_engine::parallel::{self, Replica, Source};
use moe_engine::{LoadOptions, ModelFamily};
use moe_layer::{ChunkedMoe, Router};
use moe_tests::fixture;

use crate::running::{Done, Results, collect, prompt};

/// Checkpoints with uneven experts, dense layers, biases, packed and tied weights, and the trained one.
const MODELS: [&str; 10] = [
    "f32",
    "base",
    "narrow-experts",
    "mlp-only-layers",
    "packed",
    "tied",
    "top-1",
    "attention-bias",
    "all-experts",
    "embedded",
];

/// A model that notes the logits of every row that it computes: token, position and bits.
struct Tap<'m> {
    model: &'m dyn CausalLm,
    rows: Mutex<Vec<(u32, u32, u64)>>,
}

impl CausalLm for Tap<'_> {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.model.router(moe_layer)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        mut logits: ViewMut,
        observer: Option<&mut dyn Observer>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.model.forward(step, kv, logits.reborrow(), observer, ex)?;
        let (ids, positions) = (step.token_ids.cpu::<u32>()?, step.positions.cpu::<u32>()?);
        let logits = logits.as_view();
        let rows = logits.cpu::<f32>()?.chunks(self.info().vocab_size);
        for (row, logits) in step.logits_rows.cpu::<u32>()?.iter().zip(rows) {
            let mut hash = DefaultHasher::new();
            logits.iter().for_each(|x| x.to_bits().hash(&mut hash));
            let (id, position) = (ids[*row as usize], positions[*row as usize]);
            self.rows.lock().unwrap().push((id, position, hash.finish()));
        }
        Ok(())
    }
}

/// One way to run a model.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    model: &'static str,
    dtype: DType,
    parallel: ParallelConfig,
    chunk: Option<usize>,
}

fn checkpoint(model: &str) -> Checkpoint {
    match Qwen3MoeFamily::embedded().filter(|_| model == "embedded") {
        Some(e) => Checkpoint::from_static(e.weights, e.config, None).unwrap(),
        None => Checkpoint::open(fixture(model)).unwrap(),
    }
}

/// The replicas of a model under a geometry.
pub fn load(
    model: &str,
    dtype: DType,
    parallel: &ParallelConfig,
    chunk: Option<usize>,
) -> anyhow::Result<Vec<Replica>> {
    let checkpoint = checkpoint(model);
    let config = Qwen3MoeConfig::new(&checkpoint.config)?;
    let chunked_moe = match chunk.and_then(NonZeroUsize::new) {
        Some(size) => ChunkedMoe::of_size(size),
        None => ChunkedMoe::default(),
    };
    let source = Source::<Qwen3MoeFamily> {
        config: &config,
        has: &|name| checkpoint.tensors.info(name).is_some(),
        tensors: &|slices: Vec<TensorSlice>| {
            RankView::new(checkpoint.tensors.clone(), slices).var_builder(dtype, &Device::Cpu)
        },
        options: &|context| LoadOptions { context, ..LoadOptions::default() },
        chunked_moe,
    };
    let ex = Exec::cpu().with_threads(1)?;
    parallel::load(&source, parallel, &ex).map(|(replicas, _)| replicas)
}

/// What requests came to, and the logits of all rows in a fixed order.
type Outcome = (Vec<Done>, Vec<(u32, u32, u64)>);

/// Runs a few requests, fewer than some geometries have data-parallel ranks.
pub fn outcome(replicas: &[Replica], lockstep: bool) -> anyhow::Result<Outcome> {
    let taps: Vec<Tap> =
        replicas.iter().map(|r| Tap { model: r.model.as_ref(), rows: Mutex::default() }).collect();
    let info = taps[0].info();
    let config = EngineConfig {
        max_num_batched_tokens: 16,
        block_size: 4,
        kv_cache_memory: Some(info.kv.bytes_per_token()? * 128),
        enable_prefix_caching: false,
        ranks: 1,
        lockstep,
        ..EngineConfig::default()
    };
    let pairs =
        taps.iter().zip(replicas).map(|(tap, r)| (tap as &dyn CausalLm, r.ex.clone(), r.world.clone()));
    let mut engine = DpEngine::new(pairs, None, &config)?;
    for (i, len) in [19, 1].into_iter().enumerate() {
        let mut request = Request::new(prompt(info.vocab_size, len, i as u32 + 1));
        (request.sampling.temperature, request.sampling.seed) = (1.0, i as u64);
        request.max_tokens = Some(3 + i);
        request.sampling.logprobs = Some(2);
        request.prompt_logprobs = Some(1);
        request.capture_routing = true;
        engine.add(request)?;
    }
    let mut results = Results::new();
    engine.run(|output| collect(&mut results, output))?;
    let mut rows: Vec<_> = taps.into_iter().flat_map(|tap| tap.rows.into_inner().unwrap()).collect();
    rows.sort_unstable();
    Ok((results.into_values().collect(), rows))
}

/// Every backend with the geometries that it takes.
fn backends() -> Vec<ParallelConfig> {
    let mut all = Vec::new();
    for tp in [1, 2, 4] {
        for dp in [1, 2, 3] {
            let base = ParallelConfig { tp, dp, ..ParallelConfig::default() };
            all.push(base);
            let ep = ParallelConfig { enable_expert_parallel: true, ..base };
            let with = |backend: EpBackend| ParallelConfig { backend: backend.into(), ..ep };
            if dp == 1 {
                all.push(with(EpBackend::LocalAllreduce));
            }
            all.push(ParallelConfig {
                placement: ExpertPlacement::RoundRobin,
                ..with(EpBackend::AllgatherReducescatter)
            });
            for deepep_mode in DeepEpMode::ALL {
                all.push(ParallelConfig { deepep_mode, ..with(EpBackend::DeepEp) });
            }
        }
    }
    all
}

/// Every geometry, backend and chunk size in both dtypes, each on one of the models in turn.
fn cases(dtype: DType) -> Vec<Case> {
    let all =
        backends().into_iter().flat_map(|p| [None, Some(1), Some(7), Some(256)].map(|chunk| (p, chunk)));
    let turn = usize::from(dtype == DType::BF16);
    let case = |(i, (parallel, chunk))| Case {
        model: MODELS[(i * 3 + i / 4 + turn) % MODELS.len()],
        dtype,
        parallel,
        chunk,
    };
    all.enumerate().map(case).collect()
}

fn one_rank(model: &'static str, dtype: DType) -> Outcome {
    static KNOWN: OnceLock<Mutex<HashMap<(&'static str, bool), Outcome>>> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap();
    let entry = known.entry((model, dtype == DType::F32)).or_insert_with(|| {
        let checkpoint = checkpoint(model);
        let config = Qwen3MoeConfig::new(&checkpoint.config).unwrap();
        let vb = checkpoint.tensors.var_builder(dtype, &Device::Cpu);
        // Without any of the code that parallelism adds.
        let plain = Qwen3MoeFamily::load(&config, &LoadOptions::default(), vb).unwrap();
        let world = std::sync::Arc::new(moe_comm::SelfComm::new());
        outcome(&[Replica { model: plain.model, ex: Exec::cpu().with_threads(1).unwrap(), world }], false)
            .unwrap()
    });
    entry.clone()
}

fn check(dtype: DType) {
    let cases = cases(dtype);
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for case in &cases {
        let want = one_rank(case.model, case.dtype);
        let replicas = load(case.model, case.dtype, &case.parallel, case.chunk).unwrap();
        let lockstep = case.parallel.enable_expert_parallel && case.parallel.dp > 1;
        let got = outcome(&replicas, lockstep).unwrap_or_else(|e| panic!("{case:?}: {e:#}"));
        assert!(got.1 == want.1, "{case:?}: other logits");
        assert!(got.0 == want.0, "{case:?}: other results");
        *seen.entry(case.model).or_default() += 1;
    }
    assert!(cases.len() >= 150 && seen.len() == MODELS.len(), "{} cases, {seen:?}", cases.len());
}

#[test]
fn any_geometry_backend_and_chunk_gives_the_bits_of_one_rank_in_f32() {
    check(DType::F32);
}

#[test]
fn any_geometry_backend_and_chunk_gives_the_bits_of_one_rank_in_bf16() {
    check(DType::BF16);
}

#[test]
fn the_comparison_can_fail() {
    let (a, b) = (one_rank("f32", DType::F32), one_rank("base", DType::F32));
    assert!(a.0 != b.0 && a.1 != b.1);
    assert_eq!(a.1.len(), 19 + 1 + 2 + 3);
    assert!(a.0.iter().all(|d| d.routed.is_some() && !d.logprobs.is_empty() && d.prompt_logprobs.is_some()));
}
