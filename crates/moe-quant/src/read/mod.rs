//! Readers: rows of a stored matrix in their logical form, straight from the bytes of its tensors.

mod columns;
mod dequantise;
mod indices;
mod rows;
mod scales;
mod stored;
mod suffixes;
mod unpack;
mod words;

use std::ops::Range;

use moe_kernels::quant::{LogicalRows, StoredTensor};
use safetensors::tensor::TensorView;

use crate::error::QuantError;
use crate::format::{Format, IntFormat};
use crate::layout::{TensorSpec, layout};
use columns::Columns;
use scales::Scales;
use words::Words;

pub use dequantise::{dequantise, e4m3};
pub use suffixes::suffixes;

/// A quantised matrix in a checkpoint, or a rank's part of it. It borrows the tensors' bytes and holds no weights.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    name: String,
    format: Format,
    /// N and K of the stored matrix.
    stored: (usize, usize),
    rows: Range<usize>,
    columns: Columns,
    g_idx: Option<Vec<u32>>,
    codes: &'a [u8],
    zeros: Option<&'a [u8]>,
    scales: Scales<'a>,
}

impl<'a> Reader<'a> {
    /// The matrix \[n, k\] of a module. `find` gives the tensor of a suffix, as `qweight`; each is checked against
    /// [`layout`]. Scales are not looked at: [`check_finite`](Self::check_finite) does.
    ///
    /// # Errors
    /// A tensor that is missing or has another dtype or shape; a `g_idx` out of range or with groups of several sizes; a
    /// `weight_shape` that contradicts n and k; a format that is not quantised.
    pub fn new(
        module: &str,
        format: Format,
        (n, k): (usize, usize),
        find: impl Fn(&str) -> Option<TensorView<'a>>,
    ) -> Result<Self, QuantError> {
        if format == Format::Plain {
            return Err(QuantError::matrix(module, "is not quantised; read its `weight` as it is"));
        }
        let specs = layout(format, n, k).map_err(|e| renamed(module, e))?;
        let tensors = Tensors::find(module, &specs, find)?;
        if let Some(shape) = tensors.get(&["weight_shape"]) {
            let found = indices::whole_numbers(shape);
            if found != [n as i64, k as i64] {
                let problem = format!("expected [{n}, {k}], got {found:?}");
                return Err(QuantError::matrix(&format!("{module}.weight_shape"), problem));
            }
        }
        let stored = tensors.get(&["g_idx", "weight_g_idx"]);
        let g_idx = format.int().map(|int| indices::groups_of_columns(int, k, stored)).transpose();
        let g_idx =
            g_idx.map_err(|problem| QuantError::matrix(&format!("{module}.g_idx"), problem))?.flatten();
        let codes = tensors.need(suffixes(StoredTensor::Codes))?;
        let scales = tensors.need(suffixes(StoredTensor::Scales))?;
        let mut reader = Self {
            name: module.to_string(),
            format,
            stored: (n, k),
            rows: 0..n,
            columns: Columns { source: 0..k, width: k, group: k, groups: vec![0], order: None },
            g_idx,
            codes: codes.data(),
            zeros: tensors.get(suffixes(StoredTensor::Zeros)).map(TensorView::data),
            scales: Scales::new(format, n, k, scales),
        };
        reader.columns = reader.cut(0..k)?;
        Ok(reader)
    }

    /// Only these rows, counted from this reader's first row: a column-parallel part.
    ///
    /// # Errors
    /// Rows that the matrix does not have.
    pub fn rows(self, rows: Range<usize>) -> Result<Self, QuantError> {
        let rows = inside(&self.name, "rows", rows, self.rows.len())?;
        Ok(Self { rows: self.rows.start + rows.start..self.rows.start + rows.end, ..self })
    }

    /// Only these columns, counted from this reader's first column: a row-parallel part. With act-order all groups' scales are
    /// kept whose columns are among them; groups may become smaller ([`QuantRows::scheme`](moe_kernels::quant::QuantRows::scheme)), and K grows by columns of
    /// weight zero that fill them up.
    ///
    /// # Errors
    /// Columns that the matrix does not have; a cut through a group, with the tensor-parallel sizes that work.
    pub fn columns(self, columns: Range<usize>) -> Result<Self, QuantError> {
        let start = self.columns.source.start;
        let columns = inside(&self.name, "columns", columns, self.columns.source.len())?;
        let columns = self.cut(start + columns.start..start + columns.end)?;
        Ok(Self { columns, ..self })
    }

    fn cut(&self, source: Range<usize>) -> Result<Columns, QuantError> {
        let k = self.stored.1;
        match &self.g_idx {
            Some(g_idx) => Ok(Columns::by_group(g_idx, source, self.format.scheme().group_size(k))),
            None => Columns::in_order(self.format, source, k).map_err(|p| QuantError::matrix(&self.name, p)),
        }
    }

    /// The file's format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Columns of the part before act-order sorts them and fills up groups: what the layer's input has.
    pub fn inputs(&self) -> usize {
        self.columns.source.len()
    }

    /// Reads every scale.
    ///
    /// # Errors
    /// The first scale that is NaN or infinite, with its row and group.
    pub fn check_finite(&self) -> Result<(), QuantError> {
        for n in self.rows.clone() {
            for &group in &self.columns.groups {
                let scale = self.scales.get(n, group);
                if !scale.is_finite() {
                    let problem =
                        format!("the scale of row {n}, group {group} is {scale}; the file is damaged");
                    return Err(QuantError::matrix(&self.name, problem));
                }
            }
        }
        Ok(())
    }

    /// Refuses FP8 weights that are NaN, of rows from `first` on.
    fn check_codes(&self, first: usize, codes: &[u8]) -> Result<(), QuantError> {
        let is_nan = |code: &u8| code & 0x7f == 0x7f;
        // Without an early end, so that it takes vectors at a time.
        let is_fp8 = matches!(self.format, Format::Fp8 { .. });
        if !is_fp8 || !codes.iter().fold(false, |nan, code| nan | is_nan(code)) {
            return Ok(());
        }
        let n = first + codes.iter().position(is_nan).unwrap_or(0) / self.columns.width.max(1);
        let problem =
            format!("an FP8 weight of row {n} is NaN; the file is damaged: download or quantise it again");
        Err(QuantError::matrix(&self.name, problem))
    }

    fn zero(&self, int: IntFormat, n: usize, group: usize) -> Result<u8, QuantError> {
        let Some(bytes) = self.zeros else { return Ok(int.middle()) };
        let zero = unpack::zero(self.format, Words::new(bytes, int.bits), self.stored, n, group);
        if int.zero_point || zero == int.middle() {
            return Ok(zero);
        }
        let problem = format!(
            "row {n}, group {group} has the zero point {zero}, but the header calls the matrix symmetric, which means {}",
            int.middle()
        );
        Err(QuantError::matrix(&self.name, problem))
    }

    fn fill(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<(), QuantError> {
        let rows = inside(&self.name, "rows", rows, self.rows.len())?;
        let rows = self.rows.start + rows.start..self.rows.start + rows.end;
        let width = self.columns.width;
        let groups = &self.columns.groups;
        out.clear();
        for n in rows.clone() {
            out.scale.extend(groups.iter().map(|group| self.scales.get(n, *group)));
            if let Some(int) = self.format.int() {
                for &group in groups {
                    out.zero.push(self.zero(int, n, group)?);
                }
            }
        }
        out.q.resize(rows.len() * width, 0);
        unpack::codes(self.format, self.codes, self.stored, rows.clone(), &self.columns, &mut out.q);
        self.check_codes(rows.start, &out.q)?;
        let padding = self.columns.order.iter().flat_map(|order| &order.padding);
        for column in padding.map(|column| *column as usize) {
            for (row, q) in out.q.chunks_exact_mut(width).enumerate() {
                q[column] = out.zero[row * groups.len() + column / self.columns.group];
            }
        }
        Ok(())
    }
}

/// The tensors of a matrix, checked against their specifications.
struct Tensors<'m, 'a> {
    module: &'m str,
    found: Vec<(&'static str, TensorView<'a>)>,
}

impl<'m, 'a> Tensors<'m, 'a> {
    fn find(
        module: &'m str,
        specs: &[TensorSpec],
        find: impl Fn(&str) -> Option<TensorView<'a>>,
    ) -> Result<Self, QuantError> {
        let mut found = Vec::new();
        for spec in specs {
            match find(spec.suffix) {
                Some(tensor) => {
                    spec.check(module, tensor.dtype(), tensor.shape())?;
                    found.push((spec.suffix, tensor));
                }
                None if spec.required => return Err(missing(module, spec.suffix)),
                None => {}
            }
        }
        Ok(Self { module, found })
    }

    fn get(&self, suffixes: &[&str]) -> Option<&TensorView<'a>> {
        self.found.iter().find(|(suffix, _)| suffixes.contains(suffix)).map(|(_, tensor)| tensor)
    }

    fn need(&self, suffixes: &[&str]) -> Result<&TensorView<'a>, QuantError> {
        self.get(suffixes).ok_or_else(|| missing(self.module, suffixes[0]))
    }
}

fn missing(module: &str, suffix: &str) -> QuantError {
    QuantError::matrix(
        &format!("{module}.{suffix}"),
        "the checkpoint has no such tensor, which the header calls for",
    )
}

fn renamed(module: &str, error: QuantError) -> QuantError {
    match error {
        QuantError::Matrix { name, problem } => QuantError::matrix(&format!("{module} ({name})"), problem),
        other => other,
    }
}

fn inside(name: &str, what: &str, part: Range<usize>, all: usize) -> Result<Range<usize>, QuantError> {
    if part.start <= part.end && part.end <= all {
        return Ok(part);
    }
    Err(QuantError::matrix(name, format!("{what} {part:?} are asked for, but there are {all}")))
}
