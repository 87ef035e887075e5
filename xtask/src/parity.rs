//! `cargo xtask parity`: the models against Hugging Face transformers.
//!
//! Each case is a checkpoint folder and a reference recorded by tests/reference. The binary
//! that the checkpoint's `model_type` names is built and run once per dtype; it compares and
//! judges, this task collects. Without arguments every fixture runs in f32 and bf16.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::workspace::{self, cargo, root};

/// Which package runs a checkpoint, by the `model_type` of its config.json.
const MODELS: &[(&str, &str)] = &[("qwen3_moe", "model-qwen3moe")];

#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder (default: every fixture).
    #[arg(long, requires = "reference")]
    model: Option<PathBuf>,
    /// Recorded reference of that checkpoint.
    #[arg(long, requires = "model")]
    reference: Option<PathBuf>,
    /// Device to run on.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Dtype to run in (default: f32 and bf16).
    #[arg(long)]
    dtype: Option<String>,
    /// Print the results as a JSON array on stdout.
    #[arg(long)]
    json: bool,
    /// Further flags for the model binary.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<String>,
}

struct Case {
    name: String,
    model: PathBuf,
    reference: PathBuf,
    package: &'static str,
}

pub fn run(args: &Args) -> Result<()> {
    let cases = match (&args.model, &args.reference) {
        (Some(model), Some(reference)) => vec![case(model, reference)?],
        _ => fixtures()?,
    };
    let dtypes: Vec<&str> = args.dtype.as_deref().map_or(vec!["f32", "bf16"], |d| vec![d]);
    let mut packages: Vec<&str> = cases.iter().map(|c| c.package).collect();
    packages.dedup();
    for package in packages {
        workspace::run(cargo().args(["build", "--release", "-q", "-p", package]))?;
    }
    let scratch = std::env::temp_dir().join(format!("moe-parity-{}.json", std::process::id()));
    let mut results = Vec::new();
    let mut failed = 0;
    for case in &cases {
        for dtype in &dtypes {
            let row = run_case(case, dtype, args, &scratch)?;
            failed += usize::from(row["passed"] != json!(true));
            eprintln!("{}", summary(case, dtype, &row));
            results.push(row);
        }
    }
    let _ = std::fs::remove_file(&scratch);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    }
    eprintln!("parity: {} passed, {failed} failed", results.len() - failed);
    if failed > 0 {
        bail!("{failed} parity rows failed")
    }
    Ok(())
}

fn run_case(case: &Case, dtype: &str, args: &Args, out: &Path) -> Result<Value> {
    let _ = std::fs::remove_file(out);
    let binary = workspace::target_dir().join("release").join(case.package);
    let output = Command::new(binary)
        .arg("parity")
        .arg("--model")
        .arg(&case.model)
        .arg("--reference")
        .arg(&case.reference)
        .args(["--device", &args.device, "--dtype", dtype, "--json"])
        .arg(out)
        .args(&args.flags)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    let mut row: Value = match std::fs::read(out) {
        Ok(bytes) => serde_json::from_slice(&bytes)?,
        // The run broke before it could compare anything: its own message says why.
        Err(_) => json!({"passed": false, "error": String::from_utf8_lossy(&output.stderr).trim()}),
    };
    row["fixture"] = json!(case.name);
    row["dtype"] = json!(dtype);
    Ok(row)
}

fn summary(case: &Case, dtype: &str, row: &Value) -> String {
    let verdict = if row["passed"] == json!(true) { "ok  " } else { "FAIL" };
    let mut line = format!("{verdict} {:32} {dtype:5}", case.name);
    for key in ["relative_error", "tolerance"] {
        if let Some(x) = row[key].as_f64() {
            line += &format!(" {key} {x:.2e}");
        }
    }
    if let Some(message) = row["error"].as_str() {
        line += &format!(" {message}");
    }
    for reason in row["failures"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        line += &format!("\n       {reason}");
    }
    line
}

fn fixtures() -> Result<Vec<Case>> {
    let folder = root().join("tests/fixtures");
    let mut cases = Vec::new();
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let model = entry?.path();
        let reference = model.join("reference.safetensors");
        if reference.exists() {
            cases.push(case(&model, &reference)?);
        }
    }
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    if cases.is_empty() {
        bail!("no fixture with a reference.safetensors under {}", folder.display())
    }
    Ok(cases)
}

fn case(model: &Path, reference: &Path) -> Result<Case> {
    let path = model.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let Some((_, package)) = MODELS.iter().find(|(name, _)| *name == model_type) else {
        let known: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        bail!("{}: model_type {model_type:?} has no model here; known: {known:?}", path.display())
    };
    let name = model.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    // The binary runs in our working directory, so relative paths stay valid.
    Ok(Case { name, model: model.to_path_buf(), reference: reference.to_path_buf(), package })
}
