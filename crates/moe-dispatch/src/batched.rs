//! The BatchedExperts format on one rank: the readable reference of every batched backend.

use candle_core::{DType, Result, bail};
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, RowBatches, View, ViewMut, WeightAndReduce, batch_rows_into,
    group_slots_into,
};

use crate::local_experts::LocalExperts;
use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::finalize_here;
use crate::tokens::Tokens;

/// Copies each token row to every local expert that it chose, [E_local, max_num_tokens, H].
///
/// Row r of an expert is the r-th of its slots in ascending order t*K + k, so the rows keep token
/// order; unused rows are unspecified. The caller's rows are never written. More rows than
/// `max_num_tokens` for one expert is an error.
#[derive(Debug)]
pub struct BatchedReference {
    experts: LocalExperts,
    max_num_tokens: usize,
    router_weight_on_input: bool,
}

impl BatchedReference {
    /// Room for `max_num_tokens` rows in each of the local experts.
    pub fn new(experts: LocalExperts, max_num_tokens: usize) -> Self {
        Self { experts, max_num_tokens, router_weight_on_input: false }
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    pub fn with_router_weight_on_input(mut self, on_input: bool) -> Self {
        self.router_weight_on_input = on_input;
        self
    }
}

impl PrepareFinalize for BatchedReference {
    fn name(&self) -> &'static str {
        "BatchedReference"
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::BatchedExperts
    }

    fn output_is_reduced(&self) -> bool {
        false
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        Some(self.max_num_tokens)
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        Some(&self.experts)
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
        let tokens = Tokens::check(self.name(), hidden, topk_ids, topk_weights)?;
        let input = tokens.input_rows(self.router_weight_on_input, ex)?;
        let num_local = self.experts.num_local();
        let width = hidden.dims().get(1).copied().unwrap_or(0);

        let mut offsets = ex.scratch(DType::U32, &[num_local + 1])?;
        let mut slots = ex.scratch(DType::U32, &[topk_ids.elem_count()])?;
        let expert_map = self.experts.expert_map();
        group_slots_into(topk_ids, expert_map, offsets.view_mut(), slots.view_mut(), ex)?;

        let batches = RowBatches { offsets: offsets.view(), slots: slots.view(), top_k: tokens.top_k };
        let mut rows = ex.scratch(hidden.dtype(), &[num_local, self.max_num_tokens, width])?;
        let mut counts = ex.scratch(DType::U32, &[num_local])?;
        batch_rows_into(input.view(), &batches, rows.view_mut(), counts.view_mut(), ex)?;

        let mut dispatched = Dispatched::batched(rows, counts, topk_ids, topk_weights);
        dispatched.expert_map = expert_map;
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
        let strategy = match strategy {
            WeightAndReduce::Delegate => WeightAndReduce::NaiveBatched { rank: 0 },
            WeightAndReduce::Contiguous => bail!(
                "{}: rows are in the BatchedExperts format, which Contiguous cannot reduce",
                self.name()
            ),
            chosen => chosen,
        };
        finalize_here(self, expert_out, dispatched, strategy, out, ex)
    }
}
