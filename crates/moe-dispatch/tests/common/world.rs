//! Ranks as threads with a backend each, which the tests of backends over ranks share.
#![allow(dead_code, clippy::unwrap_used)] // Each test binary uses its own part; helpers fail by panicking.

use std::sync::Arc;

use moe_comm::ExpertPlacement;
use moe_dispatch::candle::{DType, Result};
use moe_dispatch::{
    AddNorm, Communicator, Dispatched, EpRanks, Exec, ExpertLayout, OverRanks, PrepareFinalize, View,
    ViewMut, WeightAndReduce, WhoAdds, mask_nonlocal_into, weighted_sum_into,
};

use super::common::{Problem, run_named_experts};

/// The backends whose ranks hold whole experts.
pub const BACKENDS: [&str; 4] =
    ["local_allreduce", "allgather_reducescatter", "high_throughput", "low_latency"];

/// The backend whose ranks hold parts of all experts and the same tokens.
pub const DISABLED: &str = "disabled";

pub const BOTH: [WhoAdds; 2] = [WhoAdds::BySlot, WhoAdds::ByRank];

/// A backend over the ranks of `ep`. The ranks of `tp` hold the same tokens.
pub fn over_ranks(
    name: &str,
    who: WhoAdds,
    layout: &ExpertLayout,
    (ep, tp): (Arc<dyn Communicator>, usize),
    max_num_tokens: usize,
) -> Result<OverRanks> {
    if name == DISABLED {
        return Ok(OverRanks::disabled(ep, who));
    }
    let same = ep.split(ep.rank() / tp, ep.rank() % tp, &mut Exec::cpu())?;
    let ranks = EpRanks::new(layout, ep, same)?;
    Ok(match name {
        "local_allreduce" => OverRanks::local_allreduce(ranks, who)?,
        "allgather_reducescatter" => OverRanks::allgather_reducescatter(ranks, who),
        "high_throughput" => OverRanks::high_throughput(ranks, who),
        _ => OverRanks::low_latency(ranks, max_num_tokens, who),
    })
}

/// dp groups of tp ranks, the tokens of each group, and the places of the experts.
#[derive(Clone, Debug)]
pub struct World {
    pub tp: usize,
    pub placement: ExpertPlacement,
    /// One per dp group. All have the same sizes, except for the number of tokens.
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

    /// The backend of a rank with the communicator `ep`.
    pub fn backend(&self, name: &str, who: WhoAdds, ep: Arc<dyn Communicator>) -> Result<OverRanks> {
        let layout = self.layout(ep.rank());
        let backend = over_ranks(name, who, &layout, (ep, self.tp), self.max_tokens())?;
        Ok(backend.with_router_weight_on_input(self.on_input))
    }

    /// The output of rank `rank` with `disabled`, with two segments of artificial experts on each rank.
    pub fn run_disabled(&self, rank: usize, backend: &OverRanks, ex: &mut Exec) -> Result<Vec<f32>> {
        let p = &self.problems[0];
        let dispatched = backend.prepare(p.inputs()?, None, ex)?;
        let segments = vec![rank as f32; 2 * p.tokens * p.top_k * p.hidden];
        let segments = View::new(&segments, &[2, p.tokens, p.top_k, p.hidden])?;
        p.output(|to| backend.finalize(segments, &dispatched, WeightAndReduce::Delegate, to, ex))
    }

    /// The output of rank `rank` for its tokens. With `reduces` the experts weight and reduce by themselves. `agreed`
    /// is the argument of [`PrepareFinalize::prepare`].
    pub fn run(
        &self,
        backend: &OverRanks,
        rank: usize,
        reduces: bool,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Vec<f32>> {
        let p = &self.problems[rank / self.tp];
        let local = self.layout(rank).local_experts;
        let d = backend.prepare(p.inputs()?, agreed, ex)?;
        assert_eq!(d.format, backend.activation_format());
        assert!(d.rows.view().dims().iter().rev().nth(1).unwrap() <= &backend.max_rows(self.max_tokens()));
        let y = run_named_experts::<f32>(&d, |slot| local[slot] as usize)?;
        if !reduces {
            let y = View::new(&y, &d.expert_out_dims()?)?;
            return p.output(|to| backend.finalize(y, &d, WeightAndReduce::Delegate, to, ex));
        }
        let sums = reduced(&d, &y, ex)?;
        p.output(|mut to| {
            if backend.combine().is_in_place() {
                // The experts write the output themselves, as in a layer.
                to.cpu_mut::<f32>()?.copy_from_slice(&sums);
                return backend.complete_reduced(to, ex);
            }
            let sums = View::new(&sums, &[d.rows.view().rows(), p.hidden])?;
            backend.finalize(sums, &d, WeightAndReduce::NoOp, to, ex)
        })
    }
}

impl World {
    /// Like [`run`](Self::run), in two calls. The second one is prepared before the first one is finalized.
    pub fn run_in_two_calls(&self, backend: &OverRanks, rank: usize) -> Result<Vec<f32>> {
        let p = &self.problems[rank / self.tp];
        let local = self.layout(rank).local_experts;
        let ex = &mut Exec::cpu();
        let tokens = p.inputs()?;
        let first = p.tokens / 3;
        let a = backend.prepare(tokens.narrow(0, first)?, None, ex)?;
        let b = backend.prepare(tokens.narrow(first, p.tokens - first)?, None, ex)?;
        let experts = |d: &Dispatched| run_named_experts::<f32>(d, |slot| local[slot] as usize);
        let of_a = experts(&a)?;
        let of_b = experts(&b)?;
        let of_a = View::new(&of_a, &a.expert_out_dims()?)?;
        let of_b = View::new(&of_b, &b.expert_out_dims()?)?;
        p.output(|out| {
            let (out_a, out_b) = out.split_at(first)?;
            backend.finalize(of_a, &a, WeightAndReduce::Delegate, out_a, ex)?;
            backend.finalize(of_b, &b, WeightAndReduce::Delegate, out_b, ex)
        })
    }

    /// Like [`run`](Self::run), but added to the residual stream, with its norm, for backends whose sums return to the
    /// owners of tokens.
    pub fn run_add_norm(
        &self,
        backend: &OverRanks,
        rank: usize,
        reduces: bool,
        end: AddNorm<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let p = &self.problems[rank];
        let local = self.layout(rank).local_experts;
        let d = backend.prepare(p.inputs()?, None, ex)?;
        let y = run_named_experts::<f32>(&d, |slot| local[slot] as usize)?;
        if reduces {
            let sums = reduced(&d, &y, ex)?;
            let sums = View::new(&sums, &[d.rows.view().rows(), p.hidden])?;
            return backend.finalize_add_norm(sums, &d, WeightAndReduce::NoOp, end, ex);
        }
        let slots = View::new(&y, &d.expert_out_dims()?)?;
        backend.finalize_add_norm(slots, &d, WeightAndReduce::Contiguous, end, ex)
    }
}

/// The result of experts that reduce by themselves for the rows that arrived, [T', H].
fn reduced(d: &Dispatched, slots: &[f32], ex: &mut Exec) -> Result<Vec<f32>> {
    let dims = d.expert_out_dims()?;
    let mut ids = ex.scratch(DType::U32, &dims[..2])?;
    match d.expert_map {
        Some(map) => mask_nonlocal_into(d.topk_ids()?, map, ids.view_mut(), ex)?,
        None => ids.view_mut().cpu_mut::<u32>()?.copy_from_slice(d.topk_ids()?.cpu()?),
    }
    let mut out = vec![f32::NAN; dims[0] * dims[2]];
    let to = ViewMut::new(&mut out, &[dims[0], dims[2]])?;
    weighted_sum_into(View::new(slots, &dims)?, ids.view(), d.topk_weights()?, to, ex)?;
    Ok(out)
}
