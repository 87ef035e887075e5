//! `cargo xtask parity`: compares the models with Hugging Face transformers.
//!
//! Each case is a checkpoint folder and a reference recorded by tests/reference. The program `moe` is built, and it
//! runs once per dtype and variant. The program compares and judges; this task collects the results. Without arguments
//! every fixture runs in f32 and bf16, and fixtures with latent attention also run on both expert paths and in both
//! forms of this attention.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::workspace::{self, PROGRAM, PROGRAM_PACKAGE, cargo, root};

/// The flags for one way to run a checkpoint.
type Variant = &'static [&'static str];

const ONE: &[Variant] = &[&[]];
const LATENT: &[Variant] = &[
    &["--moe-path", "legacy", "--mla", "absorbed"],
    &["--moe-path", "legacy", "--mla", "naive"],
    &["--moe-path", "fused", "--mla", "absorbed"],
    &["--moe-path", "fused", "--mla", "naive"],
];

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
    /// Folder with the program, as another profile or other features have built it (default: it is built here).
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Print the results as a JSON array on stdout.
    #[arg(long)]
    json: bool,
    /// Further flags for the program.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<String>,
}

struct Case {
    name: String,
    model: PathBuf,
    reference: PathBuf,
    variants: &'static [Variant],
}

impl Case {
    /// The ways to run this checkpoint. If the user's flags choose a way, only that one.
    fn variants(&self, flags: &[String]) -> &'static [Variant] {
        let given = |name: &&str| flags.iter().any(|flag| flag.split('=').next() == Some(*name));
        if self.variants.iter().copied().flatten().any(given) { ONE } else { self.variants }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let cases = match (&args.model, &args.reference) {
        (Some(model), Some(reference)) => vec![case(model, reference)?],
        _ => fixtures()?,
    };
    let dtypes: Vec<&str> = args.dtype.as_deref().map_or(vec!["f32", "bf16"], |d| vec![d]);
    // The CUDA build needs a compiler: `cargo xtask toolkit -- cargo xtask parity --device cuda`.
    let features: &[&str] = if args.device.starts_with("cuda") { &["--features", "cuda"] } else { &[] };
    if args.programs.is_none() {
        workspace::run(cargo().args(["build", "--release", "-q", "-p", PROGRAM_PACKAGE]).args(features))?;
    }
    let scratch = std::env::temp_dir().join(format!("moe-parity-{}.json", std::process::id()));
    let mut results = Vec::new();
    let mut failed = 0;
    for case in &cases {
        for variant in case.variants(&args.flags) {
            for dtype in &dtypes {
                let row = run_case(case, dtype, variant, args, &scratch)?;
                failed += usize::from(row["passed"] != json!(true));
                eprintln!("{}", summary(case, dtype, variant, &row));
                results.push(row);
            }
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

fn run_case(case: &Case, dtype: &str, variant: &[&str], args: &Args, out: &Path) -> Result<Value> {
    let _ = std::fs::remove_file(out);
    let built = args.programs.clone().unwrap_or_else(|| workspace::target_dir().join("release"));
    let binary = built.join(PROGRAM);
    let output = Command::new(&binary)
        .arg("parity")
        .arg("--model")
        .arg(&case.model)
        .arg("--reference")
        .arg(&case.reference)
        .args(["--device", &args.device, "--dtype", dtype, "--json"])
        .arg(out)
        .args(variant)
        .args(&args.flags)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot run {}", binary.display()))?;
    let mut row: Value = match std::fs::read(out) {
        Ok(bytes) => serde_json::from_slice(&bytes)?,
        // The run failed before it could compare anything; its own message says why.
        Err(_) => json!({"passed": false, "error": String::from_utf8_lossy(&output.stderr).trim()}),
    };
    row["fixture"] = json!(case.name);
    row["dtype"] = json!(dtype);
    row["flags"] = json!(variant);
    Ok(row)
}

fn summary(case: &Case, dtype: &str, variant: &[&str], row: &Value) -> String {
    let verdict = if row["passed"] == json!(true) { "ok  " } else { "FAIL" };
    let mut line = format!("{verdict} {:32} {dtype:5}", case.name);
    for value in variant.iter().filter(|flag| !flag.starts_with("--")) {
        line += &format!(" {value:8}");
    }
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
    let variants = if config["kv_lora_rank"].is_null() { ONE } else { LATENT };
    let name = model.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    // The program runs in this task's working directory, so relative paths stay valid.
    Ok(Case { name, model: model.to_path_buf(), reference: reference.to_path_buf(), variants })
}
