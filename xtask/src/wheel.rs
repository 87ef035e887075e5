//! Programs from pinned wheels, each in its own folder below target/.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, target_dir};

/// The path of `program` in the wheel, which is unpacked in target/`folder` if it is not there yet. The stamp is
/// written last, so an interrupted fetch is repeated.
pub fn fetch(python: &str, folder: &str, wheel: &str, program: &str) -> Result<PathBuf> {
    let dir = target_dir().join(folder);
    let stamp = dir.join("installed.txt");
    let program = dir.join(program);
    if fs::read_to_string(&stamp).ok().as_deref() != Some(wheel) {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade"]);
        workspace::run(pip.arg("--target").arg(&dir).arg(wheel)).context("pip is needed (python3 -m pip)")?;
        if !program.is_file() {
            bail!("{wheel} holds no {}", program.display())
        }
        fs::write(&stamp, wheel)?;
    }
    Ok(program)
}
