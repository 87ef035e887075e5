//! Ranks of one process: what each loads, how work is distributed, and what happens when one fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_core::DType;
use model_families::ALL;
use model_runtime::{Checkpoint, DummyWeights, Exec, ModelInfo, RankView};
use moe_comm::{EpBackend, ParallelConfig};
use moe_engine::LoadOptions;
use moe_engine::engine::{EngineConfig, Request};
use moe_engine::parallel::{self, Source};
use moe_layer::{ChunkedMoe, MoePath};
use moe_tests::fixture;

use crate::geometries::{Case, Origin};
use crate::replicas::{Fault, Watched, base, dp_engine};
use crate::running::prompt;

/// Bytes of the tensors of a fixture whose names have one of these parts.
fn bytes_of(name: &str, parts: &[&str]) -> u64 {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let of = |t: &model_runtime::checkpoint::TensorInfo| {
        t.shape.iter().product::<usize>() * t.dtype.unwrap().size_in_bytes()
    };
    let wanted = checkpoint.tensors.iter().filter(|t| parts.iter().any(|part| t.name.contains(part)));
    wanted.map(|t| of(&t) as u64).sum()
}

/// All ranks together read each slice once, but every rank reads the tensors with names like `everywhere`. A rank may
/// read `probe` more bytes, because the loader first looks at one matrix of one expert in each of three layers.
fn check_bytes(name: &'static str, path: MoePath, everywhere: &[&str], probe: u64) {
    let all = bytes_of(name, &[""]);
    let shared = bytes_of(name, everywhere);
    for (tp, dp, ep) in [(2, 1, false), (2, 1, true), (1, 2, true), (2, 2, true), (1, 2, false)] {
        let parallel = ParallelConfig { tp, dp, enable_expert_parallel: ep, ..ParallelConfig::default() };
        let ranks = (tp * dp) as u64;
        let copies = dp as u64;
        let experts = bytes_of(name, &["mlp.experts"]);
        let want = (all - shared - experts) * copies + shared * ranks + experts * if ep { 1 } else { copies };
        let origin = Origin::open(name);
        origin.load(&Case { path: Some(path), ..Case::new(name, DType::F32, parallel) }).unwrap();
        let got = origin.bytes_read();
        assert!(
            got >= want && got <= want + ranks * probe,
            "{name} {path:?} {parallel:?}: {got}, expected {want}"
        );
    }
}

#[test]
fn a_rank_reads_its_slices_and_what_all_have() {
    for name in ["base", "packed", "tied", "mlp-only-layers"] {
        check_bytes(name, MoePath::Fused, &["norm", "gate.weight"], 3 * 20 * 40 * 2);
    }
    // Heads share the latents, so the down-projections are on every rank.
    let everywhere = ["norm", "gate.weight", "kv_a_proj", "q_a_proj"];
    for name in ["deepseek-v2", "deepseek-v2-lite", "deepseek-packed", "deepseek-tied", "deepseek-layer-freq"]
    {
        for path in [MoePath::Legacy, MoePath::Fused] {
            check_bytes(name, path, &everywhere, 3 * 14 * 40 * 2);
        }
    }
}

fn config(info: &ModelInfo, lockstep: bool) -> EngineConfig {
    let kv_cache_memory = Some(info.states.bytes_per_token().unwrap() * 16 * 64);
    EngineConfig { kv_cache_memory, lockstep, ..EngineConfig::default() }
}

#[test]
fn requests_go_where_the_least_work_is() {
    let parallel = ParallelConfig { dp: 3, ..ParallelConfig::default() };
    let replicas = base(&parallel);
    let models: Vec<_> = replicas.iter().map(|r| Arc::new(Watched::counted(r))).collect();
    let mut engine = dp_engine(&models, &replicas, &config(replicas[0].model.info(), false));
    // The work is 40 tokens, then eight requests of 10: the first rank has enough with the first request.
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
    let rows: Vec<usize> = models.iter().map(|m| m.rows()).collect();
    // 20 prompt and 19 new rows; 4 of 9 rows each.
    assert_eq!(rows, [39, 36, 36]);
    assert_eq!(engine.stats().requests, 9);
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
        let replicas = base(&parallel);
        // The second group has no requests, but takes part in every step.
        let models = [Watched::counted(&replicas[0]), Watched::new(&replicas[1], fault.in_step(2))];
        let models = models.map(Arc::new);
        let mut engine = dp_engine(&models, &replicas, &config(replicas[0].model.info(), true));
        engine.add(Request { max_tokens: Some(9), ..Request::new(prompt(128, 5, 1)) }).unwrap();
        let start = Instant::now();
        let mut tokens = 0;
        let error = engine.run(|output| tokens += usize::from(output.token_id.is_some())).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(tokens, 2, "{fault:?}");
        let text = format!("{error:#}");
        let said = text.contains("the disk is on fire") || text.contains("panicked");
        assert!(said, "{fault:?}: {text}");
        // The engine stays failed.
        assert!(engine.step().is_err());
    }
}

/// One rank cannot read its tensors while the others already wait for it in the check of the first layer with shared
/// experts.
#[test]
fn a_rank_that_cannot_load_ends_all_soon() {
    let checkpoint = Checkpoint::open(fixture("deepseek-v2")).unwrap();
    let model = ALL.parse(&checkpoint.config).unwrap();
    let parallel = ParallelConfig { dp: 3, enable_expert_parallel: true, ..ParallelConfig::default() };
    let opened = AtomicUsize::new(0);
    let source = Source {
        model: model.as_ref(),
        has: &|name| checkpoint.tensors.info(name).is_some(),
        tensors: &|slices| match opened.fetch_add(1, Ordering::SeqCst) {
            1 => RankView::new(DummyWeights::new([], 0), slices),
            _ => RankView::new(checkpoint.tensors.clone(), slices),
        },
        dtype: DType::F32,
        options: &|context| LoadOptions { moe_path: Some(MoePath::Fused), context, ..LoadOptions::default() },
        chunked_moe: ChunkedMoe::default(),
    };
    let start = Instant::now();
    let result = parallel::load(&source, &parallel, &Exec::cpu().with_threads(1).unwrap());
    let text = format!("{:#}", result.err().unwrap());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(text.contains("loading rank") && text.contains("model.embed_tokens.weight"), "{text}");
}
