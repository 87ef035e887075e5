//! Ctrl-C: the first one asks to stop, the next one ends the program.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Leaves Ctrl-C to another process of the terminal, which ends this one.
pub fn ignore() -> Result<()> {
    ctrlc::set_handler(|| {}).context("cannot catch Ctrl-C")
}

/// Whether Ctrl-C was pressed, where a program has asked for it.
pub struct Interrupt(());

impl Interrupt {
    /// What a shell calls a program that Ctrl-C ended.
    pub const EXIT_CODE: u8 = 130;

    /// Catches Ctrl-C from now on.
    pub fn install() -> Result<Self> {
        ctrlc::set_handler(|| {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                moe_engine::end_failed(Self::EXIT_CODE);
            }
        })
        .context("cannot catch Ctrl-C")?;
        Ok(Self(()))
    }

    /// Whether it was pressed.
    pub fn requested(&self) -> bool {
        REQUESTED.load(Ordering::Relaxed)
    }

    /// Whether it was pressed; forgets it.
    pub fn take(&self) -> bool {
        REQUESTED.swap(false, Ordering::Relaxed)
    }
}
