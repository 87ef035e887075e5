//! No expert parallelism: rows stay on this rank, unchanged or batched by expert.

use candle_core::Result;
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::error::refuse;
use crate::local_experts::LocalExperts;
use crate::prepare_finalize::{Combine, PrepareFinalize};
use crate::reduce::reduce_into;
use crate::rows::batch;
use crate::tokens::Tokens;

/// The backend of one rank. In the Standard format prepare lends the caller's rows without a copy;
/// [`batched`](Self::batched) copies them into the BatchedExperts format.
///
/// If this rank has only some of the experts, slots of the other experts add nothing, and `out` is this rank's part of
/// the sum.
#[derive(Debug, Default)]
pub struct NoEp {
    experts: Option<LocalExperts>,
    max_num_tokens: Option<usize>,
    router_weight_on_input: bool,
}

impl NoEp {
    /// All experts are on this rank, and weights are applied in combine.
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses the BatchedExperts format: each token row is copied to every local expert that it chose, [E_local,
    /// max_num_tokens, H]. This is the readable reference of the format.
    ///
    /// Row r of an expert belongs to the r-th of its slots in ascending order of t*K + k, so the rows keep the order of
    /// tokens. Unused rows are unspecified. More than `max_num_tokens` rows for one expert are an error.
    pub fn batched(experts: LocalExperts, max_num_tokens: usize) -> Self {
        Self { max_num_tokens: Some(max_num_tokens), ..Self::new().with_local_experts(experts) }
    }

    /// Restricts this rank to some experts.
    #[must_use]
    pub fn with_local_experts(mut self, experts: LocalExperts) -> Self {
        self.experts = Some(experts);
        self
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    #[must_use]
    pub fn with_router_weight_on_input(mut self, on_input: bool) -> Self {
        self.router_weight_on_input = on_input;
        self
    }
}

impl PrepareFinalize for NoEp {
    fn name(&self) -> &'static str {
        if self.max_num_tokens.is_none() { "NoEp" } else { "NoEp batched" }
    }

    fn activation_format(&self) -> ActivationFormat {
        match self.max_num_tokens {
            None => ActivationFormat::Standard,
            Some(_) => ActivationFormat::BatchedExperts,
        }
    }

    fn combine(&self) -> Combine {
        Combine::Here
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        self.max_num_tokens
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        self.experts.as_ref()
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.router_weight_on_input
    }

    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        _: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        tokens.check(self.name())?;
        let input = tokens.input_rows(self.name(), self.router_weight_on_input, ex)?;
        let Tokens { topk_ids, topk_weights, .. } = tokens;
        let mut dispatched = match (self.max_num_tokens, &self.experts) {
            (Some(max), Some(experts)) => {
                let batches = batch(input.view(), topk_ids, experts, max, ex)?;
                Dispatched::batched(batches.rows, batches.counts, topk_ids, topk_weights)
            }
            _ => Dispatched::standard(input, topk_ids, topk_weights),
        };
        dispatched.expert_map = self.experts.as_ref().and_then(LocalExperts::expert_map);
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
        let name = self.name();
        let format = self.activation_format();
        if dispatched.format != format {
            refuse!(
                Composition,
                "{name}: expected rows dispatched in the {format:?} format, got {:?}",
                dispatched.format
            )
        }
        let owner = (dispatched.owner_topk_ids, dispatched.owner_topk_weights);
        reduce_into(name, expert_out, dispatched, owner, strategy, out, ex)
    }
}
