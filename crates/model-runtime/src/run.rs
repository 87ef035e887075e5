//! Running a step on a model in host memory.

use candle_core::{DType, Result};

use moe_kernels::{Exec, Scratch};
use tracing::trace_span;

use crate::kv_cache::KvCache;
use crate::model::{CausalLm, Observer};
use crate::step::Step;

/// Executes a step on a model that runs in host memory; returns the logits, [R, V] f32.
pub fn run_step(
    model: &dyn CausalLm,
    step: &Step,
    kv: &mut KvCache,
    observer: Option<&mut dyn Observer>,
    ex: &mut Exec,
) -> Result<Scratch> {
    let vocab_size = model.info().vocab_size;
    step.check_vocab(vocab_size)?;
    ex.step.token_ids = Some(step.token_ids().into());
    let mut logits = ex.scratch(DType::F32, &[step.num_logits(), vocab_size])?;
    // The step enters the thread pool once, and not once for each op.
    let pool = ex.handle();
    pool.install(|| {
        // Inside the pool: the spans of the layers run on this thread and find their parent on it.
        let _span = trace_span!("step", tokens = step.num_tokens(), logits = step.num_logits()).entered();
        model.forward(&step.views()?, kv, logits.view_mut(), observer, ex)
    })?;
    Ok(logits)
}
