//! `download`: downloads a checkpoint into the hub's cache.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use model_runtime::checkpoint::Configs;
use moe_engine::terminal::note;
use tracing::warn;

use crate::Program;
use crate::cli::DownloadArgs;
use crate::error::usage;
use crate::hub::Trust;
use crate::output::print;
use crate::{hub, log};

/// Runs the command. Exit code 1 means that a check found something.
pub fn run(program: &Program, args: &DownloadArgs) -> Result<ExitCode> {
    log::start_plain()?;
    let model = args.model.as_str();
    if Path::new(model).exists() {
        return Err(usage(format!(
            "{model} is on this disk already; expected a model of the hub, ORG/NAME[@REVISION]"
        )));
    }
    if args.check {
        return check(model);
    }
    let trust = if args.force { Trust::Nothing } else { Trust::Verified };
    let located = hub::locate_again(model, trust)?;
    if let Err(e) = program.families.parse(&Configs::model(located.dir())?) {
        warn!("this program will not run it: {e}");
    }
    print(&format!("{}\n", located.weights()?.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn check(model: &str) -> Result<ExitCode> {
    let hub::Report { dir, files, faults } = hub::check(model)?;
    for fault in &faults {
        note(fault);
    }
    if faults.is_empty() {
        note(format_args!("{files} files are whole"));
    }
    print(&format!("{}\n", dir.display()))?;
    Ok(ExitCode::from(u8::from(!faults.is_empty())))
}
