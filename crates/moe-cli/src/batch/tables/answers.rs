//! The table of answers: written from the records of a run that has ended, and turned back into records for a rerun.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::record::Field;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::ColumnPath;
use serde::Deserialize;

use super::super::replace::replace;
use super::requests::{guarded, open, rows};

/// The columns. All but `record` are there for queries; the record has everything.
const SCHEMA: &str = "
    message batch {
        optional byte_array custom_id (string);
        optional int64 line;
        optional int32 status;
        optional byte_array text (string);
        optional byte_array finish_reason (string);
        optional int64 prompt_tokens;
        optional int64 completion_tokens;
        optional byte_array error (string);
        optional byte_array record (string);
    }";
const RECORD: &str = "record";

/// The name and the value that mark a table of this program.
const MARK: [&str; 2] = ["moe.batch", "1"];

/// The number of bytes of records from which on a row group is written.
const ROW_GROUP: usize = 8 << 20;
/// The longest record: the length of a page has 31 bits.
const MAX_RECORD: usize = 1 << 30;

/// The parts of a record that have columns.
#[derive(Deserialize)]
struct Record {
    id: String,
    custom_id: Option<String>,
    response: Option<Response>,
    error: Option<ErrorOf>,
}

#[derive(Default, Deserialize)]
struct Response {
    status_code: Option<i32>,
    body: Option<Body>,
}

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Usage,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    message: Option<Message>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
}

#[derive(Default, Deserialize)]
struct Usage {
    prompt_tokens: Option<i64>,
    completion_tokens: Option<i64>,
}

#[derive(Deserialize)]
struct ErrorOf {
    error: Reason,
}

#[derive(Deserialize)]
struct Reason {
    message: Option<String>,
}

/// A column of a row group: its values, and for each row whether it has one.
struct Column<T> {
    values: Vec<T>,
    levels: Vec<i16>,
}

impl<T> Default for Column<T> {
    fn default() -> Self {
        Self { values: Vec::new(), levels: Vec::new() }
    }
}

impl<T> Column<T> {
    fn push(&mut self, value: Option<T>) {
        self.levels.push(i16::from(value.is_some()));
        self.values.extend(value);
    }

    fn write<D: DataType<T = T>>(
        &self,
        group: &mut SerializedRowGroupWriter<'_, impl Write + Send>,
    ) -> Result<(), ParquetError> {
        let missing = || ParquetError::General("the schema has fewer columns".into());
        let mut column = group.next_column()?.ok_or_else(missing)?;
        column.typed::<D>().write_batch(&self.values, Some(&self.levels), None)?;
        column.close()
    }
}

/// The rows of a row group, in the order of [`SCHEMA`].
#[derive(Default)]
struct Rows {
    custom_id: Column<ByteArray>,
    line: Column<i64>,
    status: Column<i32>,
    text: Column<ByteArray>,
    finish_reason: Column<ByteArray>,
    prompt_tokens: Column<i64>,
    completion_tokens: Column<i64>,
    error: Column<ByteArray>,
    record: Column<ByteArray>,
    bytes: usize,
}

impl Rows {
    /// Adds the row of a record, which is this text.
    fn add(&mut self, text: String) -> Result<()> {
        if text.len() > MAX_RECORD {
            bail!("a record has {} bytes, and a table takes at most {MAX_RECORD}", text.len());
        }
        let record: Record = serde_json::from_str(&text)?;
        let response = record.response.unwrap_or_default();
        let (choices, usage) = response.body.map_or_else(Default::default, |body| (body.choices, body.usage));
        let choice = choices.into_iter().next();
        let (answer, reason) = choice.map_or((None, None), |choice| {
            (choice.text.or(choice.message.and_then(|message| message.content)), choice.finish_reason)
        });
        let bytes = |text: Option<String>| text.map(|text| ByteArray::from(text.into_bytes()));
        let number = record.id.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
        self.bytes += text.len();
        self.custom_id.push(bytes(record.custom_id));
        self.line.push(number);
        self.status.push(response.status_code);
        self.text.push(bytes(answer));
        self.finish_reason.push(bytes(reason));
        self.prompt_tokens.push(usage.prompt_tokens);
        self.completion_tokens.push(usage.completion_tokens);
        self.error.push(bytes(record.error.and_then(|error| error.error.message)));
        self.record.push(bytes(Some(text)));
        Ok(())
    }

    fn write(&self, file: &mut SerializedFileWriter<impl Write + Send>) -> Result<(), ParquetError> {
        let mut group = file.next_row_group()?;
        self.custom_id.write::<ByteArrayType>(&mut group)?;
        self.line.write::<Int64Type>(&mut group)?;
        self.status.write::<Int32Type>(&mut group)?;
        self.text.write::<ByteArrayType>(&mut group)?;
        self.finish_reason.write::<ByteArrayType>(&mut group)?;
        self.prompt_tokens.write::<Int64Type>(&mut group)?;
        self.completion_tokens.write::<Int64Type>(&mut group)?;
        self.error.write::<ByteArrayType>(&mut group)?;
        self.record.write::<ByteArrayType>(&mut group)?;
        group.close().map(drop)
    }
}

fn properties() -> WriterProperties {
    let [name, value] = MARK.map(String::from);
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_key_value_metadata(Some(vec![KeyValue::new(name, value)]));
    // Long texts, all different.
    for column in ["custom_id", "text", RECORD] {
        let path = ColumnPath::from(column);
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_statistics_enabled(path, EnabledStatistics::None);
    }
    properties.build()
}

/// Writes a table of the records in a file of lines.
///
/// # Errors
/// A file cannot be read or written, or a record is too long for a table.
pub fn write(records: &File, table: &mut (impl Write + Send)) -> Result<()> {
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let mut table = SerializedFileWriter::new(table, schema, Arc::new(properties()))?;
    let mut rows = Rows::default();
    for record in BufReader::with_capacity(1 << 20, records).lines() {
        rows.add(record?)?;
        if rows.bytes >= ROW_GROUP {
            rows.write(&mut table)?;
            rows = Rows::default();
        }
    }
    if rows.bytes > 0 {
        rows.write(&mut table)?;
    }
    table.close()?;
    Ok(())
}

/// Checks that a file is a table that [`write`] has written.
///
/// # Errors
/// It is another file.
pub fn check(table: &Path) -> Result<()> {
    ours(table).map(drop)
}

fn ours(table: &Path) -> Result<SerializedFileReader<File>> {
    let other =
        "it holds something else than answers of this command; it is left as it is, name another file";
    let file = open(table).map_err(|_| anyhow::anyhow!(other))?;
    let entries = file.metadata().file_metadata().key_value_metadata();
    let is_mark = |entry: &KeyValue| [Some(entry.key.as_str()), entry.value.as_deref()] == MARK.map(Some);
    match entries.is_some_and(|entries| entries.iter().any(is_mark)) {
        true => Ok(file),
        false => bail!(other),
    }
}

/// Writes the records of a table to a file of lines, for a run that continues.
///
/// # Errors
/// It is not such a table, or a file cannot be read or written. Then there is no file of lines.
pub fn restore(table: &Path, records: &Path) -> Result<()> {
    let file = ours(table)?;
    let schema = file.metadata().file_metadata().schema();
    let column = schema.get_fields().iter().find(|column| column.name() == RECORD);
    let column = column.context("it has no column of records")?.clone();
    let mut rows = rows(file, &[column])?;
    let written = replace(records, |out| {
        while let Some(row) = guarded(|| rows.next().transpose()).map_err(io::Error::other)? {
            match row.into_columns().into_iter().next() {
                Some((_, Field::Str(record))) => writeln!(out, "{record}")?,
                _ => return Err(io::Error::other("a row has no record")),
            }
        }
        Ok(())
    });
    written.map(drop).with_context(|| format!("cannot write its records to {}", records.display()))
}
