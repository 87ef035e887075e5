//! No expert parallelism: the caller's rows go to the experts as they are.

use candle_core::{Result, bail};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::local_experts::LocalExperts;
use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::finalize_here;
use crate::tokens::Tokens;

/// The Standard format on one rank, without a copy: prepare lends the caller's rows.
///
/// With [`with_local_experts`](Self::with_local_experts) only some experts live here; slots of the
/// others add nothing, and `out` is this rank's part of the sum.
#[derive(Debug, Default)]
pub struct NoEp {
    experts: Option<LocalExperts>,
    router_weight_on_input: bool,
}

impl NoEp {
    /// All experts on this rank, weights applied in combine.
    pub fn new() -> Self {
        Self::default()
    }

    /// Restricts this rank to some experts.
    pub fn with_local_experts(mut self, experts: LocalExperts) -> Self {
        self.experts = Some(experts);
        self
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    pub fn with_router_weight_on_input(mut self, on_input: bool) -> Self {
        self.router_weight_on_input = on_input;
        self
    }
}

impl PrepareFinalize for NoEp {
    fn name(&self) -> &'static str {
        "NoEp"
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn output_is_reduced(&self) -> bool {
        false
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        self.experts.as_ref()
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.router_weight_on_input
    }

    fn finalize_copies_reduced(&self) -> bool {
        true
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
        let rows = tokens.input_rows(self.router_weight_on_input, ex)?;
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
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
        let strategy = match strategy {
            WeightAndReduce::Delegate => WeightAndReduce::Contiguous,
            WeightAndReduce::NaiveBatched { .. } => {
                bail!("{}: rows are in the Standard format, which NaiveBatched cannot reduce", self.name())
            }
            chosen => chosen,
        };
        finalize_here(self, expert_out, dispatched, strategy, out, ex)
    }
}
