//! Ranks of one process: what each loads, how work is spread, and what happens when one fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, bail};
use model_qwen3moe::{Qwen3MoeConfig, Qwen3MoeFamily};
use model_runtime::{
    CausalLm, Checkpoint, Exec, KvCache, ModelInfo, Observer, RankView, StepViews, TensorSlice, ViewMut,
};
use moe_comm::{EpBackend, ParallelConfig};
use moe_engine::LoadOptions;
use moe_engine::engine::{DpEngine, EngineConfig, Request};
use moe_engine::parallel::{self, Source};
use moe_layer::ChunkedMoe;
use moe_tests::fixture;

use crate::parallel::load;
use crate::running::prompt;

/// Bytes that all ranks of a geometry read of a fixture.
fn bytes_read(name: &str, parallel: &ParallelConfig) -> u64 {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let config = Qwen3MoeConfig::new(&checkpoint.config).unwrap();
    let source = Source::<Qwen3MoeFamily> {
        config: &config,
        has: &|name| checkpoint.tensors.info(name).is_some(),
        tensors: &|slices: Vec<TensorSlice>| {
            RankView::new(checkpoint.tensors.clone(), slices).var_builder(DType::F32, &Device::Cpu)
        },
        options: &|context| LoadOptions { context, ..LoadOptions::default() },
        chunked_moe: ChunkedMoe::default(),
    };
    parallel::load(&source, parallel, &Exec::cpu().with_threads(1).unwrap()).unwrap();
    checkpoint.tensors.bytes_read()
}

/// Bytes of the tensors of a fixture whose names have one of these parts.
fn bytes_of(name: &str, parts: &[&str]) -> u64 {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let of = |t: &model_runtime::checkpoint::TensorInfo| {
        t.shape.iter().product::<usize>() * t.dtype.unwrap().size_in_bytes()
    };
    let wanted = checkpoint.tensors.iter().filter(|t| parts.iter().any(|part| t.name.contains(part)));
    wanted.map(|t| of(&t) as u64).sum()
}

#[test]
fn a_rank_reads_its_slices_and_what_all_have() {
    let everywhere = ["norm", "gate.weight"];
    for name in ["base", "packed", "tied", "mlp-only-layers"] {
        let all = bytes_of(name, &[""]);
        // Norms and router gates are on every rank; the loader looks at one expert's gate twice.
        let shared = bytes_of(name, &everywhere);
        let probes = |ranks: u64| ranks * 3 * 20 * 40 * 2;
        for (tp, dp, ep) in [(2, 1, false), (2, 1, true), (1, 2, true), (2, 2, true), (1, 2, false)] {
            let parallel = ParallelConfig { tp, dp, enable_expert_parallel: ep, ..ParallelConfig::default() };
            let (ranks, copies) = ((tp * dp) as u64, dp as u64);
            let experts = bytes_of(name, &["mlp.experts"]);
            let want =
                (all - shared - experts) * copies + shared * ranks + experts * if ep { 1 } else { copies };
            let got = bytes_read(name, &parallel);
            assert!(
                got >= want && got <= want + probes(ranks),
                "{name} {parallel:?}: {got}, expected {want}"
            );
        }
    }
}

fn config(info: &ModelInfo, lockstep: bool) -> EngineConfig {
    let kv_cache_memory = Some(info.kv.bytes_per_token().unwrap() * 16 * 64);
    EngineConfig { kv_cache_memory, lockstep, ..EngineConfig::default() }
}

#[test]
fn requests_go_where_the_least_work_is() {
    let parallel = ParallelConfig { dp: 3, ..ParallelConfig::default() };
    let replicas = load("base", DType::F32, &parallel, None).unwrap();
    let models: Vec<Faulty> =
        replicas.iter().map(|r| Faulty::new(r.model.as_ref(), usize::MAX, Fault::Error)).collect();
    let pairs =
        models.iter().zip(&replicas).map(|(m, r)| (m as &dyn CausalLm, r.ex.clone(), r.world.clone()));
    let mut engine = DpEngine::new(pairs, None, &config(replicas[0].model.info(), false)).unwrap();
    // Work of 40 tokens, then eight of 10: the first rank has enough.
    let mut ids = Vec::new();
    for (len, max_tokens) in [(20, 20)].into_iter().chain([(4, 6); 8]) {
        let request = Request { max_tokens: Some(max_tokens), ..Request::new(prompt(128, len, 1)) };
        ids.push(engine.add(request).unwrap());
    }
    assert!(ids.is_sorted());
    let mut ended = Vec::new();
    engine.run(|output| ended.extend(output.finish.map(|_| output.request))).unwrap();
    ended.sort_unstable();
    assert_eq!(ended, ids);
    let rows: Vec<usize> = models.iter().map(|m| m.rows.load(Ordering::SeqCst)).collect();
    // 20 prompt and 19 new rows; 4 of 9 rows each.
    assert_eq!(rows, [39, 36, 36]);
    assert_eq!(engine.stats().requests, 9);
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Panic,
    Error,
}

/// A replica that fails in its step number `at`.
struct Faulty<'m> {
    model: &'m dyn CausalLm,
    at: usize,
    fault: Fault,
    steps: AtomicUsize,
    rows: AtomicUsize,
}

impl<'m> Faulty<'m> {
    fn new(model: &'m dyn CausalLm, at: usize, fault: Fault) -> Self {
        Self { model, at, fault, steps: AtomicUsize::new(0), rows: AtomicUsize::new(0) }
    }
}

impl CausalLm for Faulty<'_> {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: ViewMut,
        observer: Option<&mut dyn Observer>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.rows.fetch_add(step.num_tokens(), Ordering::SeqCst);
        if self.steps.fetch_add(1, Ordering::SeqCst) == self.at {
            match self.fault {
                Fault::Panic => panic!("the disk is on fire"),
                Fault::Error => bail!("the disk is on fire"),
            }
        }
        self.model.forward(step, kv, logits, observer, ex)
    }
}

#[test]
fn a_rank_that_fails_ends_all_soon_and_keeps_what_was_done() {
    let parallel = ParallelConfig {
        tp: 2,
        dp: 2,
        enable_expert_parallel: true,
        backend: EpBackend::DeepEp.into(),
        ..ParallelConfig::default()
    };
    for fault in [Fault::Error, Fault::Panic] {
        let replicas = load("base", DType::F32, &parallel, None).unwrap();
        // Rank 1 has nothing to do, but takes part in every step.
        let models = [
            Faulty::new(replicas[0].model.as_ref(), usize::MAX, fault),
            Faulty::new(replicas[1].model.as_ref(), 2, fault),
        ];
        let pairs =
            models.iter().zip(&replicas).map(|(m, r)| (m as &dyn CausalLm, r.ex.clone(), r.world.clone()));
        let mut engine = DpEngine::new(pairs, None, &config(replicas[0].model.info(), true)).unwrap();
        engine.add(Request { max_tokens: Some(9), ..Request::new(prompt(128, 5, 1)) }).unwrap();
        let (start, mut tokens) = (Instant::now(), 0);
        let error = engine.run(|output| tokens += usize::from(output.token_id.is_some())).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(tokens, 2, "{fault:?}");
        let text = format!("{error:#}");
        let said = text.contains("the disk is on fire") || text.contains("panicked");
        assert!(said, "{fault:?}: {text}");
        // It stays failed.
        assert!(engine.step().is_err());
    }
}
