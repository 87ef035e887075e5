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
    reserve_logits(model, context.most_logits, ex)?;
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

/// How many buffers of logits a step on the host's side of sampling holds at once, the gathered rows among them: ranks that share
/// the vocabulary have two more, a rank's own columns and the columns of all ranks before they are joined to rows.
pub fn logits_buffers(model: &dyn CausalLm) -> usize {
    if model.ranks().is_some_and(|ranks| ranks.cuts_vocabulary()) { 3 } else { 1 }
}

/// Leaves in the workspace of a GPU what the logits of so many rows take. It keeps each buffer that it has lent, since recorded
/// graphs hold addresses: rows that grow from step to step would each leave a buffer there, gigabytes in all.
///
/// # Errors
/// Memory that the device refuses.
pub fn reserve_logits(model: &dyn CausalLm, rows: usize, ex: &Exec) -> Result<()> {
    if rows > 0 && ex.is_cuda() {
        let dims = [rows, model.info().vocab_size];
        let buffers = (0..logits_buffers(model)).map(|_| ex.scratch(DType::F32, &dims));
        buffers.collect::<Result<Vec<_>>>()?;
    }
    Ok(())
}

/// A copy of a step's logits [R, V] f32 in host memory; an error if a rank failed before they were there.
pub fn host_logits(model: &dyn CausalLm, logits: &Scratch, ex: &Exec) -> Result<Buffer> {
    let host = ex.to_host(logits.view())?;
    if let Some(ranks) = model.ranks() {
        ranks.check()?;
    }
    Ok(host)
}
