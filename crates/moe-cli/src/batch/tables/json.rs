//! Values of a Parquet file as JSON.

use parquet::basic::{ConvertedType, LogicalType, Type as Physical};
use parquet::record::Field;
use parquet::schema::types::Type;
use serde::Serialize;

/// Bytes of a binary column that are not UTF-8.
#[derive(Debug, PartialEq)]
pub struct NotText(pub Vec<u8>);

/// Writes a value. A field of a struct that is null is left out: a column of structs has the fields of all its rows.
///
/// # Errors
/// A binary value is not UTF-8.
pub fn write(out: &mut Vec<u8>, field: &Field) -> Result<(), NotText> {
    match field {
        Field::Bool(value) => scalar(out, value),
        Field::Byte(value) => scalar(out, value),
        Field::Short(value) => scalar(out, value),
        Field::Int(value) => scalar(out, value),
        Field::Long(value) => scalar(out, value),
        Field::UByte(value) => scalar(out, value),
        Field::UShort(value) => scalar(out, value),
        Field::UInt(value) => scalar(out, value),
        Field::ULong(value) => scalar(out, value),
        Field::Float16(value) => scalar(out, &value.to_f32()),
        Field::Float(value) => scalar(out, value),
        Field::Double(value) => scalar(out, value),
        Field::Str(text) => scalar(out, text),
        Field::Bytes(_) => scalar(out, &text(field)?),
        Field::Group(row) => {
            let mut object = Object::begin(out);
            for (name, value) in row.get_column_iter().filter(|(_, value)| !matches!(value, Field::Null)) {
                write(object.member(name), value)?;
            }
            object.end();
        }
        Field::MapInternal(map) => {
            let mut object = Object::begin(out);
            for (key, value) in map.entries() {
                write(object.member(&text(key)?), value)?;
            }
            object.end();
        }
        Field::ListInternal(list) => {
            out.push(b'[');
            for (i, value) in list.elements().iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write(out, value)?;
            }
            out.push(b']');
        }
        // `unsupported` has refused columns of other types.
        _ => out.extend_from_slice(b"null"),
    }
    Ok(())
}

/// A JSON object that is being written.
pub struct Object<'o> {
    out: &'o mut Vec<u8>,
    is_empty: bool,
}

impl<'o> Object<'o> {
    /// Writes the beginning.
    pub fn begin(out: &'o mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, is_empty: true }
    }

    /// Writes the name of a member; its value comes next.
    pub fn member(&mut self, name: &str) -> &mut Vec<u8> {
        if !self.is_empty {
            self.out.push(b',');
        }
        self.is_empty = false;
        scalar(self.out, name);
        self.out.push(b':');
        self.out
    }

    /// Writes the end.
    pub fn end(self) {
        self.out.push(b'}');
    }
}

/// Writes a number, true or false, or a string. A float that is not finite becomes null.
pub fn scalar(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // A vector takes everything, and these values always have a text.
    let _ = serde_json::to_writer(out, value);
}

/// Text, or the digits of an integer.
///
/// # Errors
/// A binary value is not UTF-8.
pub fn text(field: &Field) -> Result<String, NotText> {
    match field {
        Field::Str(text) => Ok(text.clone()),
        Field::Bytes(bytes) => String::from_utf8(bytes.data().to_vec()).map_err(|e| NotText(e.into_bytes())),
        other => Ok(other.to_string()),
    }
}

/// Whether a column has text. Binary values that are UTF-8 are text, too: some programs write no other.
pub fn is_text(column: &Type) -> bool {
    let annotation = column.get_basic_info().converted_type();
    column.is_primitive()
        && column.get_physical_type() == Physical::BYTE_ARRAY
        && matches!(
            annotation,
            ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
        )
}

/// Whether a column has integers.
pub fn is_integer(column: &Type) -> bool {
    use ConvertedType::{INT_8, INT_16, INT_32, INT_64, NONE, UINT_8, UINT_16, UINT_32, UINT_64};
    let annotation = column.get_basic_info().converted_type();
    let integers = [NONE, INT_8, INT_16, INT_32, INT_64, UINT_8, UINT_16, UINT_32, UINT_64];
    column.is_primitive()
        && matches!(column.get_physical_type(), Physical::INT32 | Physical::INT64)
        && has_no_time(column)
        && integers.contains(&annotation)
}

/// Times in nanoseconds have an annotation of the newer kind only.
fn has_no_time(column: &Type) -> bool {
    let annotation = column.get_basic_info().logical_type_ref();
    annotation.is_none_or(|annotation| matches!(annotation, LogicalType::Integer { .. }))
}

/// Whether a column is a list.
pub fn is_list(column: &Type) -> bool {
    let info = column.get_basic_info();
    info.converted_type() == ConvertedType::LIST
        || info.has_repetition() && info.repetition() == parquet::basic::Repetition::REPEATED
}

/// Whether a column is a struct.
pub fn is_struct(column: &Type) -> bool {
    column.is_group() && !is_list(column) && column.get_basic_info().converted_type() == ConvertedType::NONE
}

/// The path and the type of the first part of a column that has no JSON, such as a time.
pub fn unsupported(column: &Type) -> Option<String> {
    if column.is_group() {
        let part = column.get_fields().iter().find_map(|part| unsupported(part))?;
        return Some(format!("{}.{part}", column.name()));
    }
    let is_float16 = matches!(column.get_basic_info().logical_type_ref(), Some(LogicalType::Float16));
    let is_number =
        matches!(column.get_physical_type(), Physical::BOOLEAN | Physical::FLOAT | Physical::DOUBLE);
    let supported = is_text(column) || is_integer(column) || is_number || is_float16;
    (!supported).then(|| format!("{}: {}", column.name(), name(column)))
}

/// The type of a column in words.
pub fn name(column: &Type) -> String {
    if column.is_group() {
        return match (is_list(column), is_struct(column)) {
            (true, _) => "a list".into(),
            (_, true) => "a struct".into(),
            _ => "a map".into(),
        };
    }
    let info = column.get_basic_info();
    match (info.logical_type_ref(), info.converted_type()) {
        (Some(logical), _) => format!("{} ({logical:?})", column.get_physical_type()),
        (None, ConvertedType::NONE) => column.get_physical_type().to_string(),
        (None, converted) => format!("{} ({converted})", column.get_physical_type()),
    }
}
