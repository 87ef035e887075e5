//! Running a step on a model, wherever it is.

use candle_core::{DType, Result};

use moe_kernels::{Buffer, Exec, Scratch, StepContext};
use tracing::trace_span;

use crate::kv_cache::KvCache;
use crate::model::{CausalLm, Observer};
use crate::step::Step;

/// Executes a step on a model; returns the logits, [R, V] f32, where the model is. On a CUDA device
/// the step's arrays are copied there first.
pub fn run_step(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    observer: Option<&mut dyn Observer>,
    context: &mut StepContext,
    ex: &mut Exec,
) -> Result<Scratch> {
    let vocab_size = model.info().vocab_size;
    step.check_vocab(vocab_size)?;
    context.token_ids = Some(step.token_ids().into());
    context.whole_residual |= observer.as_ref().is_some_and(|observer| observer.sees_hidden_states());
    if let Some(ranks) = model.ranks() {
        ranks.begin(step, None, kv, None, context)?;
    }
    let mut logits = ex.scratch(DType::F32, &[step.num_logits(), vocab_size])?;
    let span = || trace_span!("step", tokens = step.num_tokens(), logits = step.num_logits());
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let _span = span().entered();
        let mut words = crate::device_step::DeviceStep::new(crate::device_step::Shape::of(step).words(), ex)?;
        let views = words.upload(step, context.step, ex)?;
        let out = logits.view_mut();
        let forward = |context: &mut StepContext, ex: &mut Exec| {
            model.forward(&views.step, kv, out, observer, context, ex)
        };
        match model.info().moe.as_ref().filter(|_| context.asks_of_router().is_some()) {
            Some(moe) => {
                let rows = step.num_tokens();
                crate::device_routing::with_arrays(moe, rows, views.number, context, ex, forward)?
            }
            None => forward(context, ex)?,
        }
        return Ok(logits);
    }
    // The step enters the thread pool once, and not once for each op.
    let pool = ex.clone();
    pool.install_awake(|| {
        // Inside the pool: the spans of the layers run on this thread and find their parent on it.
        let _span = span().entered();
        model.forward(&step.views()?, kv, logits.view_mut(), observer, context, ex)
    })?;
    Ok(logits)
}

/// A copy of a step's logits [R, V] f32 in host memory; an error if a rank failed before they were there.
pub fn host_logits(model: &dyn CausalLm, logits: &Scratch, ex: &Exec) -> Result<Buffer> {
    let host = ex.to_host(logits.view())?;
    if let Some(ranks) = model.ranks() {
        ranks.check()?;
    }
    Ok(host)
}
