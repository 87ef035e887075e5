//! Structured output: text that follows a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! ```text
//! StructuredOutput (data of a request) ─► Grammars: compiled once ─► Constraint of each choice ─► Mask of each token
//! ```
//!
//! The `llguidance` crate compiles and matches grammars; JSON schemas become grammars in `schema`. A mask says which
//! tokens may come next; the sampler sees nothing but the mask. [`Reasoning`] may come before: then the text is free up to
//! `</think>`.
//!
//! Compiling recurses, and what a text asks for may take all time and memory: `bounds` and `compiler` limit it, and
//! [`Precompiler`] tries it in another process first.

mod bounds;
mod compiler;
mod constraint;
mod describe;
mod grammars;
mod lead;
#[cfg(test)]
mod limits_tests;
mod output;
mod perl;
mod precompiler;
mod room;
mod schema;
#[cfg(test)]
mod tests;
mod tool_calls;
mod vocabulary;

pub(crate) use constraint::{Constraint, Mask};
pub(crate) use grammars::{Grammar, Grammars};
pub use output::{Function, Reasoning, StructuredOutput, StructuredOutputError};
pub use precompiler::{COMPILE_COMMAND, Precompiled, Precompiler, serve};
