//! Ranks of threads with a backend each: what the tests of expert-parallel backends share.
#![allow(dead_code, clippy::unwrap_used)] // Each test binary uses its own part; helpers fail by panicking.

use std::sync::Arc;

use moe_comm::ExpertPlacement;
use moe_dispatch::candle::Result;
use moe_dispatch::{
    AllgatherReducescatter, Communicator, EpRanks, Exec, ExpertLayout, HighThroughput, LocalAllreduce,
    LowLatency, PrepareFinalize, TensorParallel, View, ViewMut, WeightAndReduce,
};

use super::common::{Problem, run_named_experts};

/// The expert-parallel backends.
pub const BACKENDS: [&str; 4] =
    ["local_allreduce", "allgather_reducescatter", "high_throughput", "low_latency"];

/// dp groups of tp ranks; the tokens of each group, and where the experts are.
#[derive(Clone, Debug)]
pub struct World {
    pub tp: usize,
    pub placement: ExpertPlacement,
    /// One per dp group; all have the same sizes but for the tokens.
    pub problems: Vec<Problem>,
    pub on_input: bool,
}

impl World {
    pub fn ranks(&self) -> usize {
        self.tp * self.problems.len()
    }

    pub fn num_experts(&self) -> usize {
        self.problems[0].num_local
    }

    pub fn max_tokens(&self) -> usize {
        self.problems.iter().map(|p| p.tokens).max().unwrap()
    }

    pub fn layout(&self, rank: usize) -> ExpertLayout {
        ExpertLayout::new(self.num_experts(), self.ranks(), rank, self.placement).unwrap()
    }

    /// The backend of a rank whose communicator is `ep`.
    pub fn backend(&self, name: &str, ep: Arc<dyn Communicator>) -> Result<Box<dyn PrepareFinalize>> {
        let rank = ep.rank();
        let tp = ep.split(rank / self.tp, rank % self.tp, &mut Exec::cpu())?;
        let ranks = EpRanks::new(&self.layout(rank), ep, tp)?.with_router_weight_on_input(self.on_input);
        Ok(match name {
            "local_allreduce" => Box::new(LocalAllreduce::new(ranks)?),
            "allgather_reducescatter" => Box::new(AllgatherReducescatter::new(ranks)),
            "high_throughput" => Box::new(HighThroughput::new(ranks)),
            _ => Box::new(LowLatency::new(ranks, self.max_tokens())),
        })
    }

    /// What rank `rank` of `disabled` over `ep` gets, with two segments of made-up experts of its own.
    pub fn run_disabled(&self, rank: usize, ep: Arc<dyn Communicator>, ex: &mut Exec) -> Result<Vec<f32>> {
        let p = &self.problems[0];
        let backend = TensorParallel::new(ep);
        let hidden = View::new(&p.rows, &[p.tokens, p.hidden])?;
        let ids = View::new(&p.ids, &[p.tokens, p.top_k])?;
        let weights = View::new(&p.weights, &[p.tokens, p.top_k])?;
        let dispatched = backend.prepare(hidden, ids, weights, None, ex)?;
        let segments = vec![rank as f32; 2 * p.tokens * p.top_k * p.hidden];
        let segments = View::new(&segments, &[2, p.tokens, p.top_k, p.hidden])?;
        let mut out = vec![f32::NAN; p.rows.len()];
        let to = ViewMut::new(&mut out, &[p.tokens, p.hidden])?;
        backend.finalize(segments, &dispatched, WeightAndReduce::Delegate, to, ex)?;
        Ok(out)
    }

    /// What rank `rank` gets for its tokens, by the whole calls or by their halves; `agreed` as in
    /// [`PrepareFinalize::prepare`].
    pub fn run(
        &self,
        backend: &dyn PrepareFinalize,
        rank: usize,
        halves: bool,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Vec<f32>> {
        let p = &self.problems[rank / self.tp];
        let local = self.layout(rank).local_experts;
        let name = |slot: usize| local[slot] as usize;
        let mut out = vec![f32::NAN; p.rows.len()];
        let hidden = View::new(&p.rows, &[p.tokens, p.hidden])?;
        let ids = View::new(&p.ids, &[p.tokens, p.top_k])?;
        let weights = View::new(&p.weights, &[p.tokens, p.top_k])?;
        let to = ViewMut::new(&mut out, &[p.tokens, p.hidden])?;
        let strategy = WeightAndReduce::Delegate;
        if halves {
            let d = backend.begin_prepare(hidden, ids, weights, agreed, ex)?.end(ex)?;
            assert!(
                d.rows.view().dims().iter().rev().nth(1).unwrap() <= &backend.max_rows(self.max_tokens())
            );
            let y = run_named_experts::<f32>(&d, name)?;
            let y = View::new(&y, &d.expert_out_dims()?)?;
            backend.begin_finalize(y, &d, strategy, to, ex)?.end(ex)?;
        } else {
            let d = backend.prepare(hidden, ids, weights, agreed, ex)?;
            let y = run_named_experts::<f32>(&d, name)?;
            backend.finalize(View::new(&y, &d.expert_out_dims()?)?, &d, strategy, to, ex)?;
        }
        Ok(out)
    }
}
