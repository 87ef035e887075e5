//! Helpers shared by the cross-crate tests: fixtures, and running a model step by step.

pub mod explained;
pub mod soak;
pub mod tensor_calls;

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result};
use candle_nn::VarBuilder;
use model_families::spec::DecoderSpec;
use model_families::{deepseek_v2, qwen3_5_moe, qwen3_moe, qwen3_next};
use model_runtime::{
    BlockAllocator, CausalLm, Checkpoint, Config, ConfigError, Decoder, Exec, Geometry, KvCache, LogitsRows,
    MlaForm, SequenceBlocks, SequenceStep, Step, StepContext, run_step,
};
use moe_engine::{LoadOptions, ModelSpec};
use moe_layer::{BlockContext, MoePath};

/// The folder of a fixture: in the sources or, without sources, in the bundle that contains this program.
pub fn fixture(name: &str) -> PathBuf {
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let bundle = || Some(std::env::current_exe().ok()?.ancestors().nth(2)?.join("tests/fixtures"));
    if sources.is_dir() { sources } else { bundle().unwrap_or(sources) }.join(name)
}

/// Loads a fixture of Qwen3-MoE in a dtype.
pub fn load(name: &str, dtype: DType) -> Result<Decoder> {
    load_on(name, MoePath::Fused, dtype)
}

/// The same as [`load`], on a path of experts.
pub fn load_on(name: &str, path: MoePath, dtype: DType) -> Result<Decoder> {
    load_family(name, dtype, qwen3_moe::read, |spec, options, vb| {
        Ok(spec.model.load(&options.decoder(path), vb)?.0)
    })
}

/// The model of a config of Qwen3-Next, or of Qwen3.5 with or without pictures.
pub fn hybrid(config: &Config) -> std::result::Result<DecoderSpec, ConfigError> {
    match config.opt_string(&["model_type"])? {
        Some("qwen3_next") => qwen3_next::read(config),
        Some("qwen3_5_moe") => qwen3_5_moe::read(config),
        _ => qwen3_5_moe::read_text(config),
    }
}

/// Loads a fixture of such a model.
pub fn load_hybrid(name: &str, dtype: DType) -> Result<Decoder> {
    load_hybrid_on(name, dtype, &Device::Cpu)
}

/// The same as [`load_hybrid`], on a device.
pub fn load_hybrid_on(name: &str, dtype: DType, device: &Device) -> Result<Decoder> {
    load_family_on(name, (dtype, device), hybrid, |spec, options, vb| {
        Ok(spec.model.load(&options.decoder(MoePath::Fused), vb)?.0)
    })
}

/// Loads a fixture of DeepSeek-V2 on a path of experts and in a form of attention.
pub fn load_deepseek(name: &str, path: MoePath, mla: MlaForm, dtype: DType) -> Result<Decoder> {
    load_family(name, dtype, deepseek_v2::read, |spec, options, vb| {
        Ok(spec.build(mla, &options.decoder(path), vb)?.0)
    })
}

/// Loads a fixture, also a quantised one, as the engine would load it for a run of one rank.
fn load_family<S: ModelSpec, M>(
    name: &str,
    dtype: DType,
    parse: impl FnOnce(&Config) -> std::result::Result<S, ConfigError>,
    load: impl FnOnce(&S, &LoadOptions, VarBuilder) -> Result<M>,
) -> Result<M> {
    load_family_on(name, (dtype, &Device::Cpu), parse, load)
}

fn load_family_on<S: ModelSpec, M>(
    name: &str,
    (dtype, device): (DType, &Device),
    parse: impl FnOnce(&Config) -> std::result::Result<S, ConfigError>,
    load: impl FnOnce(&S, &LoadOptions, VarBuilder) -> Result<M>,
) -> Result<M> {
    let checkpoint = Checkpoint::open(fixture(name))?;
    let config = parse(&checkpoint.config).map_err(Error::wrap)?;
    let layout = config.layout(&Geometry::default(), &|name| checkpoint.has(name)).map_err(Error::wrap)?;
    let expected = layout.tensors.clone();
    let tensors = checkpoint.rank_view(&expected, layout.slices_for(device));
    let context = BlockContext { quant: Some(Arc::new(tensors.clone())), ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    load(&config, &options, tensors.var_builder(dtype, device))
}

/// How a set of sequences is cut into steps.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Rows per sequence and step.
    pub chunk: usize,
    /// Positions per KV block.
    pub block_size: usize,
    /// Whether all sequences share a step, or each runs alone after the other.
    pub together: bool,
}

/// The logits of every position of every sequence, [T, V] each, computed under a schedule. KV blocks
/// are handed out interleaved, so that no sequence's blocks are contiguous.
pub fn all_logits(
    model: &dyn CausalLm,
    sequences: &[Vec<u32>],
    schedule: Schedule,
    ex: &mut Exec,
) -> Result<Vec<Vec<f32>>> {
    let needed: usize = sequences.iter().map(|s| s.len().div_ceil(schedule.block_size)).sum();
    let mut kv = KvCache::new_on(ex.device(), &model.info().states, needed, schedule.block_size)?;
    let mut allocator = BlockAllocator::new(needed)?;
    let mut tables: Vec<SequenceBlocks> = sequences.iter().map(|_| SequenceBlocks::new()).collect();
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    for blocks in 1..=longest.div_ceil(schedule.block_size) {
        for (table, sequence) in tables.iter_mut().zip(sequences) {
            let tokens = (blocks * schedule.block_size).min(sequence.len());
            assert!(table.reserve(tokens, schedule.block_size, &mut allocator));
        }
    }
    let mut logits = vec![Vec::new(); sequences.len()];
    let groups: Vec<Vec<usize>> = match schedule.together {
        true => vec![(0..sequences.len()).collect()],
        false => (0..sequences.len()).map(|s| vec![s]).collect(),
    };
    for group in groups {
        for start in (0..longest).step_by(schedule.chunk) {
            let live: Vec<usize> = group.iter().copied().filter(|&s| start < sequences[s].len()).collect();
            let parts = live.iter().map(|&s| SequenceStep {
                token_ids: &sequences[s][start..sequences[s].len().min(start + schedule.chunk)],
                start,
                prompt_len: sequences[s].len(),
                blocks: tables[s].as_slice(),
                logits: LogitsRows::All,
                scored: &[],
            });
            let step = Step::new(parts, schedule.block_size)?;
            if step.num_tokens() == 0 {
                continue;
            }
            let out = run_step(model, &step, &mut kv, None, &mut StepContext::default(), ex)?;
            let out = ex.to_host(out.view())?;
            let out = out.view();
            let vocab = model.info().vocab_size;
            for (i, &s) in live.iter().enumerate() {
                let rows = step.logits_range(i);
                logits[s].extend_from_slice(&out.cpu::<f32>()?[rows.start * vocab..rows.end * vocab]);
            }
        }
    }
    Ok(logits)
}
