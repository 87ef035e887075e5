//! Tests of the [peers](super), with models of a few lines.

use std::sync::Mutex;
use std::time::Duration;

use model_runtime::{
    CausalLm, Exec, KvCache, LogitsOut, ModelInfo, Observer, StepContext, StepViews, ViewMut,
};
use moe_comm::{Collectives, Communicator, ReduceOp, SocketComm, ThreadComm};

use super::super::serve::Stepped;
use super::*;
use crate::engine::{DpEngine, Output, Request, step_memory};
use crate::testing::small_model;

/// A model whose steps wait for the steps of the other ranks.
struct Meeting {
    info: ModelInfo,
    world: Arc<dyn Communicator>,
    rows: Mutex<Vec<usize>>,
}

impl CausalLm for Meeting {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(
        &self,
        step: &StepViews,
        _: &mut KvCache,
        _: LogitsOut,
        _: Option<&mut dyn Observer>,
        _: &mut StepContext,
        ex: &mut Exec,
    ) -> candle_core::Result<()> {
        let mut ranks = [1f32];
        self.world.all_reduce(ViewMut::new(&mut ranks, &[1])?, ReduceOp::Sum, ex)?;
        assert_eq!(ranks, [3.0]);
        self.rows.lock().unwrap().push(step.num_tokens());
        Ok(())
    }
}

/// The error of the next step of rank 0, if its only peer gives this answer.
fn error_after(answer: impl Fn(Messages) + Send + 'static) -> String {
    let mut world = SocketComm::loopback(2, Duration::from_secs(20)).unwrap();
    let second = world.pop().unwrap();
    let first = world.pop().unwrap();
    let thread = std::thread::spawn(move || {
        let messages = second.messages();
        messages.recv(0).unwrap();
        messages.send(0, &encode(&Reply::Started(64)).unwrap()).unwrap();
        // These messages are the limit and the request.
        (0..2).for_each(|_| drop(messages.recv(0)));
        answer(messages.clone());
        // Waits until rank 0 has noticed the failure.
        let _ = messages.recv(0);
    });
    let messages = first.messages();
    let world = Arc::new(first) as Arc<dyn Communicator>;
    let model = Meeting { info: small_model(64), world: world.clone(), rows: Mutex::default() };
    let config = EngineConfig { kv_cache_memory: Some(1 << 16), ..EngineConfig::default() };
    let first = (&model as &dyn CausalLm, Exec::cpu(), world);
    let mut engine = DpEngine::over_processes(first, (messages, vec![1]), None, &config).unwrap();
    // Rank 0 gets the first request, which ends before the step.
    let ids = [1, 2].map(|token| engine.add(Request::new(vec![token])).unwrap());
    engine.cancel(ids[0]).unwrap();
    let error = (0..50).find_map(|_| engine.step().err()).unwrap();
    drop(engine);
    thread.join().unwrap();
    format!("{error:#}")
}

#[test]
fn a_rank_that_answers_what_cannot_be_is_named() {
    let stepped =
        |output: Output| Reply::Stepped(Stepped { outputs: vec![output], loads: Vec::new(), idle: false });
    let output = |request: u8| Output {
        request: decode(&[request]).unwrap(),
        choice: 0,
        token_id: Some(1),
        text: String::new(),
        logprobs: None,
        prompt_logprobs: None,
        finish: None,
        routed_experts: None,
        num_cached_tokens: 0,
    };
    let send = |reply: Reply| {
        let reply = encode(&reply).unwrap();
        error_after(move |messages| messages.send(0, &reply).unwrap())
    };
    // The cases: a request of rank 0's own, a request that does not exist, a token that does not exist, an answer
    // to another question.
    for reply in [
        stepped(output(0)),
        stepped(output(7)),
        stepped(Output { token_id: Some(100), ..output(1) }),
        stepped(Output { choice: 1, ..output(1) }),
    ] {
        let error = send(reply);
        assert!(error.contains("rank 1 tells what cannot be"), "{error}");
    }
    assert!(send(Reply::Ended).contains("rank 1 answers another question"));
    let error = error_after(|messages| messages.send(0, &[0xff; 9]).unwrap());
    assert!(error.contains("rank 1") && error.contains("cannot be read"), "{error}");
}

#[test]
fn ranks_in_lockstep_run_their_largest_step_at_once_before_they_have_engines() {
    let info = small_model(64);
    let worlds = ThreadComm::world(3).into_iter().map(|comm| Arc::new(comm) as Arc<dyn Communicator>);
    let models: Vec<_> =
        worlds.map(|world| Arc::new(Meeting { info: info.clone(), world, rows: Mutex::default() })).collect();
    let replica = |rank: usize| {
        let model = models[rank].clone();
        let world = models[rank].world.clone();
        Replica { model, ex: Exec::cpu().with_threads(1).unwrap(), world }
    };
    let peers = Peers::threads(vec![replica(1), replica(2)], None, None).unwrap();
    let config = EngineConfig { lockstep: true, max_num_batched_tokens: 24, ..EngineConfig::default() };
    let own = || step_memory::measure(models[0].as_ref(), &config, &mut Exec::cpu());
    peers.measure(&config, own).unwrap();
    for model in &models {
        assert_eq!(*model.rows.lock().unwrap(), [24]);
    }
    let config = EngineConfig { kv_cache_memory: Some(1 << 16), ..config };
    assert_eq!(peers.start(&config, false, 1000).unwrap(), 64);
}
