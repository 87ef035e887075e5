//! Parquet files, by the feature `parquet`: a table of requests is read row by row, and the records of a finished run
//! become a table of answers.
//!
//! ```text
//! in.parquet ─► row ─► line of JSON ─► as any other line ─► out.parquet.jsonl ─► at the end: out.parquet
//! ```
//!
//! Nothing can be appended to a Parquet file. So a run appends records to a file of lines, as always, and only a run
//! that has answered everything writes the table.

mod answers;
mod columns;
mod json;
mod requests;
#[cfg(test)]
mod tests;

pub use answers::{check, restore, write};
pub use requests::Requests;

/// The first bytes of a Parquet file.
pub const MAGIC: &[u8] = b"PAR1";

/// Number of rows that are decoded at a time. A row may be large.
const BATCH: usize = 64;

/// Whether tables can be read and written; a program without the feature has another answer.
pub fn available() -> anyhow::Result<()> {
    Ok(())
}
