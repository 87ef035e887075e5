//! Where a prompt of a model with recurrent states is cut, and whether its tokens were decoded one by one, changes no
//! bit: of the logits of any row, and of the states that are left at the end.

use candle_core::{DType, Result};
use model_runtime::{
    CacheSizes, CausalLm, CpuIsa, Exec, KvCache, LayerCache, LogitsRows, SequenceStep, Step, StepContext,
    ViewMut, run_step,
};
use moe_tests::load_hybrid;

use crate::invariance::sequences;

/// Both ways of storing the input product, and both dtypes.
const MODELS: [(&str, DType); 3] =
    [("qwen3-next", DType::F32), ("qwen3-next", DType::BF16), ("qwen3_5", DType::BF16)];
const BLOCK: usize = 16;
/// Positions of the longest sequence here, as the config of the models says.
const CONTEXT: usize = 512;

/// One sequence in a cache of its own.
struct Run<'a> {
    model: &'a dyn CausalLm,
    kv: KvCache,
    blocks: Vec<u32>,
    ex: Exec,
}

impl<'a> Run<'a> {
    fn new(model: &'a dyn CausalLm, isa: CpuIsa) -> Result<Self> {
        let num_blocks = CONTEXT / BLOCK;
        let sizes = CacheSizes { num_blocks, block_size: BLOCK, num_states: 1, num_saved: 0 };
        let ex = Exec::cpu().with_isa(isa)?.with_threads(1)?;
        let kv = KvCache::with_sizes(ex.device(), &model.info().states, sizes)?;
        Ok(Self { model, kv, blocks: (0..num_blocks as u32).rev().collect(), ex })
    }

    /// The logits of all rows of a step that computes `ids` from position `start` on.
    fn step(&mut self, ids: &[u32], start: usize) -> Result<Vec<f32>> {
        let sequence = SequenceStep {
            token_ids: ids,
            start,
            prompt_len: 1,
            blocks: &self.blocks,
            logits: LogitsRows::All,
            scored: &[],
        };
        let step = Step::new([sequence], BLOCK)?.with_states(vec![0], Vec::new(), Vec::new())?;
        let context = &mut StepContext::default();
        let out = run_step(self.model, &step, &mut self.kv, None, context, &mut self.ex)?;
        Ok(out.view().cpu::<f32>()?.to_vec())
    }

    /// The bits of the recurrent states of all layers.
    fn states(&mut self) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for layer in 0..self.model.info().num_layers {
            if let LayerCache::Recurrent(states) = self.kv.layer_mut(layer)? {
                all.extend(bits(&floats(states.conv_mut())?));
                all.extend(bits(&floats(states.delta_mut())?));
            }
        }
        Ok(all)
    }
}

fn floats(mut view: ViewMut) -> Result<Vec<f32>> {
    Ok(view.cpu_mut::<f32>()?.to_vec())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn isas() -> impl Iterator<Item = CpuIsa> {
    CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// Logits of all rows, and the states at the end, of a sequence that is cut at these positions.
fn in_pieces(model: &dyn CausalLm, isa: CpuIsa, ids: &[u32], cuts: &[usize]) -> Result<[Vec<u32>; 2]> {
    let mut run = Run::new(model, isa)?;
    let mut logits = Vec::new();
    let mut start = 0;
    for &end in cuts.iter().chain([&ids.len()]) {
        logits.extend(bits(&run.step(&ids[start..end], start)?));
        start = end;
    }
    Ok([logits, run.states()?])
}

/// A prompt of 131 tokens, cut in two after each of its first 130, and in three and more around the multiples of 64
/// tokens, by which other implementations cut it.
#[test]
fn a_prompt_may_be_cut_anywhere() -> Result<()> {
    let twice = (1..=130).map(|cut| vec![cut]);
    let around = [vec![63, 127], vec![64, 128], vec![65, 129], vec![63, 64, 65], vec![1, 2, 127, 128, 129]];
    let cuts: Vec<Vec<usize>> = twice.chain(around).collect();
    for (name, dtype) in MODELS {
        let model = load_hybrid(name, dtype)?;
        let ids = sequences(model.info().vocab_size, &[131], 11).remove(0);
        for isa in isas() {
            let whole = in_pieces(&model, isa, &ids, &[])?;
            assert!(whole[1].iter().any(|&bits| bits != 0), "states are written");
            for cuts in &cuts {
                let pieces = in_pieces(&model, isa, &ids, cuts)?;
                let isa = isa.name();
                assert!(pieces[0] == whole[0], "{name} {dtype:?} {isa}: cut at {cuts:?}, other logits");
                assert!(pieces[1] == whole[1], "{name} {dtype:?} {isa}: cut at {cuts:?}, other states");
            }
        }
    }
    Ok(())
}

/// 512 positions, each computed by itself with the token that was likeliest after the one before it; then all of them
/// at once.
#[test]
fn decoding_has_the_bits_of_a_prompt() -> Result<()> {
    for (name, dtype) in MODELS {
        let model = load_hybrid(name, dtype)?;
        for isa in isas() {
            let mut run = Run::new(&model, isa)?;
            let mut ids = vec![7];
            let mut decoded = Vec::new();
            for position in 0..CONTEXT {
                let logits = run.step(&ids[position..], position)?;
                let likeliest = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
                ids.push(likeliest.map_or(0, |(token, _)| token as u32));
                decoded.extend(bits(&logits));
            }
            ids.truncate(CONTEXT);
            let [logits, states] = in_pieces(&model, isa, &ids, &[])?;
            let isa = isa.name();
            assert!(decoded == logits, "{name} {dtype:?} {isa}: other logits");
            assert!(run.states()? == states, "{name} {dtype:?} {isa}: other states");
        }
    }
    Ok(())
}
