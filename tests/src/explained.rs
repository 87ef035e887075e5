//! Compares what a model's plan says of a step with what the step launched, name by name.

use candle_core::Result;
use model_runtime::{
    CausalLm, Exec, KvCache, LogitsRows, Observe, Observed, Observer, SequenceStep, Step, StepContext, View,
    run_step,
};
use moe_kernels::LaunchLog;
use moe_kernels::plan::launches;

/// Positions that a decoding sequence has seen before the step.
const SEEN: usize = 5;
/// Slots of a block of the KV cache.
const BLOCK: usize = 16;

/// A step of some shape.
#[derive(Clone, Debug)]
pub struct ShownStep {
    /// Sequences with one new row each.
    pub decoding: usize,
    /// Rows of each prompt after them.
    pub prompts: Vec<usize>,
    /// Which rows of a prompt need logits; of decoding rows each does.
    pub logits: LogitsRows,
    /// Whether an observer looks at hidden states and router logits.
    pub observed: bool,
}

impl ShownStep {
    /// A step whose prompts need the logits of their last rows.
    pub fn new(decoding: usize, prompts: &[usize]) -> Self {
        Self { decoding, prompts: prompts.to_vec(), logits: LogitsRows::Last, observed: false }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.decoding + self.prompts.iter().sum::<usize>()
    }

    /// The step, over blocks of a cache numbered from 0, and how many blocks there are.
    fn build(&self) -> Result<(Step, usize)> {
        let new_rows = std::iter::repeat_n(1, self.decoding).chain(self.prompts.iter().copied());
        let mut sequences = Vec::new();
        let mut blocks = 0;
        for (index, rows) in new_rows.enumerate() {
            let decodes = index < self.decoding;
            let start = if decodes { SEEN } else { 0 };
            let own = (start + rows).div_ceil(BLOCK);
            let numbers: Vec<u32> = (blocks..blocks + own).map(|block| block as u32).collect();
            blocks += own;
            let ids: Vec<u32> = (0..rows).map(|row| ((index * 7 + row * 3) % 60) as u32).collect();
            let logits = if decodes { LogitsRows::Last } else { self.logits };
            sequences.push((ids, start, numbers, logits));
        }
        let sequences = sequences.iter().map(|(token_ids, start, blocks, logits)| SequenceStep {
            token_ids,
            start: *start,
            prompt_len: start + token_ids.len(),
            blocks,
            logits: *logits,
            scored: &[],
        });
        Ok((Step::new(sequences, BLOCK)?, blocks))
    }
}

/// Sees everything and looks at nothing.
struct Everything;

impl Observer for Everything {
    fn observe(&mut self, _: Observed, _: View<'_>) -> Result<()> {
        Ok(())
    }
}

/// Runs a step in a context and panics unless each layer launched what its plan says. `what` names the case.
///
/// # Errors
/// Any error of the step.
pub fn expect_explained(
    what: &str,
    model: &dyn CausalLm,
    shown: &ShownStep,
    context: &mut StepContext,
    ex: &Exec,
) -> Result<()> {
    let (step, blocks) = shown.build()?;
    let asks = Observe(Some(&mut Everything)).asks().filter(|_| shown.observed);
    context.whole_residual |= shown.observed;
    let asked = step.views()?.plan_step(asks, context);
    let plans = model.plan(&asked, &ex.machine());
    let log = LaunchLog::default();
    let mut logging = ex.clone().with_launch_log(Some(log.clone()));
    let mut kv = KvCache::new_on(ex.device(), &model.info().states, blocks, BLOCK)?;
    let mut everything = Everything;
    let observer = shown.observed.then_some(&mut everything as &mut dyn Observer);
    run_step(model, &step, &mut kv, observer, context, &mut logging)?;
    let launched = log.take();
    assert!(!plans.is_empty(), "{what}: the model has no plan");
    for (layer, plan) in plans.iter().enumerate() {
        let stages = [&plan.attention[..], &plan.mlp].concat();
        let of_layer = launched.iter().filter(|one| one.mark == Some(("layer", layer)));
        let got: Vec<&str> = of_layer.map(|one| one.kernel.as_str()).collect();
        assert_eq!(
            got,
            launches(&stages),
            "{what}, {shown:?}: layer {layer} launched the first, its plan says the second"
        );
    }
    Ok(())
}
