//! Writes random checkpoints with the shapes of a config, plain or quantised. They are used to measure models without
//! downloading them.
//!
//! Random words are already packed integers: every word of 32 random bits holds 8 int4 or 4 int8 values. The scales are
//! chosen such that weights have the standard deviation 0.02, as in most models at the start of their training.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use half::{bf16, f16};
use model_runtime::{Config, DummyWeights, Geometry, TensorSpec};
use moe_quant::write::StoredSpec;
use moe_quant::{Format, GptqZeros, IntFormat};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::model::{QUANTISATION_KEYS, model_of};
use crate::plan::{Item, Linear, plan};
use crate::progress;
use crate::settings::{FileFormat, Settings};
use crate::source::read_config;
use crate::write::{CheckpointWriter, Files};

/// The standard deviation of the weights.
const STD: f64 = 0.02;
/// The approximate number of bytes of a file. The shards of models on the hub have this size.
const SHARD: usize = 4 << 30;
/// The number of words that are generated at once.
const PIECE: usize = 1 << 16;

/// The settings of a random checkpoint.
#[derive(Clone, Debug)]
pub struct RandomSettings {
    /// How it is quantised, or `None` if it is not.
    pub quantised: Option<Settings>,
    /// The dtype of the tensors that stay in floats. `None` is the dtype of the config, or BF16 if the config has none.
    pub dtype: Option<DType>,
    /// The number of layers, which replaces the config's.
    pub layers: Option<usize>,
    /// The seed of the random weights.
    pub seed: u64,
}

/// Writes random weights for the config.json at `config` to the folder `out`. If `config` is a folder, its config.json
/// is read and its tokenizer is copied. `out` appears when it is complete. Memory holds at most one float tensor.
/// Linear layers are written in pieces.
///
/// # Errors
/// The model refuses the config, sizes do not fit the format, `out` exists, or there is too little space.
pub fn random_checkpoint(config: &Path, out: &Path, settings: &RandomSettings) -> Result<()> {
    let companions = config.is_dir().then_some(config);
    let file = if config.is_dir() { config.join("config.json") } else { config.to_path_buf() };
    let label = file.display().to_string();
    let config = read_config(&file)?;
    let named = Config::parse(&config.to_string(), &label)?.dtype()?;
    let mut config = changed(config, settings.layers, &file)?;
    if settings.quantised.as_ref().is_some_and(|quantised| quantised.lm_head) {
        config["tie_word_embeddings"] = json!(false);
    }
    let model = model_of(&config, &label)?;
    let (dtype, float) = match settings.dtype.or(named).unwrap_or(DType::BF16) {
        DType::F32 => (Dtype::F32, DType::F32),
        DType::F16 => (Dtype::F16, DType::F16),
        DType::BF16 => (Dtype::BF16, DType::BF16),
        other => bail!("a random checkpoint is in f32, f16 or bf16, not in {}", other.as_str()),
    };
    let specs = model.layout(&Geometry::default(), &|_| false)?.tensors;
    let (items, outputs) = match &settings.quantised {
        None => {
            let items: Vec<Item> =
                specs.iter().map(|s| Item { source: s.clone(), linears: Vec::new() }).collect();
            let copied = items.iter().map(|item| plain(item, dtype)).collect();
            (items, copied)
        }
        Some(quantised) if quantised.desc_act && quantised.format == FileFormat::CompressedTensors => {
            bail!("`desc_act`: groups in a random order are of the format gptq; use `format` gptq")
        }
        Some(quantised) => {
            let plan = plan(specs.clone(), &model.decoder().names, false, quantised)?;
            config["quantization_config"] = plan.header;
            let outputs =
                plan.items.iter().map(|item| item.outputs(quantised, dtype)).collect::<Result<Vec<_>>>()?;
            (plan.items, outputs)
        }
    };
    config["torch_dtype"] = json!(dtype_name(dtype));
    let mut writer = CheckpointWriter::create(out, &shards(&outputs))?;
    let dummy = DummyWeights::new(specs, settings.seed).var_builder(float, &Device::Cpu);
    let bar = progress::bar("tensors", items.len());
    for (item, outputs) in items.iter().zip(&outputs) {
        match item.linears.as_slice() {
            [linear] => random_linear(&mut writer, linear, outputs, settings.seed)?,
            _ => {
                let TensorSpec { name, shape } = &item.source;
                let tensor = dummy.get(shape.as_slice(), name)?.flatten_all()?;
                let len = tensor.elem_count();
                writer.write_with(name, |out| {
                    for first in (0..len).step_by(PIECE) {
                        let piece = tensor.narrow(0, first, PIECE.min(len - first))?;
                        out.write_all(&crate::job::bytes(&piece, dtype)?)?;
                    }
                    Ok(())
                })?;
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(dir) = companions {
        writer.copy_companions(dir)?;
    }
    writer.finish(&config)
}

/// Returns the config without quantisation and with this number of layers. Its dtype is written as `torch_dtype`, which
/// all versions of transformers read.
fn changed(mut config: Value, layers: Option<usize>, file: &Path) -> Result<Value> {
    let map = config.as_object_mut().with_context(|| format!("{}: expected an object", file.display()))?;
    QUANTISATION_KEYS.iter().for_each(|key| drop(map.remove(*key)));
    map.remove("dtype");
    if let Some(layers) = layers {
        map.insert("num_hidden_layers".to_string(), json!(layers));
    }
    Ok(config)
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        _ => "bfloat16",
    }
}

fn plain(item: &Item, dtype: Dtype) -> Vec<(String, StoredSpec)> {
    let spec = StoredSpec { suffix: "", dtype, shape: item.source.shape.clone() };
    vec![(item.source.name.clone(), spec)]
}

/// Distributes the tensors over files.
fn shards(outputs: &[Vec<(String, StoredSpec)>]) -> Files {
    let mut parts = vec![Vec::new()];
    let mut bytes = 0;
    for tensors in outputs {
        let more: usize = tensors.iter().map(|(_, spec)| spec.len()).sum();
        if bytes > 0 && bytes + more > SHARD {
            parts.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        if let Some(part) = parts.last_mut() {
            part.extend(tensors.iter().cloned());
        }
    }
    let count = parts.len();
    let name = |at: usize| match count {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
    };
    parts.into_iter().enumerate().map(|(at, part)| (name(at), part)).collect()
}

fn random_linear(
    writer: &mut CheckpointWriter,
    linear: &Linear,
    outputs: &[(String, StoredSpec)],
    seed: u64,
) -> Result<()> {
    let Some(int) = linear.format.int() else { bail!("{}: not in integers", linear.module) };
    for (name, spec) in outputs {
        let mut random = Random::new(seed, name);
        writer.write_with(name, |out| match spec.suffix {
            "qweight" => random.fill(out, spec.len(), centred(int)),
            "weight_packed" => packed_rows(out, &mut random, int, linear),
            "qzeros" | "weight_zero_point" => {
                let zeros = zero_words(linear.format, int);
                random.fill(out, spec.len(), zeros)
            }
            "scales" | "weight_scale" => scales(out, &mut random, int, spec),
            "weight_shape" => {
                let sizes = [linear.n, linear.k];
                Ok(out.write_all(&sizes.map(|size| (size as i64).to_le_bytes()).concat())?)
            }
            _ => order(out, &mut random, int, linear),
        })?;
    }
    Ok(())
}

/// Writes rows of words. If a row does not fill its last word, the word ends in zeros.
fn packed_rows(out: &mut dyn Write, random: &mut Random, int: IntFormat, linear: &Linear) -> Result<()> {
    let size = int.per_word();
    let width = linear.k.div_ceil(int.per_word());
    let used = linear.k - (width - 1) * size;
    let last = u32::MAX >> (32 - used * usize::from(int.bits));
    let mut at = 0;
    let centred = centred(int);
    random.fill(out, linear.n * width * 4, |word| {
        let word = centred(word);
        at = (at + 1) % width;
        if at == 0 { word & last } else { word }
    })
}

/// Returns a function that changes a random word. If the zero point is the middle of the range, it replaces the integer
/// 0 by the middle. The mean of 1 to 15 is 8, but the mean of 0 to 15 is half a step lower. A matrix whose weights have
/// a mean different from zero adds the same value to all of its outputs. After some layers every token would then have
/// the same hidden state and the same experts.
fn centred(int: IntFormat) -> impl Fn(u32) -> u32 {
    let bits = u32::from(int.bits);
    let ones = u32::MAX / ((1 << int.bits) - 1);
    move |word| {
        if int.zero_point {
            return word;
        }
        let any = (0..bits).fold(0, |any, bit| any | word >> bit) & ones;
        word | (ones ^ any) << (bits - 1)
    }
}

/// Returns a function that replaces random words by words of zero points in the middle. In an asymmetric format half of
/// the zero points are one lower. Subtracting one from them, as version 1 does, never borrows from a neighbour.
fn zero_words(format: Format, int: IntFormat) -> impl Fn(u32) -> u32 {
    let ones = u32::MAX / ((1 << int.bits) - 1);
    let stored_less = u32::from(matches!(format, Format::Gptq { zeros: GptqZeros::V1, .. }));
    let middle = ones * (u32::from(int.middle()) - stored_less);
    move |word| if int.zero_point { middle - (word & ones) } else { middle }
}

/// Writes scales around the value at which such integers have the standard deviation [`STD`].
fn scales(out: &mut dyn Write, random: &mut Random, int: IntFormat, spec: &StoredSpec) -> Result<()> {
    let values = f64::from(1u32 << int.bits);
    let variance = if int.zero_point { values * values - 1.0 } else { (values - 1.0) * (values - 2.0) };
    let mean = STD / (variance / 12.0).sqrt();
    let mut piece = Vec::with_capacity(PIECE);
    for _ in 0..spec.shape.iter().product::<usize>() {
        let scale = (mean * (0.75 + 0.5 * f64::from(random.word()) / f64::from(u32::MAX))) as f32;
        match spec.dtype {
            Dtype::F32 => piece.extend(scale.to_le_bytes()),
            Dtype::BF16 => piece.extend(bf16::from_f32(scale).to_le_bytes()),
            _ => piece.extend(f16::from_f32(scale).to_le_bytes()),
        }
        if piece.len() >= PIECE {
            out.write_all(&piece)?;
            piece.clear();
        }
    }
    Ok(out.write_all(&piece)?)
}

/// Writes the group of each column, either in order or shuffled.
fn order(out: &mut dyn Write, random: &mut Random, int: IntFormat, linear: &Linear) -> Result<()> {
    let size = linear.format.scheme().group_size(linear.k);
    let mut groups: Vec<u32> = (0..linear.k).map(|column| (column / size) as u32).collect();
    if int.act_order {
        (1..linear.k).rev().for_each(|at| groups.swap(at, random.word() as usize % (at + 1)));
    }
    Ok(out.write_all(&groups.iter().flat_map(|group| group.to_le_bytes()).collect::<Vec<_>>())?)
}

/// The random number generator SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    /// Starts from the FNV-1a hash of the name (Fowler, Noll, Vo). The seed is part of the hash's initial state.
    fn new(seed: u64, name: &str) -> Self {
        let step = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, step))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn word(&mut self) -> u32 {
        (self.next() >> 32) as u32
    }

    /// Writes `bytes` bytes of random words, each changed by `change`.
    fn fill(&mut self, out: &mut dyn Write, bytes: usize, mut change: impl FnMut(u32) -> u32) -> Result<()> {
        let mut piece = Vec::with_capacity(4 * PIECE);
        let mut left = bytes / 4;
        while left > 0 {
            piece.clear();
            for _ in 0..left.min(PIECE).div_ceil(2) {
                let two = self.next();
                piece.extend(change(two as u32).to_le_bytes());
                piece.extend(change((two >> 32) as u32).to_le_bytes());
            }
            let words = left.min(PIECE);
            out.write_all(&piece[..4 * words])?;
            left -= words;
        }
        Ok(())
    }
}
