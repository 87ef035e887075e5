//! Reads a table of requests row by row. Only a page of each column is in memory.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::Result;
use moe_engine::panic_text;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::{Type, TypePtr};
use tracing::info;

use super::super::input::Line;
use super::BATCH;
use super::columns::Columns;
use crate::error::usage;

/// The rows of a table as lines.
pub struct Requests {
    rows: RowIter<'static>,
    columns: Columns,
    number: u64,
    has_ended: bool,
}

impl Requests {
    /// Opens a table whose prompts may be `questions`. Also returns the number of its rows.
    ///
    /// # Errors
    /// It is damaged, it is compressed in a way that is not read, or its columns ask nothing.
    pub fn open(path: &Path, questions: bool) -> Result<(Self, u64)> {
        let wrong = |what: String| usage(format!("--input {}: {what}", path.display()));
        let file = open(path).map_err(wrong)?;
        let metadata = file.metadata().file_metadata();
        let columns = Columns::of(metadata.schema(), questions).map_err(wrong)?;
        let is_read = |name: &str| columns.read.iter().any(|column| column.name() == name);
        check_chunks(file.metadata(), is_read).map_err(wrong)?;
        if !columns.ignored.is_empty() {
            info!("--input {}: columns that are not read: {}", path.display(), columns.ignored.join(", "));
        }
        let number_of_rows = u64::try_from(metadata.num_rows()).unwrap_or(0);
        let rows = rows(file, &columns.read).map_err(|e| wrong(damaged(&e)))?;
        Ok((Self { rows, columns, number: 0, has_ended: false }, number_of_rows))
    }
}

impl Iterator for Requests {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let row = guarded(|| self.rows.next().transpose());
        self.number += 1;
        match row.transpose()? {
            Ok(row) => Some(Ok(self.columns.line(self.number, &row))),
            Err(e) => {
                self.has_ended = true;
                let text = format!("row {} of the Parquet file: {}", self.number, damaged(&e));
                Some(Err(io::Error::new(io::ErrorKind::InvalidData, text)))
            }
        }
    }
}

/// Opens a Parquet file.
///
/// # Errors
/// What is wrong.
pub fn open(path: &Path) -> Result<SerializedFileReader<File>, String> {
    let file = File::open(path).map_err(|e| format!("cannot read it: {e}"))?;
    guarded(|| SerializedFileReader::new(file)).map_err(|e| damaged(&e))
}

/// The rows of a file, with these columns.
pub fn rows(file: SerializedFileReader<File>, columns: &[TypePtr]) -> Result<RowIter<'static>, ParquetError> {
    let name = file.metadata().file_metadata().schema().name();
    let schema = Type::group_type_builder(name).with_fields(columns.to_vec()).build()?;
    Ok(RowIter::from_file_into(Box::new(file)).project(Some(schema))?.with_batch_size(BATCH))
}

/// Calls the reader, which panics at some damaged files.
pub fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|panic| Err(ParquetError::General(panic_text(&*panic).to_string())))
}

fn damaged(error: &ParquetError) -> String {
    format!("it begins as a Parquet file and cannot be read as one, so it is cut off or damaged: {error}")
}

/// Refuses a compression that this program cannot undo, and impossible places of columns, at which the reader panics.
fn check_chunks(file: &ParquetMetaData, is_read: impl Fn(&str) -> bool) -> Result<(), String> {
    for chunk in file.row_groups().iter().flat_map(|group| group.columns()) {
        if !chunk.column_path().parts().first().is_some_and(|name| is_read(name)) {
            continue;
        }
        let path = chunk.column_path().string();
        let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
        if start < 0 || chunk.compressed_size() < 0 {
            return Err(damaged(&ParquetError::General(format!(
                "no column `{path}` can begin at byte {start}"
            ))));
        }
        if !is_known(chunk.compression()) {
            return Err(format!(
                "the column `{path}` is compressed by {}, which is not read; write it with zstd, snappy, gzip or lz4",
                chunk.compression()
            ));
        }
    }
    Ok(())
}

fn is_known(compression: Compression) -> bool {
    matches!(
        compression,
        Compression::UNCOMPRESSED
            | Compression::SNAPPY
            | Compression::GZIP(_)
            | Compression::ZSTD(_)
            | Compression::LZ4
            | Compression::LZ4_RAW
    )
}
