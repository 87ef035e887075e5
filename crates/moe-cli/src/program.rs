//! A program of this project: which families it runs, and the checkpoint inside it.

use anyhow::Result;
use moe_engine::{Embedded, Families, usage};

/// A program: which families it runs, and the checkpoint inside it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The families that it runs.
    pub families: Families,
    /// The checkpoint that is part of it, if one is.
    pub embedded: Option<Embedded>,
}

impl Program {
    /// The checkpoint inside the program.
    ///
    /// # Errors
    /// The mistake of naming no model to a program that has none of its own.
    pub fn own_model(&self) -> Result<Embedded> {
        self.embedded.ok_or_else(|| {
            usage(
                "no model is given, and none is part of this program: name one with --model (--help lists the flags)",
            )
        })
    }
}
