//! Replicas that do not wait for each other: each runs its next step when its own last one has ended. Steps are
//! counted; nothing is timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Result, bail};
use model_runtime::{
    CausalLm, Exec, KvCache, LogitsOut, ModelInfo, Observer, StepContext, StepRanks, StepViews,
};
use moe_comm::ParallelConfig;
use moe_engine::engine::{DpEngine, EngineConfig, FinishReason, Request, RequestError, RequestId};
use moe_engine::parallel::Replica;

use crate::geometries::{Case, Origin};
use crate::running::{Done, Results, collect, kv_blocks, prompt, run};

/// A replica that calls a function before each of its steps, with the number of the step, and counts steps.
pub struct Watched {
    model: Arc<dyn CausalLm>,
    info: ModelInfo,
    before: Box<dyn Fn(usize) -> Result<()> + Send + Sync>,
    steps: Arc<AtomicUsize>,
    rows: AtomicUsize,
}

impl Watched {
    pub fn new(replica: &Replica, before: impl Fn(usize) -> Result<()> + Send + Sync + 'static) -> Self {
        let model = replica.model.clone();
        let before = Box::new(before);
        Self { info: model.info().clone(), model, before, steps: Arc::default(), rows: AtomicUsize::new(0) }
    }

    /// A replica that only counts.
    pub fn counted(replica: &Replica) -> Self {
        Self::new(replica, |_| Ok(()))
    }

    /// Steps that have begun.
    pub fn steps(&self) -> usize {
        self.steps.load(Ordering::SeqCst)
    }

    /// Rows of all steps.
    pub fn rows(&self) -> usize {
        self.rows.load(Ordering::SeqCst)
    }
}

impl CausalLm for Watched {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn ranks(&self) -> Option<&dyn StepRanks> {
        self.model.ranks()
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
        self.rows.fetch_add(step.num_tokens(), Ordering::SeqCst);
        (self.before)(self.steps.fetch_add(1, Ordering::SeqCst))?;
        self.model.forward(step, kv, logits, observer, context, ex)
    }
}

/// How a replica fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Panic,
    Error,
}

impl Fault {
    /// The function that fails in step number `at`.
    pub fn in_step(self, at: usize) -> impl Fn(usize) -> Result<()> + Send + Sync + 'static {
        move |step| match self {
            _ if step != at => Ok(()),
            Fault::Panic => panic!("the disk is on fire"),
            Fault::Error => bail!("the disk is on fire"),
        }
    }
}

pub fn base(parallel: &ParallelConfig) -> Vec<Replica> {
    Origin::open("base").load(&Case::new("base", DType::F32, *parallel)).unwrap()
}

fn two() -> Vec<Replica> {
    base(&ParallelConfig { dp: 2, ..ParallelConfig::default() })
}

/// The engine of watched replicas.
pub fn dp_engine<'m>(
    models: &'m [Arc<Watched>],
    replicas: &[Replica],
    config: &EngineConfig,
) -> DpEngine<'m> {
    let watched = |(model, r): (&Arc<Watched>, &Replica)| Replica { model: model.clone(), ..r.clone() };
    let others = models.iter().zip(replicas).skip(1).map(watched).collect();
    let first = (models[0].as_ref() as &dyn CausalLm, replicas[0].ex.clone(), replicas[0].world.clone());
    DpEngine::new(first, others, None, config).unwrap()
}

/// The results of each request from one engine without parallelism.
fn alone(replicas: &[Replica], requests: &[Request]) -> Vec<Done> {
    run(replicas[0].model.as_ref(), requests, &kv_blocks(replicas[0].model.as_ref(), 64, 16))
}

fn config(replicas: &[Replica], max_num_seqs: usize) -> EngineConfig {
    EngineConfig { max_num_seqs, ..kv_blocks(replicas[0].model.as_ref(), 64, 16) }
}

fn request(seed: u32, len: usize, max_tokens: usize) -> Request {
    let mut request = Request { max_tokens: Some(max_tokens), ..Request::new(prompt(128, len, seed)) };
    (request.sampling.temperature, request.sampling.seed) = (1.0, u64::from(seed));
    request
}

/// Waits until a condition is true; the time limit is far longer than needed.
fn wait_until(done: impl Fn() -> bool) -> Result<()> {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > Duration::from_secs(30) {
            bail!("waited in vain")
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Holds a replica in its first step until `open` is called.
#[derive(Clone, Default)]
struct Gate(Arc<AtomicBool>);

impl Gate {
    fn open(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn before_the_first_step(&self) -> impl Fn(usize) -> Result<()> + Send + Sync + 'static {
        let gate = self.clone();
        move |step| if step == 0 { wait_until(|| gate.0.load(Ordering::SeqCst)) } else { Ok(()) }
    }
}

/// Returns two replicas. The second one waits in its first step until the gate is opened.
fn held_up(replicas: &[Replica]) -> (Gate, [Arc<Watched>; 2]) {
    let gate = Gate::default();
    let second = Watched::new(&replicas[1], gate.before_the_first_step());
    (gate, [Arc::new(Watched::counted(&replicas[0])), Arc::new(second)])
}

fn add_all(engine: &mut DpEngine, requests: &[Request]) -> Vec<RequestId> {
    requests.iter().map(|request| engine.add(request.clone()).unwrap()).collect()
}

/// Runs steps until at least `ended` choices have ended, and returns how many have.
fn step_until(engine: &mut DpEngine, results: &mut Results, ended: usize) -> usize {
    let count = |results: &Results| results.values().filter(|done| done.finish.is_some()).count();
    while count(results) < ended {
        engine.step().unwrap().into_iter().for_each(|output| collect(results, output));
    }
    count(results)
}

fn finish(engine: &mut DpEngine, mut results: Results) -> Vec<Done> {
    engine.run(|output| collect(&mut results, output)).unwrap();
    results.into_values().collect()
}

#[test]
fn the_first_replica_does_not_wait_for_the_second() {
    let replicas = two();
    let (gate, models) = held_up(&replicas);
    let requests = [request(1, 5, 12), request(2, 7, 4)];
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
    let ids = add_all(&mut engine, &requests);
    let mut results = Results::new();
    assert_eq!(step_until(&mut engine, &mut results, 1), 1);
    // The other replica is in its first step, or is about to begin it.
    assert!(results.keys().all(|(id, _)| *id == ids[0]));
    assert!(models[0].steps() == 12 && models[1].steps() <= 1 && !engine.is_idle());
    gate.open();
    assert_eq!(finish(&mut engine, results), alone(&replicas, &requests));
    // Each replica has run its own steps and no others.
    assert_eq!([models[0].steps(), models[1].steps()], [12, 4]);
    assert_eq!([models[0].rows(), models[1].rows()], [5 + 11, 7 + 3]);
    assert!(engine.is_idle() && engine.num_unfinished() == 0 && engine.step().unwrap().is_empty());
}

#[test]
fn the_second_replica_does_not_wait_for_the_first() {
    let replicas = two();
    let second = Arc::new(Watched::counted(&replicas[1]));
    let steps = second.steps.clone();
    // The second replica runs all of its steps while the first one runs a single step.
    let wait = move |step| match step {
        1 => wait_until(|| steps.load(Ordering::SeqCst) >= 9),
        _ => Ok(()),
    };
    let models = [Arc::new(Watched::new(&replicas[0], wait)), second];
    let requests = [request(1, 5, 4), request(2, 7, 9)];
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
    add_all(&mut engine, &requests);
    assert_eq!(finish(&mut engine, Results::new()), alone(&replicas, &requests));
    assert_eq!([models[0].steps(), models[1].steps()], [4, 9]);
}

#[test]
fn what_has_not_started_goes_to_the_replica_with_room() {
    let replicas = two();
    let (gate, models) = held_up(&replicas);
    let requests: Vec<Request> = (0..12).map(|seed| request(seed, 6, 3)).collect();
    // A replica runs one sequence at a time and has another one ready.
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 1));
    add_all(&mut engine, &requests);
    let mut results = Results::new();
    assert_eq!(step_until(&mut engine, &mut results, 10), 10);
    assert_eq!(engine.num_unfinished(), 2);
    gate.open();
    assert_eq!(finish(&mut engine, results), alone(&replicas, &requests));
    assert_eq!([models[0].rows(), models[1].rows()], [10 * 8, 2 * 8]);
    let stats = engine.stats();
    assert_eq!((stats.requests, stats.finished, stats.generated_tokens), (12, 12, 36));
    assert_eq!(stats.rows, 12 * 8);
}

#[test]
fn requests_end_early_wherever_they_are() {
    let replicas = two();
    let (gate, models) = held_up(&replicas);
    let requests: Vec<Request> = (0..6).map(|seed| request(seed, 6, 5)).collect();
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 1));
    let ids = add_all(&mut engine, &requests);
    let mut results = Results::new();
    step_until(&mut engine, &mut results, 1);
    wait_until(|| models[1].steps() == 1).unwrap();
    // Requests 1 and 3 are on the replica that waits at the gate. Request 5 waits for room, and so would the last one.
    for id in [ids[1], ids[5]] {
        engine.cancel(id).unwrap();
        // A second call for the same request does nothing.
        engine.cancel(id).unwrap();
    }
    engine.add(Request { timeout: Some(Duration::ZERO), ..request(6, 6, 5) }).unwrap();
    gate.open();
    let done = finish(&mut engine, results);
    engine.cancel(ids[0]).unwrap();
    assert!(engine.is_idle());
    let mut want = alone(&replicas, &requests);
    want[1] = Done {
        finish: Some(FinishReason::Cancelled),
        tokens: want[1].tokens[..1].to_vec(),
        ..want[1].clone()
    };
    want[5] = Done { finish: Some(FinishReason::Cancelled), tokens: Vec::new(), ..want[5].clone() };
    want.push(Done { finish: Some(FinishReason::TimedOut), ..want[5].clone() });
    assert_eq!(done, want);
}

#[test]
fn counters_are_asked_for_at_any_time_and_nothing_is_lost() {
    let replicas = two();
    let models = [0, 1].map(|rank| Arc::new(Watched::counted(&replicas[rank])));
    let requests: Vec<Request> = (0..9).map(|seed| request(seed, 3 + seed as usize, 6)).collect();
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 2));
    add_all(&mut engine, &requests);
    let mut results = Results::new();
    let mut last = 0;
    while !engine.is_idle() {
        engine.step().unwrap().into_iter().for_each(|output| collect(&mut results, output));
        let stats = engine.stats();
        assert!(stats.generated_tokens >= last && stats.generated_tokens <= 54);
        last = stats.generated_tokens;
    }
    assert_eq!(results.into_values().collect::<Vec<_>>(), alone(&replicas, &requests));
    assert_eq!(engine.stats().finished, 9);
}

#[test]
fn a_replica_that_fails_ends_all_by_its_name() {
    for (rank, fault) in [(0, Fault::Error), (0, Fault::Panic), (1, Fault::Error), (1, Fault::Panic)] {
        let replicas = two();
        let models = [0, 1].map(|r| {
            Arc::new(match r == rank {
                true => Watched::new(&replicas[r], fault.in_step(2)),
                false => Watched::counted(&replicas[r]),
            })
        });
        let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
        add_all(&mut engine, &[0, 1].map(|seed| request(seed, 5, 50)));
        let start = Instant::now();
        let text = format!("{:#}", engine.run(drop).unwrap_err());
        assert!(text.contains("the disk is on fire"), "{rank} {fault:?}: {text}");
        assert!(rank == 0 || text.contains("rank 1"), "{fault:?}: {text}");
        assert_eq!(text.contains("panicked"), fault == Fault::Panic, "{text}");
        // It stays failed, whatever is asked of it.
        engine.add(request(3, 5, 5)).unwrap();
        assert_eq!(format!("{:#}", engine.step().unwrap_err()), text);
        engine.stats();
        drop(engine);
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
}

#[test]
fn an_engine_that_is_dropped_leaves_nothing_running() {
    let replicas = two();
    let models = [0, 1].map(|rank| Arc::new(Watched::counted(&replicas[rank])));
    let requests = [request(1, 5, 60), request(2, 7, 60)];
    for steps in [1, 3] {
        let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
        add_all(&mut engine, &requests);
        (0..steps).for_each(|_| drop(engine.step().unwrap()));
        wait_until(|| models[1].steps() > 0).unwrap();
        drop(engine);
        let after = models[1].steps();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(models[1].steps(), after);
        // The threads have let go of their model.
        assert_eq!(Arc::strong_count(&models[1]), 1);
    }
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
    add_all(&mut engine, &requests);
    assert_eq!(finish(&mut engine, Results::new()), alone(&replicas, &requests));
}

/// One replica with a shorter context, as one would be whose GPU has less memory left.
#[test]
fn no_sequence_gets_longer_than_every_replica_can_hold() {
    let replicas = two();
    let mut models = [0, 1].map(|rank| Watched::counted(&replicas[rank]));
    models[1].info.max_context_len = 20;
    let models = models.map(Arc::new);
    let mut engine = dp_engine(&models, &replicas, &config(&replicas, 8));
    assert_eq!(engine.max_model_len(), 20);
    let refused = engine.add(request(1, 5, 30)).unwrap_err();
    assert!(matches!(refused, RequestError::KvCacheTooSmall { tokens: 35, .. }), "{refused}");
    assert!(matches!(engine.add(request(1, 20, 1)), Err(RequestError::PromptTooLong { .. })));
    for seed in 0..2 {
        engine.add(Request { max_tokens: None, ..request(seed, 5, 1) }).unwrap();
    }
    let done = finish(&mut engine, Results::new());
    assert!(done.iter().all(|done| done.tokens.len() == 15 && done.finish == Some(FinishReason::Length)));
    assert!(models.iter().all(|model| model.steps() == 15));
}
