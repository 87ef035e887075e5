//! `xtask eplb record`: records the expert heat of a real run, replays it with balancing, and plots both.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;

use super::plot::pictures;
use super::replay::{ReplayOptions, replay};
use crate::workspace;

/// What to run, and how to replay it.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    replay: ReplayOptions,
    /// Package of the program.
    #[arg(long, default_value = "model-moe")]
    package: String,
    /// Layer of the expert heat map.
    #[arg(long, default_value_t = 0)]
    layer: usize,
    /// Folder for the trace, the outcome and the pictures.
    #[arg(long)]
    out: PathBuf,
    /// The program's command line, without --expert-heat. It runs in the root of the workspace.
    #[arg(last = true, required = true)]
    run: Vec<String>,
}

/// Runs the program and records its heat, then replays and plots it.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.replay.input.is_given(), "record makes its own trace: drop --trace and --workload");
    let describe = || format!("cannot make the folder {}", options.out.display());
    std::fs::create_dir_all(&options.out).with_context(describe)?;
    let trace = std::path::absolute(options.out.join("heat.jsonl")).with_context(describe)?;
    let mut program = workspace::cargo();
    program.args(["run", "--release", "--quiet", "-p", &options.package, "--"]).args(&options.run);
    workspace::run(program.arg("--expert-heat").arg(&trace))?;
    judge(options, trace)
}

/// Replays and plots a recorded trace.
fn judge(options: &Options, trace: PathBuf) -> Result<()> {
    let mut settings = options.replay.clone();
    settings.input = settings.input.of_trace(trace);
    let outcome = replay(&settings)?;
    outcome.report(Some(&options.out.join("replay.json")))?;
    pictures(&outcome, options.layer, &options.out)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::parsed;
    use super::*;

    fn options(out: &str, more: &[&str]) -> Options {
        let args = ["--devices", "2", "--slots", "4", "--interval", "4", "--out", out];
        parsed(&[&args[..], more, &["--", "batch", "--tp", "2"]].concat())
    }

    #[test]
    fn a_recorded_run_is_replayed_and_drawn() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        // Experts 0 and 1 have high loads and share a device at the start.
        let line = |step| {
            format!(r#"{{"v":1,"step":{step},"stage":"decode","layer":0,"counts":[80,80,10,30]}}"#) + "\n"
        };
        fs::write(file("heat.jsonl"), (0..20).map(line).collect::<String>()).unwrap();
        let options = options(dir.path().to_str().unwrap(), &[]);
        assert_eq!(options.run, ["batch", "--tp", "2"]);
        judge(&options, file("heat.jsonl")).unwrap();
        let replay: serde_json::Value =
            serde_json::from_slice(&fs::read(file("replay.json")).unwrap()).unwrap();
        let moved = &replay["summary"]["par_mean"];
        let kept = &replay["summary"]["par_static_mean"];
        assert!(moved.as_f64().unwrap() < 1.3 && kept.as_f64().unwrap() > 1.59, "{moved} {kept}");
        for picture in ["par_over_time", "expert_heat", "before_after", "moves"] {
            let text = fs::read_to_string(file(&format!("{picture}.svg"))).unwrap();
            assert!(text.starts_with("<svg") && text.len() > 500, "{picture}");
        }
        let beyond = Options { layer: 1, ..options };
        assert!(judge(&beyond, file("heat.jsonl")).unwrap_err().to_string().contains("--layer 1"));
    }

    #[test]
    fn a_trace_that_is_there_is_not_recorded() {
        let given = options("/no/such/folder", &["--trace", "t"]);
        assert!(run(&given).unwrap_err().to_string().contains("drop --trace"));
    }
}
