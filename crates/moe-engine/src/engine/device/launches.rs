//! The launches of a step: layers and sampling, one by one or as a captured graph.

use candle_core::Result;
use model_runtime::cuda::{Graph, LOGPROB_WORDS, logprobs_into, sample_into};
use model_runtime::device_step::Shape;
use model_runtime::{CausalLm, DeviceRouting, Exec, KvCache, LogitsOut, Scorer, StepContext};
use tracing::warn;

use super::DeviceRunner;
use super::graphs::{Recording, Variant};
use crate::engine::routing::Forced;
use crate::engine::sampling::SamplingNeeds;

impl DeviceRunner {
    /// The launches of a step.
    pub(super) fn launch_step(
        &mut self,
        shape: Shape,
        (asked, forced): (SamplingNeeds, Option<Forced>),
        model: &dyn CausalLm,
        kv: &mut KvCache,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let rows = shape.logits;
        ex.mark("embedding", 0)?;
        let views = self.step.views(shape)?;
        if let Some(routing) = &mut self.routing {
            context.routing = routing.begin(forced, views.number, shape.rows, ex)?;
        }
        let scorer = self.scorer.get().map(|scorer| scorer as &mut dyn Scorer);
        let logits = LogitsOut { rows: self.logits.view_mut().narrow(0, rows)?, scorer };
        let ran = model.forward(&views.step, kv, logits, None, context, ex);
        context.routing = DeviceRouting::default();
        ran?;
        // A step with masks is sampled later, when the masks are ready.
        if asked.masks { Ok(()) } else { self.sample(shape, asked, ex) }
    }

    /// Samples the tokens of a step whose logits are computed.
    pub(super) fn sample(&mut self, shape: Shape, asked: SamplingNeeds, ex: &Exec) -> Result<()> {
        let rows = shape.logits;
        ex.mark("sample", 0)?;
        let views = self.step.views(shape)?;
        let (mut tokens, rest) = self.sampled.view_mut().split_at(rows)?;
        let (status, rest) = rest.split_at(rows)?;
        let logits = self.logits.view().narrow(0, rows)?;
        let (slots, masks) = self.sampler.views(asked, rows)?;
        sample_into(logits, views.sampling, slots, masks, tokens.reborrow(), status, ex)?;
        if asked.logprobs {
            let out = rest.narrow(0, rows * LOGPROB_WORDS)?.reshape(&[rows, LOGPROB_WORDS])?;
            logprobs_into(logits, views.sampling, tokens.as_view(), out, ex)?;
        }
        Ok(())
    }

    /// The launches of a step, recorded as a graph the second time and replayed from then on.
    pub(super) fn replay(
        &mut self,
        shape: Shape,
        asks: (SamplingNeeds, Option<Forced>),
        model: &dyn CausalLm,
        kv: &mut KvCache,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let (asked, forced) = asks;
        // With masks the graph ends before sampling, whatever other sampling the step needs.
        let recorded =
            if asked.masks { SamplingNeeds { masks: true, ..SamplingNeeds::default() } } else { asked };
        let variant = Variant { rows: shape.rows, asked: recorded, forced: forced.map(Forced::weights) };
        match self.graphs.get_mut(&variant) {
            Some(Recording::Ready(graph)) => {
                self.replayed += 1;
                ex.mark("graph", variant.rows)?;
                graph.launch()?;
                return model.ranks().map_or(Ok(()), |ranks| ranks.watch(ex));
            }
            Some(Recording::Never) => return self.launch_step(shape, asks, model, kv, context, ex),
            None => {
                self.graphs.insert(variant, Recording::Warm);
                return self.launch_step(shape, asks, model, kv, context, ex);
            }
            Some(Recording::Warm) => {}
        }
        let recorded = Graph::capture(ex, |ex| self.launch_step(shape, asks, model, kv, context, ex));
        let by_all = match model.ranks() {
            Some(ranks) => ranks.all(recorded.is_ok())?,
            None => recorded.is_ok(),
        };
        match recorded {
            Ok(mut graph) if by_all => {
                ex.mark("graph", variant.rows)?;
                graph.launch()?;
                self.recorded += 1;
                self.replayed += 1;
                self.graphs.insert(variant, Recording::Ready(graph));
                model.ranks().map_or(Ok(()), |ranks| ranks.watch(ex))
            }
            recorded => {
                if !self.graphs.values().any(|r| matches!(r, Recording::Never)) {
                    let why = recorded.err().map_or("another rank could not".to_string(), |e| e.to_string());
                    let rows = variant.rows;
                    warn!("decoding without CUDA graphs: a batch of {rows} could not be recorded: {why}");
                }
                self.graphs.insert(variant, Recording::Never);
                self.launch_step(shape, asks, model, kv, context, ex)
            }
        }
    }
}
