//! Running a model for comparison: teacher forcing with every intermediate result, and greedy
//! generation. Both call the same forward as generation does.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use model_runtime::{
    BlockAllocator, CausalLm, Exec, KvCache, LogitsRows, Observed, Observer, RoutedExperts, SequenceBlocks,
    SequenceStep, Step, StepContext, View, host_logits, run_step,
};

use super::compare::argmax;
use super::reference::Reference;

/// Positions per KV block; any size gives the same bits.
const BLOCK_SIZE: usize = 16;

/// What a teacher-forced pass computed, all f32.
#[derive(Default)]
pub struct Observations {
    /// [B * T, V].
    pub logits: Vec<f32>,
    /// [B * T, H] by index, as in the reference.
    pub hidden_states: BTreeMap<usize, Vec<f32>>,
    /// [B * T, E] by decoder layer.
    pub router_logits: BTreeMap<usize, Vec<f32>>,
    /// Whether there are hidden states to compare.
    pub sees_hidden_states: bool,
}

impl Observer for Observations {
    fn observe(&mut self, what: Observed, data: View) -> candle_core::Result<()> {
        let values = data.to_f32_vec()?;
        match what {
            Observed::HiddenStates(index) => self.hidden_states.insert(index, values),
            Observed::RouterLogits(layer) => self.router_logits.insert(layer, values),
            other => candle_core::bail!("parity: expected hidden states or router logits, got {other:?}"),
        };
        Ok(())
    }

    fn sees_hidden_states(&self) -> bool {
        self.sees_hidden_states
    }
}

/// The KV cache and block tables of the reference's sequences.
struct Sequences {
    kv: KvCache,
    blocks: Vec<SequenceBlocks>,
}

impl Sequences {
    fn new(model: &dyn CausalLm, batch: usize, tokens: usize, ex: &Exec) -> Result<Self> {
        let per_sequence = tokens.div_ceil(BLOCK_SIZE);
        let mut allocator = BlockAllocator::new(batch * per_sequence)?;
        let kv = KvCache::new_on(ex.device(), &model.info().states, batch * per_sequence, BLOCK_SIZE)?;
        let mut blocks = Vec::new();
        for _ in 0..batch {
            let mut table = SequenceBlocks::new();
            anyhow::ensure!(table.reserve(tokens, BLOCK_SIZE, &mut allocator), "the KV cache is too small");
            blocks.push(table);
        }
        Ok(Self { kv, blocks })
    }

    /// The step that runs the next tokens of every sequence.
    fn step(&self, tokens: &[&[u32]], start: usize, prompt_len: usize, logits: LogitsRows) -> Result<Step> {
        let sequences = tokens.iter().zip(&self.blocks).map(|(token_ids, blocks)| SequenceStep {
            token_ids,
            start,
            prompt_len,
            blocks: blocks.as_slice(),
            logits,
            scored: &[],
        });
        Ok(Step::new(sequences, BLOCK_SIZE)?)
    }
}

/// One pass over the reference's input, all sequences at once, with the routing of `replay` if there is one.
pub fn teacher_forced(
    model: &dyn CausalLm,
    reference: &Reference,
    replay: Option<Arc<RoutedExperts>>,
    ex: &mut Exec,
) -> Result<Observations> {
    let mut sequences = Sequences::new(model, reference.batch, reference.length, ex)?;
    let tokens: Vec<&[u32]> = (0..reference.batch).map(|b| reference.sequence(b)).collect();
    let sees_hidden_states = !reference.hidden_states.is_empty();
    let mut seen = Observations { sees_hidden_states, ..Observations::default() };
    let step = sequences.step(&tokens, 0, reference.length, LogitsRows::All)?;
    let mut context = StepContext { replay, ..StepContext::default() };
    let logits = run_step(model, &step, &mut sequences.kv, Some(&mut seen), &mut context, ex)?;
    seen.logits = host_logits(model, &logits, ex)?.view().to_f32_vec()?;
    Ok(seen)
}

/// `count` greedy tokens after each sequence of the reference, [B, count]; end-of-sequence is an
/// ordinary token.
pub fn greedy(model: &dyn CausalLm, reference: &Reference, count: usize, ex: &mut Exec) -> Result<Vec<u32>> {
    let batch = reference.batch;
    let length = reference.length;
    let vocab = model.info().vocab_size;
    let mut sequences = Sequences::new(model, batch, length + count, ex)?;
    let mut generated: Vec<Vec<u32>> = vec![Vec::new(); batch];
    for n in 0..count {
        let start = if n == 0 { 0 } else { length + n - 1 };
        let tokens: Vec<&[u32]> =
            (0..batch).map(|b| if n == 0 { reference.sequence(b) } else { &generated[b][n - 1..] }).collect();
        let step = sequences.step(&tokens, start, length, LogitsRows::Last)?;
        let logits = run_step(model, &step, &mut sequences.kv, None, &mut StepContext::default(), ex)?;
        let logits = host_logits(model, &logits, ex)?;
        for (tokens, row) in generated.iter_mut().zip(logits.view().cpu::<f32>()?.chunks_exact(vocab)) {
            tokens.push(argmax(row) as u32);
        }
    }
    Ok(generated.concat())
}
