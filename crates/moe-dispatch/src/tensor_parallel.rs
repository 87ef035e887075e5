//! `disabled` over several ranks: every rank has the same tokens and all experts, each cut along
//! its intermediate size.
//!
//! The experts return the f32 sum of each of their segments; a token's owner (an even share of
//! the ranks each) adds all S of them in ascending order, then weights and adds the slots, and the
//! owners' rows are gathered.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use moe_comm::{Communicator, partition, reduce_segments_into, shares};
use moe_kernels::door::{expect_dims, expect_dtype};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::combine::weigh;
use crate::prepare_finalize::PrepareFinalize;
use crate::tokens::Tokens;

/// The backend `disabled` where tensor parallelism cuts the experts.
#[derive(Debug)]
pub struct TensorParallel {
    comm: Arc<dyn Communicator>,
    router_weight_on_input: bool,
}

const NAME: &str = "disabled";

impl TensorParallel {
    /// Over the ranks that cut the experts.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm, router_weight_on_input: false }
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    pub fn with_router_weight_on_input(mut self, on_input: bool) -> Self {
        self.router_weight_on_input = on_input;
        self
    }
}

impl PrepareFinalize for TensorParallel {
    fn name(&self) -> &'static str {
        NAME
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn output_is_reduced(&self) -> bool {
        true
    }

    fn num_dispatchers(&self) -> usize {
        self.comm.world_size()
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.router_weight_on_input
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        _: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        let rows = tokens.input_rows(self.router_weight_on_input, ex)?;
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
        dispatched.weights_applied = self.router_weight_on_input;
        Ok(dispatched)
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        if strategy != WeightAndReduce::Delegate {
            bail!("{NAME}: expected experts that return unweighted segments (Delegate), got {strategy:?}")
        }
        let &[segments, tokens, top_k, width] = expert_out.dims() else {
            bail!("{NAME}: expected expert_out [S_local, T, K, H], got dims {:?}", expert_out.dims())
        };
        expect_dtype(NAME, "expert_out", &expert_out, DType::F32)?;
        let ids = dispatched.owner_topk_ids;
        expect_dims(NAME, "topk_ids", &ids, &[tokens, top_k])?;
        expect_dims(NAME, "out", &out, &[tokens, width])?;
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let (shares, owned) = (shares(tokens, ranks), partition(tokens, ranks, rank));

        let mut slots = ex.scratch(DType::F32, &[owned.len(), top_k, width])?;
        let flat = slots.view_mut().reshape(&[owned.len(), top_k * width])?;
        let partials = expert_out.reshape(&[segments, tokens, top_k * width])?;
        reduce_segments_into(self.comm.as_ref(), partials, &shares, flat, ex)?;

        let own_ids = ids.narrow(owned.start, owned.len())?;
        let mut rows = ex.scratch(out.dtype(), &[owned.len(), width])?;
        weigh(slots.view(), own_ids, dispatched, &owned, rows.view_mut(), ex)?;
        self.comm.all_gather_v(rows.view(), &shares, out, ex)
    }
}
