//! `inspect`: describes a checkpoint, and tests whether this program would load it, by its config, its tokenizer and
//! the headers of its files. It reads no weight. If the model is on the hub, only the headers are downloaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use indicatif::{BinaryBytes, HumanCount};
use model_runtime::checkpoint::{Configs, Gguf, TensorFiles, TensorInfo};
use model_runtime::config::Bounds;
use model_runtime::{Checkpoint, Config, Geometry, QuantConfig, SamplingParams};
use moe_engine::engine::{EngineConfig, host_memory};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{MemoryPlan, RunConfig, mtp_bytes};
use moe_layer::DType;
use moe_layer::hf::{NUM_EXPERTS, TOP_K};
use serde_json::{Map, Value, json};

use crate::Program;
use crate::cli::InspectArgs;
use crate::output::{print_foreign, write_json};
use crate::shell;
use crate::{error, fitting, hub, preflight};

/// The largest KV cache of a run without a flag for it.
const KV_CACHE: u64 = 4 << 30;
/// The width of the names in the table, in characters.
const COLUMN: usize = 18;
const ANY: Bounds = 0..=1 << 40;

/// The sizes that get a line each: the name in the table, and the keys of config.json that have the size.
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

/// Runs the command. Exit code 1 means that this program does not run the checkpoint.
pub fn run(program: &Program, args: &InspectArgs) -> Result<ExitCode> {
    let located = hub::locate(&args.model)?;
    let config = Configs::model(located.dir())?;
    let settings = RunConfig { dequantise: args.dequantise, ..RunConfig::default() };
    if args.dequantise {
        settings.held(Configs::read(located.dir())?.quantisation)?;
    }
    let headers = located.headers();
    let opened = headers.as_ref().map_err(|e| anyhow!("{e:#}"));
    let opened = opened.and_then(|headers| {
        let mut checkpoint = Checkpoint::open(headers.dir())?;
        checkpoint.quantisation = settings.held(checkpoint.quantisation)?;
        Ok(checkpoint)
    });
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
    if let Ok(model) = program.families.parse(&config)
        && let Err(why) = fitting::needs(model.as_ref(), &config, located.dir(), &settings, &mut facts)
    {
        facts.insert("to load".into(), format!("unknown: {}", error::describe(&why)).into());
    }
    if located.is_header_alone() || headers.as_ref().is_ok_and(hub::Headers::are_remote) {
        let name = shell::program();
        let model = &args.model;
        facts.insert("weights".into(), format!("not here; `{name} download {model}` fetches them").into());
    }
    if let Ok(checkpoint) = &opened {
        weights(program, checkpoint, &mut facts)?;
        quantisation(program, checkpoint, &mut facts)?;
        types(checkpoint, &mut facts)?;
        if runs.is_ok() {
            notes(program, checkpoint, &mut facts)?;
            states(program, checkpoint, &mut facts)?;
            head(program, checkpoint, &mut facts)?;
        }
        gates(program, checkpoint, &mut facts)?;
    }
    if Configs::read(located.dir()).is_ok_and(|configs| configs.quantisation.is_none()) {
        fitting::variants(program, &located, &mut facts);
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

/// The name of a fact in JSON.
fn key(name: &str) -> String {
    name.to_lowercase().replace([' ', '-'], "_")
}

/// Checks whether a run would load the checkpoint: its config, its tensors with their shapes, and its tokenizer.
///
/// # Errors
/// The error that a run would report.
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
    checkpoint.generation_config.as_ref().map(SamplingParams::from_generation_config).transpose()?;
    let tokenizer = Tokenizer::from_dir(dir).map(drop);
    tokenizer.context("there is no text without a tokenizer (--skip-tokenizer-init runs token ids)")
}

/// Adds the number, the bytes and the dtype of the tensors, and whether they fit the memory.
fn weights(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let dtype = checkpoint.dtype()?;
    facts.insert("dtype".into(), json!(dtype.as_str()));
    facts.insert("tensors".into(), checkpoint.tensors.iter().count().into());
    facts.insert(
        "parameters".into(),
        checkpoint.tensors.iter().fold(0u64, |n, t| n.saturating_add(elements(&t))).into(),
    );
    let bytes = bytes(&checkpoint.tensors);
    facts.insert("weight bytes".into(), bytes.into());
    let bytes = match program.families.parse(&checkpoint.config) {
        Ok(model) if is_dequantised(checkpoint) => {
            let plan = MemoryPlan::of(model.as_ref(), &checkpoint.config, checkpoint.quantisation.as_ref())?;
            facts.insert("weights as floats bytes".into(), plan.weights.into());
            plan.weights
        }
        _ => bytes,
    };
    if let Some(free) = host_memory() {
        facts.insert("available memory bytes".into(), free.into());
        // A run takes at most half of the memory that the weights leave, so only the weights decide whether the model
        // fits.
        facts.insert("KV cache at most bytes".into(), KV_CACHE.min(free.saturating_sub(bytes) / 2).into());
        facts.insert("fits memory".into(), (bytes < free).into());
    }
    Ok(())
}

/// Adds the method and the schemes of a quantised checkpoint, and its number of parameters. The number of stored
/// elements is smaller, because several parameters share a word.
fn quantisation(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Some(config) = &checkpoint.quantisation else { return Ok(()) };
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let tensors = model.layout(&Geometry::default(), &|name| checkpoint.has(name))?.tensors;
    let mut schemes = BTreeSet::new();
    let mut parameters = 0u64;
    for spec in &tensors {
        parameters += spec.shape.iter().map(|&dim| dim as u64).product::<u64>();
        if let Some(module) = spec.name.strip_suffix(".weight").filter(|_| spec.shape.len() == 2) {
            schemes.insert(config.format_of(module)?.scheme().to_string());
        }
    }
    schemes.remove("none");
    let schemes: Vec<_> = schemes.into_iter().collect();
    let loaded = if is_dequantised(checkpoint) { ", loaded as floats" } else { "" };
    let text = format!("{}: {}{loaded}", config.method(), schemes.join("; "));
    facts.insert("quantisation".into(), json!(text));
    facts.insert("parameters".into(), parameters.into());
    Ok(())
}

fn is_dequantised(checkpoint: &Checkpoint) -> bool {
    checkpoint.quantisation.as_ref().is_some_and(QuantConfig::is_dequantised)
}

/// Adds the types of a GGUF file's tensors. Tensors whose names differ only in numbers share a line.
fn types(checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Some(file) = checkpoint.dir().map(Gguf::find).transpose()?.flatten() else { return Ok(()) };
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    for tensor in Gguf::open(&file)?.tensors() {
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let name: Vec<_> =
            tensor.name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
        *counts.entry((name.join("."), tensor.kind)).or_default() += 1;
    }
    let line = |((name, kind), count): (&(String, String), &usize)| match count {
        1 => format!("{name} {kind}"),
        count => format!("{name} {kind} ({count})"),
    };
    facts.insert("tensor types".into(), counts.iter().map(line).collect::<Vec<_>>().join("\n").into());
    Ok(())
}

/// Adds the warnings of a run about tensors that contradict the config.
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

/// Adds what the head for multi-token prediction would take in memory, if the checkpoint has it. A run leaves it out.
fn head(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let stored = model.mtp().is_some_and(|mtp| checkpoint.has(&format!("{}.weight", mtp.names.fc)));
    if stored {
        let quantisation = checkpoint.quantisation.as_ref();
        let bytes = mtp_bytes(model.as_ref(), quantisation, checkpoint.dtype()?)?;
        facts.insert("MTP head bytes".into(), json!(bytes));
    }
    Ok(())
}

/// Says that the file has the gates of routers in f32 and that a run keeps their digits, if that is so.
fn gates(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name));
    // A model that does not run says why elsewhere.
    let (Ok(layout), Ok(dtype)) = (layout, checkpoint.dtype()) else { return Ok(()) };
    let stored = |name: &String| checkpoint.tensors.info(name).and_then(|tensor| tensor.dtype);
    if dtype != DType::F32 && layout.exact.iter().any(|name| stored(name) == Some(DType::F32)) {
        let text = format!("stored in f32, and kept in f32 where {} would round them", dtype.as_str());
        facts.insert("router gates".into(), text.into());
    }
    Ok(())
}

/// Adds what a run stores for each sequence, if that is more than the keys and values of its tokens.
fn states(program: &Program, checkpoint: &Checkpoint, facts: &mut Map<String, Value>) -> Result<()> {
    let Ok(model) = program.families.parse(&checkpoint.config) else { return Ok(()) };
    let states = model.states(&Geometry::default(), None, checkpoint.dtype()?)?;
    if states.are_recurrent() {
        facts.insert("KV cache bytes per token".into(), states.bytes_per_token()?.into());
        facts.insert("recurrent state bytes per sequence".into(), states.bytes_per_sequence()?.into());
        let context = model.decoder().max_position_embeddings();
        let saved = EngineConfig::default().saved_by_default(&states, context)?;
        facts.insert("recurrent states saved for prefixes".into(), saved.into());
    }
    Ok(())
}

/// Returns the bytes of all tensors as they are stored. For a dtype that cannot be loaded, each element counts as one
/// byte.
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
            (_, Value::String(text)) => text.replace('\n', &format!("\n{:COLUMN$} ", "")),
            (_, Value::Array(variants)) if name == fitting::VARIANTS => {
                let lines: Vec<String> = variants.iter().map(fitting::line).collect();
                lines.join(&format!("\n{:COLUMN$} ", ""))
            }
            (_, Value::Bool(is_so)) => if *is_so { "yes" } else { "no" }.to_string(),
            _ => value.to_string(),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:<COLUMN$} {shown}", name.trim_end_matches(" bytes"));
    }
    text
}
