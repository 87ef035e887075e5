//! Models whose layers keep recurrent states, in the engine: states are allocated, freed and recomputed with the
//! blocks, and none reaches another sequence.

use candle_core::{DType, Device, Result};
use model_runtime::{
    CacheSizes, CausalLm, Exec, KvCache, LayerCache, LogitsRows, SequenceStep, StateCopy, Step, StepContext,
    ViewMut, run_step,
};
use moe_engine::engine::{EngineConfig, Request};
use moe_tests::load_hybrid;

use crate::invariance::{bits, sequences};
use crate::running::{Done, Results, collect, engine, requests, run};

/// Both ways of storing the input product.
const MODELS: [&str; 2] = ["qwen3-next", "qwen3_5"];

/// Nothing is taken from another sequence.
fn uncached() -> EngineConfig {
    EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() }
}

/// A cache with the states of this many sequences, and with as many bytes for blocks.
fn with_states(model: &dyn CausalLm, states: usize) -> EngineConfig {
    let bytes = 2 * states * model.info().states.bytes_per_sequence().unwrap();
    EngineConfig { kv_cache_memory: Some(bytes), ..uncached() }
}

fn alone(model: &dyn CausalLm, requests: &[Request]) -> Vec<Done> {
    requests.iter().flat_map(|r| run(model, std::slice::from_ref(r), &uncached())).collect()
}

#[test]
fn results_do_not_depend_on_how_requests_are_run() {
    for (name, dtype) in [(MODELS[0], DType::F32), (MODELS[1], DType::BF16)] {
        let model = load_hybrid(name, dtype).unwrap();
        let mut requests = requests(&model, &[5, 70, 1, 17, 40, 9], 24);
        requests[3].n = 3;
        let want = alone(&model, &requests);
        assert_ne!(want[0].tokens, want[1].tokens);
        for (seqs, tokens, block_size) in [(64, 512, 16), (64, 7, 1), (2, 3, 5), (3, 63, 7), (64, 64, 64)] {
            for ahead in [false, true] {
                let config = EngineConfig {
                    max_num_seqs: seqs,
                    max_num_batched_tokens: tokens,
                    block_size,
                    async_scheduling: ahead,
                    ..EngineConfig::default()
                };
                assert!(run(&model, &requests, &config) == want, "{name}: {config:?}");
            }
        }
    }
}

#[test]
fn few_blocks_preempt_and_few_states_wait() {
    for name in MODELS {
        let model = load_hybrid(name, DType::F32).unwrap();
        // The longest sequence fits into the blocks that a cache with this number of states has.
        for (states, seqs, prompts, tokens) in
            [(4, 4, [40, 30, 50, 20], 60), (2, 4, [20, 15, 25, 10], 40), (1, 64, [10, 8, 12, 5], 20)]
        {
            let requests = requests(&model, &prompts, tokens);
            let want = alone(&model, &requests);
            let config = EngineConfig { max_num_seqs: seqs, block_size: 8, ..with_states(&model, states) };
            let mut engine = engine(&model, &config);
            for request in &requests {
                engine.add(request.clone()).unwrap();
            }
            let mut results = Results::new();
            engine.run(|output| collect(&mut results, output)).unwrap();
            assert_eq!(results.into_values().collect::<Vec<_>>(), want, "{name}: {states} states");
            let stats = engine.stats();
            // Four sequences outgrow the blocks; a single one never does.
            assert!(states != 4 || stats.preemptions > 0, "{name}: {stats:?}");
            assert!(states != 1 || stats.preemptions == 0, "{name}: {stats:?}");
        }
    }
}

/// Rows of a sequence: `ids` from `start` on.
struct Rows<'a> {
    ids: &'a [u32],
    start: usize,
    blocks: &'a [u32],
    state: u32,
    restores: &'a [StateCopy],
    saves: &'a [StateCopy],
}

impl Rows<'_> {
    fn logits(&self, model: &dyn CausalLm, kv: &mut KvCache) -> Result<Vec<f32>> {
        let sequence = SequenceStep {
            token_ids: &self.ids[self.start..],
            start: self.start,
            prompt_len: self.ids.len(),
            blocks: self.blocks,
            logits: LogitsRows::All,
            scored: &[],
        };
        let step = Step::new([sequence], kv.block_size())?;
        let step = step.with_states(vec![self.state], self.restores.to_vec(), self.saves.to_vec())?;
        let out = run_step(model, &step, kv, None, &mut StepContext::default(), &mut Exec::cpu())?;
        Ok(out.view().cpu::<f32>()?.to_vec())
    }
}

fn poison_half(mut saved: ViewMut) -> Result<()> {
    let saved = saved.cpu_mut::<f32>()?;
    let half = saved.len() / 2;
    saved[..half].fill(f32::NAN);
    Ok(())
}

/// Fills all states, and all saved states except the one in place 1, with values that no result may depend on.
fn poison(model: &dyn CausalLm, kv: &mut KvCache) -> Result<usize> {
    let mut layers = 0;
    for layer in 0..model.info().num_layers {
        if let LayerCache::Recurrent(states) = kv.layer_mut(layer)? {
            states.conv_mut().cpu_mut::<f32>()?.fill(f32::NAN);
            states.delta_mut().cpu_mut::<f32>()?.fill(f32::NAN);
            poison_half(states.saved_conv_mut())?;
            poison_half(states.saved_delta_mut())?;
            layers += 1;
        }
    }
    Ok(layers)
}

#[test]
fn a_freed_state_reaches_no_other_sequence_and_a_saved_one_does() -> Result<()> {
    for name in MODELS {
        let model = load_hybrid(name, DType::F32)?;
        let ids = sequences(model.info().vocab_size, &[21], 3).remove(0);
        let sizes = CacheSizes { num_blocks: 8, block_size: 8, num_states: 2, num_saved: 2 };
        let mut kv = KvCache::with_sizes(&Device::Cpu, &model.info().states, sizes)?;
        let all = Rows { ids: &ids, start: 0, blocks: &[2, 4, 6], state: 1, restores: &[], saves: &[] };
        let saves = [StateCopy { state: 0, saved: 1 }];
        let first = Rows { ids: &ids[..16], blocks: &[0, 5], state: 0, saves: &saves, ..all };
        let second = Rows { start: 16, blocks: &[0, 5, 3], state: 0, ..all };
        let want = [first.logits(&model, &mut kv)?, second.logits(&model, &mut kv)?].concat();
        assert_eq!(poison(&model, &mut kv)?, 3);
        let again = all.logits(&model, &mut kv)?;
        assert!(
            bits(&[again]) == bits(std::slice::from_ref(&want)),
            "{name}: a sequence read a state that was freed"
        );

        // The blocks of the prefix are shared, and its last one is new.
        let restores = [StateCopy { state: 1, saved: 1 }];
        poison(&model, &mut kv)?;
        let shared = Rows { start: 16, blocks: &[0, 5, 7], restores: &restores, ..all };
        let rest = shared.logits(&model, &mut kv)?;
        let vocab = model.info().vocab_size;
        assert!(
            bits(&[rest]) == bits(&[want[16 * vocab..].to_vec()]),
            "{name}: a saved state is another one"
        );

        let error = Rows { state: 2, ..all }.logits(&model, &mut kv).unwrap_err().to_string();
        assert!(error.contains("has state 2, expected one below 2"), "{error}");
        let beyond = [StateCopy { state: 1, saved: 2 }];
        let error = Rows { saves: &beyond, ..all }.logits(&model, &mut kv).unwrap_err().to_string();
        assert!(error.contains("copy_states: row 1 to 2, but the arrays have"), "{error}");
    }
    Ok(())
}
