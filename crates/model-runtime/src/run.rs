//! Running a step on a model, wherever it is.

use candle_core::{DType, Result};

use moe_kernels::{Buffer, Exec, Scratch, StepContext};
use tracing::trace_span;

use crate::kv_cache::KvCache;
use crate::model::{CausalLm, LogitsOut, Observer, Scorer};
use crate::step::Step;

/// The largest number of scored rows whose logits exist at the same time. A row is the whole vocabulary in f32: 8,192
/// rows of Qwen3 would take 5 GB, these take 156 MB. 128 rows are 5 % slower, 512 are 1 % faster (docs/benchmarks.md).
pub(crate) const SCORED_PIECE: usize = 256;

/// Executes a step on a model; returns the logits, [R, V] f32, on the model's device. On a CUDA device the step's
/// arrays are copied there first. No scorer gets the logits of scored rows.
pub fn run_step(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    observer: Option<&mut dyn Observer>,
    context: &mut StepContext,
    ex: &mut Exec,
) -> Result<Scratch> {
    run(model, step, kv, (observer, None), context, ex)
}

/// The same as [`run_step`], and passes the logits of the step's scored rows to a scorer.
pub fn run_scored_step(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    scorer: &mut dyn Scorer,
    context: &mut StepContext,
    ex: &mut Exec,
) -> Result<Scratch> {
    run(model, step, kv, (None, Some(scorer)), context, ex)
}

fn run(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    (observer, scorer): (Option<&mut dyn Observer>, Option<&mut dyn Scorer>),
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
        if model.info().states.are_recurrent() {
            // Kernels cannot refuse a state that does not exist.
            step.check_states(&kv.sizes())?;
        }
        let mut words = crate::device_step::DeviceStep::new(crate::device_step::Shape::of(step).words(), ex)?;
        let views = words.upload(step, context.step, ex)?;
        kv.restore(step.restores(), ex)?;
        let out = LogitsOut::new(logits.view_mut(), scorer);
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
        kv.save(step.saves(), ex)?;
        return Ok(logits);
    }
    // The step enters the thread pool once, and not once for each op.
    let pool = ex.clone();
    pool.install_awake(|| {
        kv.restore(step.restores(), ex)?;
        // Inside the pool: the spans of the layers run on this thread and find their parent on it.
        let _span = span().entered();
        let out = LogitsOut::new(logits.view_mut(), scorer);
        model.forward(&step.views()?, kv, out, observer, context, ex)?;
        kv.save(step.saves(), ex)
    })?;
    Ok(logits)
}

/// The numbers of rows of the buffers of logits, [rows, V] f32 each, that a step of up to `rows` rows of logits and any
/// number of scored rows holds at once if the host samples: the step's logits, and a piece of scored rows. Ranks that
/// share the vocabulary have two more buffers: a rank's own columns, and the columns of all ranks before they are
/// joined to rows.
pub fn logits_rows(model: &dyn CausalLm, rows: usize) -> Vec<usize> {
    let gathers = if model.ranks().is_some_and(|ranks| ranks.cuts_vocabulary()) { 2 } else { 0 };
    let gathered = std::iter::repeat_n(rows.max(SCORED_PIECE), gathers);
    [rows, SCORED_PIECE].into_iter().chain(gathered).collect()
}

/// Reserves memory in the workspace of a GPU for the logits of `rows` rows. The workspace keeps each buffer that it has
/// lent, since recorded graphs hold addresses. If the number of rows grew from step to step, each step would leave a
/// buffer there, gigabytes in all.
///
/// # Errors
/// Memory that the device refuses.
pub fn reserve_logits(model: &dyn CausalLm, rows: usize, ex: &Exec) -> Result<()> {
    if rows > 0 && ex.is_cuda() {
        let vocab_size = model.info().vocab_size;
        let buffers = logits_rows(model, rows).into_iter();
        let buffers = buffers.map(|rows| ex.scratch(DType::F32, &[rows, vocab_size]));
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
