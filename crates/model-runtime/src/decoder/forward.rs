//! A step of a decoder: executes the step's program.

use candle_core::{DType, Result};
use moe_kernels::names::TensorNames;
use moe_kernels::plan::Machine;
use moe_kernels::{Exec, ExpertTraffic, StepContext, View, ViewMut, embedding_into};
use moe_layer::{PlacedExperts, PlanStep, Router, SparseMoeBlock};
use tracing::trace_span;

use super::layer::{Decoder, Mlp};
use super::program::{Part, Reader};
use super::residual::{Norms, Residual};
use crate::kv_cache::KvCache;
use crate::layers::RmsNorm;
use crate::model::{CausalLm, LayerPlan, LogitsOut, ModelInfo, Observe, Observer, Scorer};
use crate::run::SCORED_PIECE;
use crate::step::StepViews;

/// A step whose rows are in the residual stream.
pub(super) struct Entered<'a> {
    pub step: &'a StepViews<'a>,
    pub residual: Residual<'a>,
}

impl Decoder {
    /// A residual stream for the rows of a step, to be written.
    pub(super) fn residual(&self, step: &StepViews, ex: &Exec) -> Result<Residual<'_>> {
        let dims = [step.num_tokens(), self.info.hidden_size];
        Residual::new(&dims, self.info.dtype, self.sums.as_deref(), ex)
    }

    /// [`CausalLm::forward`] from the residual stream on.
    pub(super) fn forward_from(
        &self,
        entered: Entered<'_>,
        kv: &mut KvCache,
        logits: LogitsOut,
        mut observe: Observe<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let Entered { step, mut residual } = entered;
        let program = self.program(&step.plan_step(observe.asks(), context), &ex.machine());
        let ropes = self.ropes.rows(step.positions, step.rope_len, ex)?;
        observe.hidden(0, residual.stream.view(), ex)?;
        for launches in program.chunk_by(|a, b| a.layer == b.layer) {
            let index = launches[0].layer;
            let layer = &self.layers[index];
            let _span = trace_span!("layer", layer = index).entered();
            ex.mark("layer", index)?;
            for launch in launches {
                match launch.part {
                    Part::Norm(reader) => residual.norm(self.norm_of(reader), ex)?,
                    Part::AddNorm(reader, sums) => residual.add_norm(self.norm_of(reader), sums, ex)?,
                    Part::Mixer(fusion) => {
                        let norms = self.norms(Reader::Mixer(index), Reader::Mlp(index));
                        let rope = ropes.layer(index)?;
                        let kv = kv.layer_mut(index)?;
                        residual.sublayer(fusion, norms, ex, |io, ex| {
                            layer.mixer.forward_into(io, step, rope, kv, ex)
                        })?;
                    }
                    Part::Keep { rows: 0, .. } => return Ok(()),
                    Part::Keep { normed, .. } => residual.keep(step.logits_rows, normed, ex)?,
                    Part::Mlp(form) => {
                        let mut norms = self.norms(Reader::Mlp(index), self.after(index));
                        // Modular experts give the next norm in the model dtype.
                        norms.reader = norms.reader.filter(|_| form.monolithic.is_some());
                        let host = ex.clone();
                        let mut see = |logits: View<'_>| observe.router(index, logits, &host);
                        residual.sublayer(form.fusion, norms, ex, |io, ex| {
                            layer.mlp.forward_as(form, io.floats("mlp")?, &mut see, context, ex)
                        })?;
                    }
                }
            }
            match self.after(index) {
                Reader::LmHead => observe.hidden(index + 1, residual.normed()?, ex)?,
                _ => observe.hidden(index + 1, residual.stream.view(), ex)?,
            }
        }
        let x = residual.normed()?;
        ex.mark(TensorNames::USUAL.lm_head, 0)?;
        if step.num_logits() == x.rows() {
            self.ends.lm_head.forward_into(x, logits.rows, ex)?;
        } else {
            self.logits_of(x, step.logits_rows, logits.rows, ex)?;
        }
        self.score(x, step.scored_rows, logits.scorer, ex)
    }

    /// The norm that a part reads.
    fn norm_of(&self, reader: Reader) -> &RmsNorm {
        match reader {
            Reader::Mixer(layer) => &self.layers[layer].input_norm,
            Reader::Mlp(layer) => &self.layers[layer].post_attention_norm,
            Reader::LmHead => &self.norm,
        }
    }

    /// The norms before and after a part of a layer.
    fn norms(&self, own: Reader, next: Reader) -> Norms<'_> {
        let reader = match next {
            Reader::Mixer(layer) => Some(self.layers[layer].mixer.as_ref()),
            Reader::Mlp(_) | Reader::LmHead => None,
        };
        Norms { own: self.norm_of(own), next: self.norm_of(next), reader }
    }

    /// `logits` [R, V] f32 of R `rows` of the normed stream `x` [T, H].
    fn logits_of(&self, x: View, rows: View, logits: ViewMut, ex: &mut Exec) -> Result<()> {
        let mut hidden = ex.scratch(x.dtype(), &[rows.elem_count(), self.info.hidden_size])?;
        embedding_into(x, rows, hidden.view_mut(), ex)?;
        self.ends.lm_head.forward_into(hidden.view(), logits, ex)
    }

    /// Passes the logits of `rows` of the normed stream `x` [T, H] to the scorer, a piece at a time. Ranks that share
    /// the vocabulary compute them together, even if only one of them scores.
    fn score(&self, x: View, rows: View, scorer: Option<&mut dyn Scorer>, ex: &mut Exec) -> Result<()> {
        let mut scorer = scorer;
        if scorer.is_none() && !self.ends.lm_head.is_shared() {
            return Ok(());
        }
        for first in (0..rows.elem_count()).step_by(SCORED_PIECE) {
            let rows = rows.narrow(first, SCORED_PIECE.min(rows.elem_count() - first))?;
            let mut logits = ex.scratch(DType::F32, &[rows.elem_count(), self.info.vocab_size])?;
            self.logits_of(x, rows, logits.view_mut(), ex)?;
            if let Some(scorer) = &mut scorer {
                scorer.score(first, logits.view(), ex)?;
            }
        }
        Ok(())
    }

    /// The sparse block of MoE layer `moe_layer`.
    fn sparse(&self, moe_layer: usize) -> Option<&SparseMoeBlock> {
        let layer = *self.info.moe.as_ref()?.layers.get(moe_layer)?;
        match &self.layers.get(layer)?.mlp {
            Mlp::Sparse(sparse) => Some(sparse),
            Mlp::Dense(_) => None,
        }
    }
}

impl CausalLm for Decoder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn router(&self, moe_layer: usize) -> Option<&Router> {
        self.sparse(moe_layer).map(SparseMoeBlock::router)
    }

    fn placed_experts(&self, moe_layer: usize) -> Option<&PlacedExperts> {
        self.sparse(moe_layer)?.placed_experts()
    }

    fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        let mut all: Option<ExpertTraffic> = None;
        for layer in (0..).map_while(|layer| self.sparse(layer)) {
            if let Some(own) = layer.expert_traffic()? {
                all.get_or_insert_default().add(&own);
            }
        }
        Ok(all)
    }

    fn plan(&self, step: &PlanStep, machine: &Machine) -> Vec<LayerPlan> {
        self.layer_plans(step, machine)
    }

    fn forward(
        &self,
        step: &StepViews,
        kv: &mut KvCache,
        logits: LogitsOut,
        observer: Option<&mut dyn Observer>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let mut residual = self.residual(step, ex)?;
        self.ends.embedding.forward_into(step.token_ids, residual.stream.view_mut(), ex)?;
        self.forward_from(Entered { step, residual }, kv, logits, Observe(observer), context, ex)
    }
}
