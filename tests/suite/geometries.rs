//! Running a model of any family under a geometry, and comparing it with one rank.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{DType, Device, Result};
use model_families::{ALL, EMBEDDED};
use model_runtime::{
    BlockContext, CausalLm, Checkpoint, Config, DummyWeights, Exec, Geometry, KvCache, LogitsOut, MlaForm,
    ModelInfo, Observer, ParallelGroups, RankView, Scorer, StepContext, StepRanks, StepViews, TensorSlice,
    TensorSpec, View,
};
use moe_comm::{Communicator, DeepEpMode, EpBackend, ExpertPlacement, ParallelConfig, SelfComm, ThreadComm};
use moe_engine::engine::{DpEngine, EngineConfig, Request};
use moe_engine::eplb::EplbConfig;
use moe_engine::parallel::{self, Replica, Source};
use moe_engine::{AttentionSpec, LoadOptions, ModelSpec};
use moe_layer::{ChunkedMoe, ExpertPlacements, MoePath, PlacedExperts, Router};
use moe_tests::fixture;

use crate::running::{Done, Results, collect, prompt};

/// One way to run a model.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// A fixture, the path of a checkpoint, `embedded`, or the text of a config for random weights.
    pub model: &'static str,
    pub dtype: DType,
    pub parallel: ParallelConfig,
    pub chunk: Option<usize>,
    pub path: Option<MoePath>,
    pub mla: Option<MlaForm>,
    pub backend: Option<&'static str>,
}

impl Case {
    pub fn new(model: &'static str, dtype: DType, parallel: ParallelConfig) -> Self {
        Self { model, dtype, parallel, chunk: None, path: None, mla: None, backend: None }
    }

    fn chunked_moe(&self) -> ChunkedMoe {
        self.chunk.and_then(NonZeroUsize::new).map(ChunkedMoe::of_size).unwrap_or_default()
    }

    fn options(&self, context: BlockContext) -> LoadOptions {
        LoadOptions {
            backend: self.backend.map(str::to_string),
            moe_path: self.path,
            mla: self.mla,
            context,
            ..LoadOptions::default()
        }
    }
}

/// The source of a model's tensors.
enum Weights {
    Stored(Box<Checkpoint>, Vec<TensorSpec>),
    Random(Vec<TensorSpec>),
}

/// A model to load.
pub struct Origin {
    model: Box<dyn ModelSpec>,
    weights: Weights,
}

impl Origin {
    pub fn open(model: &str) -> Self {
        if model.starts_with('{') {
            let model = ALL.parse(&Config::parse(model, "config.json").unwrap()).unwrap();
            let tensors = model.layout(&Geometry::default(), &|_| true).unwrap().tensors;
            return Self { model, weights: Weights::Random(tensors) };
        }
        Self::of(match model {
            "embedded" => Checkpoint::from_static(EMBEDDED.weights, EMBEDDED.config, None).unwrap(),
            name => Checkpoint::open(fixture(name)).unwrap(),
        })
    }

    /// The model of a checkpoint.
    pub fn of(checkpoint: Checkpoint) -> Self {
        let model = ALL.parse(&checkpoint.config).unwrap();
        let expected = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap().tensors;
        checkpoint.verify(&expected, model.ignored()).unwrap();
        Self { model, weights: Weights::Stored(Box::new(checkpoint), expected) }
    }

    fn has(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Stored(checkpoint, _) => checkpoint.has(name),
            Weights::Random(specs) => specs.iter().any(|spec| spec.name == name),
        }
    }

    fn view(&self, slices: Vec<TensorSlice>) -> RankView {
        match &self.weights {
            Weights::Stored(checkpoint, expected) => checkpoint.rank_view(expected, slices),
            Weights::Random(specs) => RankView::new(DummyWeights::new(specs.clone(), 5), slices),
        }
    }

    /// Whether a geometry can cut the model.
    pub fn fits(&self, parallel: &ParallelConfig) -> bool {
        self.model.layout(&parallel.geometry(0).unwrap(), &|name| self.has(name)).is_ok()
    }

    /// The replicas of a case of this model.
    pub fn load(&self, case: &Case) -> anyhow::Result<Vec<Replica>> {
        self.load_placed(case, &ExpertPlacements::default())
    }

    /// The same as [`load`](Self::load), with experts in other places.
    pub fn load_placed(&self, case: &Case, placements: &ExpertPlacements) -> anyhow::Result<Vec<Replica>> {
        let world = ThreadComm::world(case.parallel.world_size()?);
        self.load_over(case, placements, world.into_iter().map(|comm| Arc::new(comm) as _).collect())
    }

    /// Like [`load_placed`](Self::load_placed), over an existing world.
    pub fn load_over(
        &self,
        case: &Case,
        placements: &ExpertPlacements,
        world: Vec<Arc<dyn Communicator>>,
    ) -> anyhow::Result<Vec<Replica>> {
        let source = Source {
            model: self.model.as_ref(),
            has: &|name| self.has(name),
            tensors: &|slices| self.view(slices),
            dtype: case.dtype,
            options: &|context| case.options(BlockContext { placements: placements.clone(), ..context }),
            chunked_moe: case.chunked_moe(),
        };
        let ex = Exec::cpu().with_threads(1)?;
        let (replicas, _) = parallel::load_over(&source, &case.parallel, world, &ex)?;
        Ok(replicas)
    }

    /// One rank's part of a case. It is not a replica: steps run on it without other ranks.
    pub fn load_rank(
        &self,
        case: &Case,
        comm: Arc<dyn Communicator>,
        ex: &Exec,
    ) -> anyhow::Result<Box<dyn CausalLm>> {
        let geometry = case.parallel.geometry(comm.rank())?;
        let layout = self.model.layout(&geometry, &|name| self.has(name))?;
        let view = self.view(layout.slices_for(ex.device()));
        let context = BlockContext {
            quant: Some(Arc::new(view.clone())),
            groups: ParallelGroups::new(&geometry, comm, &mut Exec::cpu())?,
            geometry,
            chunked_moe: case.chunked_moe(),
            sliced_weights: true,
            cpu_isa: ex.device().is_cpu().then(|| ex.isa()),
            ..BlockContext::default()
        };
        let loaded = self.model.load(&case.options(context), view.var_builder(case.dtype, ex.device()))?;
        Ok(loaded.model)
    }

    /// Bytes read of the checkpoint so far.
    pub fn bytes_read(&self) -> u64 {
        match &self.weights {
            Weights::Stored(checkpoint, _) => checkpoint.tensors.bytes_read(),
            Weights::Random(_) => 0,
        }
    }
}

/// A model that records the logits of every row that is sampled or scored: token, position and bits.
struct Tap {
    model: Arc<dyn CausalLm>,
    rows: Mutex<Vec<(u32, u32, u64)>>,
}

impl Tap {
    /// Notes the logits of `rows` of a step.
    fn note(&self, step: &StepViews, rows: &[u32], logits: View) -> Result<()> {
        let ids = step.token_ids.cpu::<u32>()?;
        let positions = step.positions.cpu::<u32>()?;
        let logits = logits.cpu::<f32>()?.chunks(self.info().vocab_size);
        for (&row, logits) in rows.iter().zip(logits) {
            let mut hash = DefaultHasher::new();
            logits.iter().for_each(|x| x.to_bits().hash(&mut hash));
            let id = ids[row as usize];
            let position = positions[row as usize];
            self.rows.lock().unwrap().push((id, position, hash.finish()));
        }
        Ok(())
    }
}

/// Notes the logits of scored rows on their way to the scorer.
struct TapScorer<'a> {
    tap: &'a Tap,
    step: &'a StepViews<'a>,
    scorer: Option<&'a mut dyn Scorer>,
}

impl Scorer for TapScorer<'_> {
    fn score(&mut self, first: usize, logits: View, ex: &mut Exec) -> Result<()> {
        self.tap.note(self.step, &self.step.scored_rows.cpu::<u32>()?[first..], logits)?;
        self.scorer.as_mut().map_or(Ok(()), |scorer| scorer.score(first, logits, ex))
    }
}

impl CausalLm for Tap {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn ranks(&self) -> Option<&dyn StepRanks> {
        self.model.ranks()
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.model.router(moe_layer)
    }

    fn placed_experts(&self, moe_layer: usize) -> Option<&PlacedExperts> {
        self.model.placed_experts(moe_layer)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let LogitsOut { mut rows, scorer } = logits;
        let scorer = scorer.map(|scorer| scorer as &mut dyn Scorer);
        let mut scorer = TapScorer { tap: self, step, scorer };
        let out = LogitsOut { rows: rows.reborrow(), scorer: Some(&mut scorer) };
        self.model.forward(step, kv, out, observer, context, ex)?;
        self.note(step, step.logits_rows.cpu::<u32>()?, rows.as_view())
    }
}

/// The results of requests, and the logits of all rows in a fixed order.
pub type Outcome = (Vec<Done>, Vec<(u32, u32, u64)>);

/// Runs a few requests; some geometries have more data-parallel ranks than requests.
pub fn outcome(replicas: &[Replica], lockstep: bool) -> anyhow::Result<Outcome> {
    outcome_with(replicas, lockstep, None, |_| Ok(()))
}

/// Like [`outcome`], with a balancer of experts; `between` gets the engine before each step.
pub fn outcome_with(
    replicas: &[Replica],
    lockstep: bool,
    eplb: Option<EplbConfig>,
    mut between: impl FnMut(&mut DpEngine<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let tap = |r: &Replica| Arc::new(Tap { model: r.model.clone(), rows: Mutex::default() });
    let taps: Vec<Arc<Tap>> = replicas.iter().map(tap).collect();
    let info = taps[0].info();
    let config = EngineConfig {
        max_num_batched_tokens: 16,
        block_size: 4,
        kv_cache_memory: Some(info.states.bytes_per_token()? * 128),
        enable_prefix_caching: false,
        ranks: 1,
        lockstep,
        eplb,
        ..EngineConfig::default()
    };
    let tapped = |(tap, r): (&Arc<Tap>, &Replica)| Replica { model: tap.clone(), ..r.clone() };
    let others = taps.iter().zip(replicas).skip(1).map(tapped).collect();
    let first = (taps[0].as_ref() as &dyn CausalLm, replicas[0].ex.clone(), replicas[0].world.clone());
    let mut engine = DpEngine::new(first, others, None, &config)?;
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
    while !engine.is_idle() {
        between(&mut engine)?;
        engine.step()?.into_iter().for_each(|output| collect(&mut results, output));
    }
    drop(engine);
    let mut rows: Vec<_> = taps.iter().flat_map(|tap| tap.rows.lock().unwrap().clone()).collect();
    rows.sort_unstable();
    Ok((results.into_values().collect(), rows))
}

/// Every backend with the geometries that it supports.
pub fn backends() -> Vec<ParallelConfig> {
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

/// The outcome of one rank without any code of parallelism. If the family has it, it runs the loop over experts, which
/// has no dispatch either. Quantised weights run on the path of the case: in bf16 the two paths multiply them in
/// different forms.
pub fn one_rank(case: &Case) -> Outcome {
    type Key = (&'static str, bool, bool, bool);
    static KNOWN: OnceLock<Mutex<HashMap<Key, Outcome>>> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap();
    let origin = Origin::open(case.model);
    let has_loop = matches!(origin.model.attention(), AttentionSpec::Latent(_));
    let is_quantised = case.model.contains("quant");
    let path = if has_loop && !is_quantised { Some(MoePath::Legacy) } else { case.path };
    let key = (
        case.model,
        case.dtype == DType::F32,
        case.mla == Some(MlaForm::Naive),
        path == Some(MoePath::Legacy),
    );
    let entry = known.entry(key).or_insert_with(|| {
        let view = origin.view(Vec::new());
        let context = BlockContext { quant: Some(Arc::new(view.clone())), ..BlockContext::default() };
        let options = Case { path, backend: None, ..*case }.options(context);
        let plain = origin.model.load(&options, view.var_builder(case.dtype, &Device::Cpu)).unwrap();
        let world = Arc::new(SelfComm::new());
        outcome(
            &[Replica { model: Arc::from(plain.model), ex: Exec::cpu().with_threads(1).unwrap(), world }],
            false,
        )
        .unwrap()
    });
    entry.clone()
}

/// One of this number of cases is run. Unoptimised builds leave out two of three: the CUDA build of `.ci/run` is one,
/// and the optimised build before it runs all cases.
pub const STRIDE: usize = if cfg!(debug_assertions) { 3 } else { 1 };

/// Runs all cases, or one of each [`STRIDE`] and at least one of each model; returns how often each model was run.
pub fn check(cases: &[Case]) -> BTreeMap<&'static str, usize> {
    let mut seen = BTreeMap::new();
    for (number, case) in cases.iter().enumerate() {
        if !number.is_multiple_of(STRIDE) && seen.contains_key(case.model) {
            continue;
        }
        let want = one_rank(case);
        let replicas = Origin::open(case.model).load(case).unwrap_or_else(|e| panic!("{case:?}: {e:#}"));
        let lockstep = case.parallel.enable_expert_parallel && case.parallel.dp > 1;
        let got = outcome(&replicas, lockstep).unwrap_or_else(|e| panic!("{case:?}: {e:#}"));
        assert!(got.1 == want.1, "{case:?}: other logits");
        assert!(got.0 == want.0, "{case:?}: other results");
        *seen.entry(case.model).or_default() += 1;
    }
    seen
}
