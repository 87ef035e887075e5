//! Helpers: the checkpoints of this repository, and functions that read quantised checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use model_runtime::{
    BlockContext, CausalLm, Checkpoint, Exec, Geometry, KvCache, LogitsRows, SequenceStep, Step, StepContext,
    host_logits, run_step,
};
use moe_engine::LoadOptions;
use moe_quant::safetensors::SafeTensors;
use moe_quant::{Format, QuantConfig, QuantGroup, Reader, dequantise};
use moe_quantize::{FileFormat, Indivisible, Method, Settings};
use serde_json::Value;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the folder of the small trained Qwen3-MoE checkpoint.
pub fn bundled() -> PathBuf {
    repository().join("models/families/checkpoint")
}

pub fn fixture(name: &str) -> PathBuf {
    repository().join("tests/fixtures").join(name)
}

pub fn settings(format: FileFormat, bits: u8, group: QuantGroup) -> Settings {
    Settings {
        format,
        bits,
        group,
        symmetric: true,
        desc_act: false,
        method: Method::Rtn,
        lm_head: false,
        ignore: Vec::new(),
        indivisible: Indivisible::Refuse,
    }
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the names of the safetensors files of a folder, in order.
pub fn weight_files(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        names.filter(|name| name.ends_with(".safetensors") && name.starts_with("model")).collect();
    names.sort();
    names
}

/// Reads every tensor of a folder: dtype, shape and bytes.
pub fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for file in weight_files(dir) {
        let bytes = std::fs::read(dir.join(file)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let tensor = (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec());
            assert!(found.insert(name, tensor).is_none());
        }
    }
    found
}

/// Returns the format and the weights of a module of a quantised checkpoint.
pub fn weights(dir: &Path, module: &str, (n, k): (usize, usize)) -> (Format, Vec<f32>) {
    let config = QuantConfig::from_json(&json(&dir.join("config.json"))).unwrap().unwrap();
    let format = config.format_of(module).unwrap();
    for file in weight_files(dir) {
        let bytes = std::fs::read(dir.join(file)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let find = |suffix: &str| file.tensor(&format!("{module}.{suffix}")).ok();
        if let Ok(reader) = Reader::new(module, format, (n, k), find) {
            return (format, dequantise(&reader).unwrap());
        }
    }
    panic!("{module} is in no file of {}", dir.display())
}

/// Returns the floats of the bytes of a BF16 tensor.
pub fn bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
}

/// Returns the error of a call that must fail, with its causes.
pub fn error<T>(result: anyhow::Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => format!("{error:#}"),
    }
}

/// Loads a folder or a GGUF file as the engine does.
pub fn loaded(path: &Path, dtype: DType) -> Box<dyn CausalLm> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let model = model_families::ALL.parse(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    checkpoint.verify(&layout.tensors, model.ignored()).unwrap();
    let view = checkpoint.rank_view(&layout.tensors, Vec::new());
    let context =
        BlockContext { quant: Some(std::sync::Arc::new(view.clone())), ..LoadOptions::default().context };
    let options = LoadOptions { context, ..LoadOptions::default() };
    model.load(&options, view.var_builder(dtype, &Device::Cpu)).unwrap().model
}

/// Returns the logits of all positions of a prompt of at most 64 tokens.
pub fn logits_of(model: &dyn CausalLm, ids: &[u32]) -> Vec<f32> {
    let mut ex = Exec::cpu();
    let mut cache = KvCache::new_on(ex.device(), &model.info().states, 1, 64).unwrap();
    let sequence = SequenceStep {
        token_ids: ids,
        start: 0,
        prompt_len: ids.len(),
        blocks: &[0],
        logits: LogitsRows::All,
        scored: &[],
    };
    let step = Step::new([sequence], 64).unwrap();
    let logits = run_step(model, &step, &mut cache, None, &mut StepContext::default(), &mut ex).unwrap();
    let logits = host_logits(model, &logits, &ex).unwrap();
    logits.view().cpu::<f32>().unwrap().to_vec()
}
