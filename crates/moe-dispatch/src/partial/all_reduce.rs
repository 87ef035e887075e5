//! `disabled` and `local_allreduce`: every rank has the same tokens, computes its part of each slot or the
//! slots of its own experts, and an all-reduce adds the ranks' sums.

use std::sync::Arc;

use candle_core::Result;
use moe_comm::{Communicator, ReduceOp};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::local_experts::LocalExperts;
use crate::no_ep::NoEp;
use crate::prepare_finalize::PrepareFinalize;

/// Sums of the same tokens on every rank, added by an all-reduce.
#[derive(Debug)]
pub struct SumAllReduce {
    name: &'static str,
    here: NoEp,
    comm: Arc<dyn Communicator>,
    /// The caller adds the ranks' sums.
    deferred: bool,
}

impl SumAllReduce {
    /// `disabled`: the ranks of `comm` hold all experts, each cut along its intermediate size.
    pub fn of_cut_experts(comm: Arc<dyn Communicator>) -> Self {
        Self { name: "disabled", here: NoEp::new(), comm, deferred: false }
    }

    /// `local_allreduce`: the ranks of `comm` hold whole experts, this one `experts`.
    pub fn of_whole_experts(experts: LocalExperts, comm: Arc<dyn Communicator>) -> Self {
        let here = NoEp::new().with_local_experts(experts);
        Self { name: "local_allreduce", here, comm, deferred: false }
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    pub fn with_router_weight_on_input(self, on_input: bool) -> Self {
        Self { here: self.here.with_router_weight_on_input(on_input), ..self }
    }
}

impl PrepareFinalize for SumAllReduce {
    fn name(&self) -> &'static str {
        self.name
    }

    fn activation_format(&self) -> ActivationFormat {
        self.here.activation_format()
    }

    fn output_is_reduced(&self) -> bool {
        !self.deferred
    }

    fn num_dispatchers(&self) -> usize {
        self.comm.world_size()
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        self.here.local_experts()
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.here.applies_router_weight_on_input()
    }

    fn adds_partial_sums(&self) -> bool {
        true
    }

    fn finalize_copies_reduced(&self) -> bool {
        true
    }

    fn complete_reduced(&self, out: ViewMut, ex: &mut Exec) -> Result<()> {
        match self.deferred {
            true => Ok(()),
            false => self.comm.all_reduce(out, ReduceOp::Sum, ex),
        }
    }

    fn defer_sum(&mut self) -> bool {
        self.deferred = true;
        true
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        self.here.prepare(hidden, topk_ids, topk_weights, agreed, ex)
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        self.here.finalize(expert_out, dispatched, strategy, out.reborrow(), ex)?;
        self.complete_reduced(out, ex)
    }
}
