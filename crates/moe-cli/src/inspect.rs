//! `inspect`: what a checkpoint is, and whether this program would load it, from its config, its tokenizer and the headers of
//! its files; no weight is read. Of a model on the hub the headers are asked for.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use indicatif::{BinaryBytes, HumanCount};
use model_runtime::checkpoint::{TensorFiles, TensorInfo};
use model_runtime::config::Bounds;
use model_runtime::{Checkpoint, Config, Geometry};
use moe_engine::engine::host_memory;
use moe_engine::tokenizer::Tokenizer;
use moe_layer::hf::{NUM_EXPERTS, TOP_K};
use serde_json::{Map, Value, json};

use crate::Program;
use crate::cli::InspectArgs;
use crate::output::{print_foreign, write_json};
use crate::shell;
use crate::{error, hub, preflight};

/// The KV cache that a run takes at most where no flag says otherwise.
const KV_CACHE: u64 = 4 << 30;
const ANY: Bounds = 0..=1 << 40;

/// A line for each: what it is called, and the keys of config.json that say it.
const SIZES: [(&str, &[&str]); 9] = [
    ("layers", &["num_hidden_layers"]),
    ("hidden size", &["hidden_size"]),
    ("attention heads", &["num_attention_heads"]),
    ("key-value heads", &["num_key_value_heads"]),
    ("experts", &NUM_EXPERTS),
    ("experts per token", &TOP_K),
    ("expert width", &["moe_intermediate_size"]),
    ("vocabulary", &["vocab_size"]),
    ("context", &["max_position_embeddings"]),
];

/// Runs the command. Exit code 1: this program does not run the checkpoint.
pub fn run(program: &Program, args: &InspectArgs) -> Result<ExitCode> {
    let located = hub::locate(&args.model)?;
    let config = Config::read(&located.dir().join("config.json"))?;
    let headers = located.headers();
    let opened = headers.as_ref().map_err(|e| anyhow!("{e:#}"));
    let opened = opened.and_then(|headers| Ok(Checkpoint::open(headers.dir())?));
    let runs = verdict(program, &config, located.dir(), opened.as_ref());
    let mut facts = Map::new();
    facts.insert("model type".into(), json!(config.opt_string(&["model_type"])?));
    facts.insert("runs here".into(), runs.is_ok().into());
    if let Err(why) = &runs {
        facts.insert("why not".into(), error::describe(why).into());
    }
    for (name, keys) in SIZES {
        if let Some(size) = config.opt_size(keys, ANY)? {
            facts.insert(name.into(), size.into());
        }
    }
    if headers.as_ref().is_ok_and(hub::Headers::are_remote) {
        let name = shell::program();
        let model = &args.model;
        facts.insert("weights".into(), format!("not here; `{name} download {model}` fetches them").into());
    }
    if let Ok(checkpoint) = &opened {
        weights(checkpoint, &mut facts)?;
        quantisation(program, checkpoint, &mut facts)?;
        if runs.is_ok() {
            notes(program, checkpoint, &mut facts)?;
        }
    }
    show(args, &facts, runs.is_ok())?;
    Ok(ExitCode::from(u8::from(runs.is_err())))
}

fn show(args: &InspectArgs, facts: &Map<String, Value>, runs: bool) -> Result<()> {
    if let Some(file) = &args.json {
        let keys = facts.iter().map(|(name, value)| (key(name), value.clone()));
        return write_json(file.as_deref(), &keys.collect::<Map<_, _>>());
    }
    let kernels = format!(
        "\nWhich kernels run is known once the weights are loaded. This tells:\n  {} --model {} --prompt x \
         --max-new-tokens 1 --explain-backends\n",
        shell::program(),
        args.model
    );
    print_foreign(&(table(facts) + if runs { &kernels } else { "" })).map(drop)
}

/// What a fact is called in JSON.
fn key(name: &str) -> String {
    name.to_lowercase().replace([' ', '-'], "_")
}

/// Whether a run would load the checkpoint: its config, its tensors with their shapes, and its tokenizer.
///
/// # Errors
/// What a run would say.
fn verdict(
    program: &Program,
    config: &Config,
    dir: &Path,
    opened: Result<&Checkpoint, &anyhow::Error>,
) -> Result<()> {
    let model = program.families.parse(config)?;
    preflight::check_required(config)?;
    let checkpoint = opened.map_err(|e| anyhow!("{e:#}"))?;
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name))?;
    if let Some(quantisation) = &checkpoint.quantisation {
        layout.check_quantised(quantisation, false)?;
    }
    checkpoint.verify(&layout.tensors, model.ignored()).map(drop)?;
    let tokenizer = Tokenizer::from_dir(dir).map(drop);
    tokenizer.context("there is no text without a tokenizer (--skip-tokenizer-init runs token ids)")
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
        facts.insert("fits memory".into(), (bytes < free).into());
    }
    Ok(())
}

/// Method and schemes of a quantised checkpoint, and its parameters, of which several lie in a word.
fn quantisation(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Some(config) = &checkpoint.quantisation else { return Ok(()) };
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let tensors = model.layout(&Geometry::default(), &|name| checkpoint.has(name))?.tensors;
    let mut schemes = BTreeSet::new();
    let mut parameters = 0u64;
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
fn notes(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let tensors = model.layout(&Geometry::default(), &|name| checkpoint.has(name))?.tensors;
    let Ok(verified) = checkpoint.verify(&tensors, model.ignored()) else { return Ok(()) };
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
            (_, Value::String(text)) => text.replace('\n', "\n                   "),
            (_, Value::Bool(is_so)) => if *is_so { "yes" } else { "no" }.to_string(),
            _ => value.to_string(),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:<18} {shown}", name.trim_end_matches(" bytes"));
    }
    text
}
