//! Wrong inputs of every kind: each call returns an error that names the setting, and none panics or runs for long.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device};
use moe_engine::chat::{ChatFiles, ChatRequest, ChatTemplate};
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Output, Request};
use moe_engine::eplb::EplbConfig;
use moe_engine::heat::HeatWriter;
use moe_engine::model_runtime::decoder::{Decoder, DecoderConfig, DecoderModel, DecoderOptions, MoeConfig};
use moe_engine::model_runtime::{
    AttentionConfig, Config, DummyWeights, Exec, Geometry, ParallelConfig, RopeConfig, RoutedExperts,
    SamplingParams, TensorNames,
};
use moe_engine::structured::StructuredOutput;
use moe_engine::tokenizer::{TextStream, Tokenizer};
use moe_engine::{Families, PlacementConfig, Run, RunConfig, Weights};
use moe_layer::{Activation, BlockContext, ChunkedMoe, MoePath, RouterConfig};

const VOCAB: usize = 300;
const CONTEXT: usize = 64;

fn model() -> Decoder {
    let rope = RopeConfig::from_config(&Config::parse("{}", "config.json").unwrap(), 8, CONTEXT).unwrap();
    let decoder = DecoderConfig {
        names: TensorNames::USUAL,
        vocab_size: VOCAB,
        hidden_size: 16,
        intermediate_size: 32,
        activation: Activation::SwiGlu,
        rms_norm_eps: 1e-6,
        zero_centred_norms: false,
        tie_word_embeddings: false,
        rope: vec![rope; 2],
        moe: Some(MoeConfig::new(RouterConfig::new(4, 2), 8)),
        is_sparse: vec![false, true],
    };
    let model = DecoderModel::alike(decoder, AttentionConfig::new(16, 2, 1, 8));
    let tensors = model.layout(&Geometry::default(), &|_| false).unwrap().tensors;
    let weights = DummyWeights::new(tensors, 0).var_builder(DType::F32, &Device::Cpu);
    let context = BlockContext::default();
    let options =
        DecoderOptions { path: MoePath::Fused, backend: None, context: &context, expert_offload: None };
    model.load(&options, weights).unwrap().0
}

fn said<T>(result: Result<T, impl Display>) -> String {
    result.err().map_or("no error".to_string(), |e| format!("{e:#}"))
}

/// Fails unless each message has its part; lists all that do not.
#[track_caller]
fn expect<A: Display, B: Display>(cases: impl IntoIterator<Item = (A, B)>) {
    let wrong = |(got, part): (A, B)| {
        let got = got.to_string();
        let part = part.to_string();
        (!got.contains(&part)).then(|| format!("expected {part:?} in {got:?}"))
    };
    let wrong: Vec<String> = cases.into_iter().filter_map(wrong).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn settings_of_an_engine() {
    let model = model();
    let made = |config: EngineConfig| said(Engine::new(&model, Exec::cpu(), None, &config));
    let set = |change: fn(&mut EngineConfig)| {
        let mut config = EngineConfig::default();
        change(&mut config);
        made(config)
    };
    expect([
        (set(|c| c.max_num_seqs = 0), "`max_num_seqs` must be from 1 to 65535, got 0"),
        (set(|c| c.max_num_seqs = usize::MAX), "`max_num_seqs` must be from 1 to 65535"),
        (set(|c| c.max_num_batched_tokens = 0), "`max_num_batched_tokens` must be from 1 to 16777216, got 0"),
        (set(|c| c.max_num_batched_tokens = usize::MAX), "`max_num_batched_tokens` must be from 1"),
        (set(|c| c.block_size = 0), "`block_size` must be from 1 to 65536, got 0"),
        (set(|c| c.block_size = usize::MAX), "`block_size` must be from 1 to 65536"),
        (set(|c| c.max_model_len = Some(0)), "`max_model_len` 0: expected at least 1"),
        (set(|c| c.max_model_len = Some(65)), "`max_model_len` 65: expected 1 to 64"),
        (set(|c| c.kv_cache_memory = Some(0)), "a KV cache of 0 bytes holds no block"),
        (set(|c| c.kv_cache_memory = Some(1)), "needs 2048 bytes; raise `kv_cache_memory`"),
    ]);
    // More memory than there is, of which the sequences use a part, states that this model does not have, and a limit
    // for another device.
    let most = |c: &mut EngineConfig| {
        c.kv_cache_memory = Some(usize::MAX);
        c.prefix_state_memory = Some(usize::MAX);
        c.gpu_memory = Some(1);
    };
    assert_eq!(set(most), "no error");
    assert_eq!(set(|c| c.ranks = 0), "no error");
}

#[test]
fn requests() {
    let model = model();
    let mut engine = Engine::new(&model, Exec::cpu(), None, &EngineConfig::default()).unwrap();
    let mut with = |change: fn(&mut Request)| {
        let mut request = Request { max_tokens: Some(2), ..Request::new(vec![1, 2, 3]) };
        change(&mut request);
        said(engine.add(request))
    };
    expect([
        (with(|r| r.prompt.clear()), "the prompt is empty"),
        (with(|r| r.prompt = vec![VOCAB as u32]), "token id 300 at position 0"),
        (with(|r| r.prompt = vec![1, u32::MAX]), "token id 4294967295 at position 1"),
        (with(|r| r.prompt = vec![1; CONTEXT]), "the prompt of 64 tokens is longer than the context"),
        (with(|r| r.prompt = vec![1; 1 << 20]), "the prompt of 1048576 tokens"),
        (with(|r| r.n = 0), "n must be from 1 to 16384, got 0"),
        (with(|r| r.n = usize::MAX), "n must be from 1 to 16384"),
        (with(|r| r.max_tokens = Some(0)), "max_tokens must be at least 1"),
        (with(|r| r.min_tokens = 3), "min_tokens must be at most max_tokens = 2, got 3"),
        (with(|r| r.min_tokens = usize::MAX), "min_tokens must be at most"),
        (with(|r| r.stop = vec!["x".into()]), "stop must be empty without a tokenizer"),
        (with(|r| r.stop = vec![String::new()]), "stop must be texts that are not empty"),
        (with(|r| r.bad_words = vec!["x".into()]), "bad_words must be empty without a tokenizer"),
        (
            with(|r| r.structured_output = Some(Arc::new(StructuredOutput::JsonObject))),
            "without a tokenizer, got some",
        ),
        (
            with(|r| r.replay_routing = RoutedExperts::empty(1, 2, 2).map(Arc::new).ok()),
            "[T, 1, 2] (MoE layers, experts per token), got [T, 2, 2]",
        ),
        (with(|r| r.replay_routing = RoutedExperts::empty(1, 1, 3).map(Arc::new).ok()), "got [T, 1, 3]"),
        (
            with(|r| r.replay_routing = RoutedExperts::from_ids(1, 1, 2, vec![9, 9]).map(Arc::new).ok()),
            "routed_experts must be ids below 4, each once in a row",
        ),
    ]);
    let mut sampled = |change: fn(&mut SamplingParams)| {
        let mut request = Request { max_tokens: Some(2), ..Request::new(vec![1, 2, 3]) };
        change(&mut request.sampling);
        said(engine.add(request))
    };
    expect([
        (sampled(|s| s.temperature = f32::NAN), "temperature must be a finite number of at least 0, got NaN"),
        (sampled(|s| s.temperature = -1.0), "temperature must be a finite number of at least 0, got -1"),
        (sampled(|s| s.temperature = f32::INFINITY), "at least 0, got inf"),
        (sampled(|s| s.top_p = 0.0), "top_p must be above 0 and at most 1, got 0"),
        (sampled(|s| s.top_p = 1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (sampled(|s| s.top_p = f32::NAN), "at most 1, got NaN"),
        (sampled(|s| s.min_p = -0.1), "min_p must be from 0 to 1, got -0.1"),
        (sampled(|s| s.min_p = f32::NAN), "min_p must be from 0 to 1, got NaN"),
        (sampled(|s| s.repetition_penalty = 0.0), "repetition_penalty must be a finite number above 0"),
        (sampled(|s| s.repetition_penalty = f32::NAN), "above 0, got NaN"),
        (sampled(|s| s.presence_penalty = f32::INFINITY), "presence_penalty must be from -2 to 2"),
        (sampled(|s| s.frequency_penalty = f32::NAN), "frequency_penalty must be from -2 to 2"),
        (sampled(|s| s.logit_bias = vec![(VOCAB as u32, 1.0)]), "logit_bias: token id 300 is outside"),
        (sampled(|s| s.logit_bias = vec![(1, f32::NAN)]), "logit_bias must be finite numbers, got NaN"),
        (sampled(|s| s.allowed_token_ids = Some(vec![])), "allowed_token_ids holds an empty list"),
        (sampled(|s| s.allowed_token_ids = Some(vec![u32::MAX])), "token id 4294967295 is outside of"),
    ]);
    assert!(engine.is_idle(), "a refused request changes nothing");
    // The largest limits are the context's and the vocabulary's, and an id that no token has ends nothing.
    let most = Request {
        max_tokens: Some(usize::MAX),
        min_tokens: 1,
        eos_token_ids: vec![VOCAB as u32],
        stop_token_ids: vec![u32::MAX],
        prompt_logprobs: Some(usize::MAX),
        timeout: Some(Duration::MAX),
        sampling: SamplingParams {
            top_k: usize::MAX,
            logprobs: Some(usize::MAX),
            seed: u64::MAX,
            ..SamplingParams::default()
        },
        n: 2,
        ..Request::new(vec![1, 2, 3])
    };
    let late = Request { timeout: Some(Duration::ZERO), ..Request::new(vec![1, 2, 3]) };
    let most = engine.add(most).unwrap();
    let late = engine.add(late).unwrap();
    let mut ends = BTreeMap::new();
    let end = |output: Output| {
        assert!(output.logprobs.is_none_or(|logprobs| logprobs.top.len() == VOCAB));
        if let Some(finish) = output.finish {
            ends.insert((output.request, output.choice), finish);
        }
    };
    engine.run(end).unwrap();
    let wanted = [
        ((most, 0), FinishReason::Length),
        ((most, 1), FinishReason::Length),
        ((late, 0), FinishReason::TimedOut),
    ];
    assert_eq!(ends, BTreeMap::from(wanted));
    engine.cancel(most).unwrap(); // it has ended
    assert!(engine.is_idle());
}

#[test]
fn settings_of_a_run() {
    let none = || Families { table: &[], only: None };
    let set = |change: fn(&mut RunConfig)| {
        let mut config = RunConfig::default();
        change(&mut config);
        said(Run::start(&config, none(), "folder"))
    };
    let parallel = |tp, dp| ParallelConfig { tp, dp, ..ParallelConfig::default() };
    let placed = |parallel: ParallelConfig, placements: PlacementConfig| {
        let config = RunConfig { parallel, placements, ..RunConfig::default() };
        said(Run::start(&config, none(), "folder"))
    };
    let experts = ParallelConfig { enable_expert_parallel: true, ..parallel(2, 1) };
    let map = PlacementConfig { expert_map: Some("no/such/map.json".into()), ..PlacementConfig::default() };
    let redundant = PlacementConfig { num_redundant_experts: usize::MAX, ..PlacementConfig::default() };
    expect([
        (set(|c| c.num_threads = Some(0)), "`num_threads` 0"),
        (set(|c| c.num_threads = Some(usize::MAX)), "expected 1 to 1024"),
        (set(|c| c.expert_offload = Some(0)), "`expert_offload` keeps experts in host memory for a GPU"),
        (placed(parallel(0, 1), PlacementConfig::default()), "tp must be at least 1, got 0"),
        (placed(parallel(1, 0), PlacementConfig::default()), "dp must be at least 1, got 0"),
        (placed(parallel(usize::MAX, 2), PlacementConfig::default()), "more than 65536 ranks"),
        (placed(parallel(1, 1), map.clone()), "`expert_map` needs experts spread"),
        (placed(parallel(1, 1), redundant.clone()), "`num_redundant_experts` needs"),
        (
            placed(experts, PlacementConfig { num_redundant_experts: 1, ..map }),
            "drop `num_redundant_experts`",
        ),
    ]);
    #[cfg(not(feature = "cuda"))]
    expect([(
        set(|c| c.device = moe_engine::DeviceChoice::Cuda(Some(99))),
        "`device` cuda:99: this program was built without CUDA",
    )]);
    let eplb = |change: fn(&mut EplbConfig)| {
        let mut config = EplbConfig::default();
        change(&mut config);
        said(config.check())
    };
    expect([
        (eplb(|c| c.window = 0), "`eplb.window` 0: expected 1 to"),
        (eplb(|c| c.interval = usize::MAX), "`eplb.interval` 18446744073709551615: expected 1 to"),
        (eplb(|c| c.plan_steps = 0), "`eplb.plan_steps` 0"),
        (eplb(|c| c.max_moves = Some(0)), "`eplb.max_moves` 0"),
        (eplb(|c| c.bytes_per_step = 0), "`eplb.bytes_per_step` 0"),
        (eplb(|c| c.move_timeout = Duration::ZERO), "`eplb.move_timeout` 0"),
        (eplb(|c| c.min_gain = f64::NAN), "`eplb.min_gain` NaN"),
        (eplb(|c| c.min_gain = -1.0), "`eplb.min_gain` -1"),
    ]);
    let session = |config: &str| {
        let run = Run::start(&RunConfig::default(), none(), "folder").unwrap();
        said(run.session(Weights::Random(Config::parse(config, "config.json").unwrap())))
    };
    expect([
        (session("{}"), "`model_type`: expected the type of a model"),
        (session(r#"{"model_type": "unknown"}"#), "model_type \"unknown\" is not supported"),
        (session(r#"{"model_type": 7}"#), "`model_type`: expected a string, got 7"),
        (said(Config::parse("[]", "config.json")), "config.json: expected a JSON object, got []"),
        (said(Config::parse("{", "config.json")), "config.json: not valid JSON: EOF"),
    ]);
    let chunked = RunConfig { chunked_moe: ChunkedMoe::within(0), ..RunConfig::default() };
    assert_eq!(said(Run::start(&chunked, none(), "folder")), "no error"); // refused where a layer's sizes are known
}

#[test]
fn tokenizers_and_texts() {
    let bytes = Tokenizer::bytes().unwrap();
    let files = tempfile::tempdir().unwrap();
    expect([
        (said(Tokenizer::from_dir(Path::new("no/such/folder"))), "cannot read no/such/folder/tokenizer.json"),
        (said(Tokenizer::from_dir(files.path())), "tokenizer.json: generating text needs the checkpoint's"),
        (said(Tokenizer::from_bytes(b"")), "not the contents of a tokenizer.json: EOF"),
        (said(Tokenizer::from_bytes(b"{}")), "not the contents of a tokenizer.json: Model missing"),
        (said(Tokenizer::from_bytes(&[0xff, 0xfe])), "not the contents of a tokenizer.json: expected value"),
        (said(HeatWriter::create(Path::new("no/such/folder/heat.jsonl"))), "no/such/folder/heat.jsonl"),
    ]);
    assert_eq!(bytes.encode("").unwrap(), [0u32; 0]);
    assert_eq!(bytes.decode(&[]).unwrap(), "");
    // An id that no token has.
    assert_eq!(bytes.decode(&[u32::MAX]).unwrap(), "");
    assert_eq!(TextStream::new().push(&bytes, u32::MAX).unwrap(), "");
}

#[test]
fn chat_templates() {
    let render = |template: &str, request: ChatRequest| {
        let config = serde_json::json!({ "chat_template": template }).to_string();
        let template = ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap().unwrap();
        said(template.render(&request))
    };
    let hello = || ChatRequest {
        messages: vec![serde_json::json!({"role": "user", "content": "hello"})],
        ..ChatRequest::default()
    };
    expect([
        (render("x", ChatRequest::default()), "the conversation is empty: give at least one message"),
        (said(ChatFiles::from_file(Path::new("no/such.jinja"), None)), "no/such.jinja: no such file"),
        (said(ChatFiles::from_tokenizer_config(b"[]")), "tokenizer_config.json: expected a JSON object"),
        (said(ChatFiles::from_tokenizer_config(b"{")), "tokenizer_config.json: not JSON: EOF"),
        (render("{% for", hello()), "line 1: syntax error: unexpected end of input"),
        (render("{{ raise_exception('not this') }}", hello()), "refuses this conversation: not this"),
        (render("{{ messages[1].content }}", hello()), "`messages[1]` is undefined"),
        (render("{% for i in range(1000000000) %}x{% endfor %}", hello()), "range has too many elements"),
    ]);
}

#[test]
fn structured_outputs() {
    let model = model();
    let tokenizer = Tokenizer::bytes().unwrap();
    let mut engine = Engine::new(&model, Exec::cpu(), Some(tokenizer), &EngineConfig::default()).unwrap();
    let mut ask = |output: StructuredOutput| {
        let request = Request {
            max_tokens: Some(2),
            structured_output: Some(Arc::new(output)),
            ..Request::new(vec![1, 2, 3])
        };
        said(engine.add(request))
    };
    expect([
        (ask(StructuredOutput::JsonSchema("{".into())), "the JSON schema cannot be used: it is not JSON"),
        (ask(StructuredOutput::JsonSchema("7".into())), "expected a JSON object, got 7"),
        (ask(StructuredOutput::JsonSchema(r#"{"type": "strang"}"#.into())), "Invalid type: strang"),
        (ask(StructuredOutput::Regex("(".into())), "the regular expression cannot be used"),
        (ask(StructuredOutput::Regex(r"(a)\1".into())), "backreferences are not supported"),
        (ask(StructuredOutput::Choice(vec![])), "expected at least one text, and none that is empty"),
        (ask(StructuredOutput::Grammar("start: x".into())), "unknown name: \"x\""),
        (ask(StructuredOutput::Grammar(String::new())), "no start rule found"),
    ]);
    assert!(engine.is_idle());
}
