//! Running steps: the bits of logits do not depend on how a sequence is cut into steps.

use candle_core::{DType, Result};
use model_runtime::{
    CausalLm, Exec, KvCache, LogitsRows, Observed, Observer, SequenceStep, Step, StepContext, View, run_step,
};

use crate::tiny::{Tiny, VOCAB};

const DYNAMIC: &str = r#"{"rope_scaling": {"type": "dynamic", "factor": 4.0}}"#;

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + i * seed + seed) % VOCAB as u32).collect()
}

/// Collects logits and hidden states by position.
#[derive(Default)]
struct Seen(Vec<(Observed, Vec<f32>)>);

impl Observer for Seen {
    fn observe(&mut self, what: Observed, data: View) -> Result<()> {
        self.0.push((what, data.cpu::<f32>()?.to_vec()));
        Ok(())
    }
}

/// Logits of all positions of a sequence that is run in parts, [T * V].
fn teacher_forced(
    model: &Tiny,
    tokens: &[u32],
    cuts: &[usize],
    ex: &mut Exec,
    mut seen: Option<&mut Seen>,
) -> Result<Vec<f32>> {
    let mut kv = KvCache::new(&model.info().states, 20, 8)?;
    let blocks: Vec<u32> = (0..20).rev().collect();
    let mut logits = Vec::new();
    let mut start = 0;
    for &end in cuts.iter().chain([&tokens.len()]) {
        let step = Step::new(
            [SequenceStep {
                token_ids: &tokens[start..end],
                start,
                prompt_len: tokens.len(),
                blocks: &blocks,
                logits: LogitsRows::All,
                scored: &[],
            }],
            8,
        )?;
        let observer = seen.as_deref_mut().map(|s| s as &mut dyn Observer);
        let context = &mut StepContext::default();
        logits.extend(run_step(model, &step, &mut kv, observer, context, ex)?.view().cpu::<f32>()?);
        start = end;
    }
    Ok(logits)
}

#[test]
fn logits_bits_do_not_depend_on_chunking_threads_or_observer() -> Result<()> {
    let model = Tiny::new(DType::F32, DYNAMIC, None)?;
    let tokens = prompt(9, 90);
    let whole = teacher_forced(&model, &tokens, &[], &mut Exec::cpu().with_threads(1)?, None)?;
    assert_eq!(whole.len(), 90 * VOCAB);
    let every: Vec<usize> = (1..90).collect();
    for cuts in [&[1usize][..], &[64], &[3, 65, 66], &every] {
        assert!(teacher_forced(&model, &tokens, cuts, &mut Exec::cpu(), None)? == whole, "{cuts:?}");
    }
    let mut seen = Seen::default();
    let observed = teacher_forced(&model, &tokens, &[], &mut Exec::cpu().with_threads(3)?, Some(&mut seen))?;
    assert!(observed == whole);
    let kinds: Vec<Observed> = seen.0.iter().map(|(what, _)| *what).collect();
    assert_eq!(kinds, [0, 1, 2].map(Observed::HiddenStates));
    assert!(seen.0.iter().all(|(_, rows)| rows.len() == 90 * model.info().hidden_size));
    Ok(())
}
