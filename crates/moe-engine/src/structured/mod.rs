//! Structured output: text that follows a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! ```text
//! StructuredOutput (data of a request) ─► Grammars: compiled once ─► Constraint of each choice ─► Mask of each token
//! ```
//!
//! The `llguidance` crate compiles and matches grammars. The module `schema` translates JSON schemas to grammars. A
//! mask says which tokens may come next, and the sampler gets nothing but the mask. [`Reasoning`] may come before the
//! text. The answer is then free up to the closing tag.
//!
//! Compiling recurses, and a hostile text could take all time and memory. The modules `bounds` and `compiler` limit
//! this, and [`Precompiler`] first tries the compilation in another process.

mod bounds;
mod compiler;
mod constraint;
mod describe;
mod grammars;
mod lead;
#[cfg(test)]
mod lead_tests;
#[cfg(test)]
mod limits_tests;
mod output;
mod perl;
mod precompiler;
mod room;
mod schema;
#[cfg(test)]
mod special_calls_tests;
#[cfg(test)]
mod tests;
mod tool_calls;
#[cfg(test)]
mod tool_calls_tests;
mod vocabulary;

pub(crate) use constraint::{Constraint, Mask};
pub(crate) use grammars::{Grammar, Grammars};
pub use output::{Function, Reasoning, StructuredOutput, StructuredOutputError};
pub use precompiler::{COMPILE_COMMAND, Precompiled, Precompiler, serve};
