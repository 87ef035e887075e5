//! A program of this project: the families that it runs, and its embedded checkpoint.

use anyhow::Result;
use moe_engine::{Embedded, Families};

use crate::error::usage;

/// A program: the families that it runs, and its embedded checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The families that it runs.
    pub families: Families,
    /// The checkpoint that is part of it, if one is.
    pub embedded: Option<Embedded>,
}

impl Program {
    /// The embedded checkpoint of the program.
    ///
    /// # Errors
    /// No model was named, and the program has no embedded checkpoint.
    pub fn own_model(&self) -> Result<Embedded> {
        self.embedded.ok_or_else(|| {
            usage(
                "no model is given, and none is part of this program: name one with --model (--help lists the flags)",
            )
        })
    }
}
