//! `inspect`: what a checkpoint is, from its config and the headers of its files; no weight is read.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use indicatif::{BinaryBytes, HumanCount};
use model_runtime::checkpoint::{TensorFiles, TensorInfo};
use model_runtime::config::Bounds;
use model_runtime::{Checkpoint, Config, Geometry};
use moe_engine::ModelFamily;
use moe_engine::engine::host_memory;
use serde_json::{Map, Value, json};

use crate::cli::InspectArgs;
use crate::output::{print_foreign, write_json};
use crate::shell::program;
use crate::{hub, preflight};

/// The KV cache that a run takes at most where no flag says otherwise.
const KV_CACHE: u64 = 4 << 30;
const ANY: Bounds = 0..=1 << 40;

/// A line for each: what it is called, and the keys of config.json that say it.
const SIZES: [(&str, &[&str]); 9] = [
    ("layers", &["num_hidden_layers"]),
    ("hidden size", &["hidden_size"]),
    ("attention heads", &["num_attention_heads"]),
    ("key-value heads", &["num_key_value_heads"]),
    ("experts", &["num_experts", "num_local_experts", "n_routed_experts"]),
    ("experts per token", &["num_experts_per_tok"]),
    ("expert width", &["moe_intermediate_size"]),
    ("vocabulary", &["vocab_size"]),
    ("context", &["max_position_embeddings"]),
];

/// Runs the command.
pub fn run<F: ModelFamily>(args: &InspectArgs) -> Result<()> {
    let located = hub::locate(&args.model)?;
    let config = Config::read(&located.dir().join("config.json"))?;
    let mut facts = Map::new();
    facts.insert("model type".into(), json!(config.opt_string(&["model_type"])?));
    let runs = preflight::config::<F>(&config);
    facts.insert("runs here".into(), runs.map_or_else(|e| json!(format!("no: {e}")), |_| json!("yes")));
    for (name, keys) in SIZES {
        if let Some(size) = config.opt_size(keys, ANY)? {
            facts.insert(name.into(), size.into());
        }
    }
    match Checkpoint::open(located.dir()) {
        Ok(checkpoint) => {
            weights(&checkpoint, &mut facts)?;
            quantisation::<F>(&checkpoint, &mut facts)?;
            notes::<F>(&checkpoint, &mut facts)?;
        }
        Err(e) => drop(facts.insert("weights".into(), json!(lacking(&args.model, &e)))),
    }
    if args.json {
        return write_json(None, &facts);
    }
    let kernels = format!(
        "\nWhich kernels run is known once the weights are loaded. This tells:\n  {} --model {} --prompt x \
         --max-new-tokens 1 --explain-backends\n",
        program(),
        args.model
    );
    print_foreign(&(table(&facts) + &kernels)).map(drop)
}

/// What to say where the weights cannot be opened. Weights on the hub are one command away.
fn lacking(model: &str, error: &dyn std::fmt::Display) -> String {
    match Path::new(model).is_dir() {
        true => format!("not here or not whole: {error}"),
        false => format!("not here or not whole; `{} download {model}` fetches what is missing", program()),
    }
}

/// Number, bytes and dtype of the tensors, and whether they fit the memory.
fn weights(checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let dtype = checkpoint.dtype()?;
    facts.insert("dtype".into(), json!(dtype.as_str()));
    facts.insert("tensors".into(), checkpoint.tensors.iter().count().into());
    facts.insert(
        "parameters".into(),
        checkpoint.tensors.iter().fold(0u64, |n, t| n.saturating_add(elements(&t))).into(),
    );
    let bytes = bytes(&checkpoint.tensors);
    facts.insert("weight bytes".into(), bytes.into());
    if let Some(free) = host_memory() {
        facts.insert("available memory bytes".into(), free.into());
        // As a run sizes its KV cache: of what the weights leave, so that only these decide.
        facts.insert("KV cache at most bytes".into(), KV_CACHE.min(free.saturating_sub(bytes) / 2).into());
        facts.insert("fits memory".into(), json!(if bytes < free { "yes" } else { "no" }));
    }
    Ok(())
}

/// Method and schemes of a quantised checkpoint, and its parameters, of which several lie in a word.
fn quantisation<F: ModelFamily>(checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Some(config) = &checkpoint.quantisation else { return Ok(()) };
    let Ok(family) = F::config(&checkpoint.config) else { return Ok(()) };
    let tensors = F::layout(&family, &Geometry::default(), &|name| checkpoint.has(name))?.tensors;
    let (mut schemes, mut parameters) = (BTreeSet::new(), 0u64);
    for spec in &tensors {
        parameters += spec.shape.iter().map(|&dim| dim as u64).product::<u64>();
        if let Some(module) = spec.name.strip_suffix(".weight").filter(|_| spec.shape.len() == 2) {
            schemes.insert(config.scheme_of(module)?.to_string());
        }
    }
    schemes.remove("none");
    let schemes: Vec<_> = schemes.into_iter().collect();
    facts.insert("quantisation".into(), json!(format!("{}: {}", config.method(), schemes.join("; "))));
    facts.insert("parameters".into(), parameters.into());
    Ok(())
}

/// What a run would tell of tensors that contradict the config.
fn notes<F: ModelFamily>(checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Ok(family) = F::config(&checkpoint.config) else { return Ok(()) };
    let tensors = F::layout(&family, &Geometry::default(), &|name| checkpoint.has(name))?.tensors;
    let Ok(verified) = checkpoint.verify(&tensors, F::ignored(&family)) else { return Ok(()) };
    let notes: Vec<String> = verified.warnings().collect();
    if !notes.is_empty() {
        facts.insert("notes".into(), json!(notes.join("\n")));
    }
    Ok(())
}

/// Bytes of all tensors as they are stored. A dtype that cannot be loaded counts a byte for each element.
fn bytes(tensors: &TensorFiles) -> u64 {
    let size =
        |t: &TensorInfo| elements(t).saturating_mul(t.dtype.map_or(1, |dtype| dtype.size_in_bytes() as u64));
    tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(size(&tensor)))
}

fn elements(tensor: &TensorInfo) -> u64 {
    tensor.shape.iter().fold(1, |n, &dim| n.saturating_mul(dim as u64))
}

fn table(facts: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (name, value) in facts {
        let shown = match (name.strip_suffix(" bytes"), value) {
            (Some(_), Value::Number(n)) => BinaryBytes(n.as_u64().unwrap_or_default()).to_string(),
            (None, Value::Number(n)) => HumanCount(n.as_u64().unwrap_or_default()).to_string(),
            (_, Value::String(text)) => text.clone(),
            _ => value.to_string(),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:<18} {shown}", name.trim_end_matches(" bytes"));
    }
    text
}
