//! Readers: rows of a stored matrix in their logical form, straight from the bytes of its tensors.

mod columns;
mod dequantise;
mod e8m0;
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
use crate::ggml;
use crate::layout::{TensorSpec, layout};
use columns::Columns;
use scales::{Scales, matrix_factor};
use words::Words;

pub(crate) use columns::of_columns;
pub(crate) use e8m0::e8m0;

pub use dequantise::{FloatRows, dequantise, e4m3};
pub use suffixes::suffixes;

/// A quantised matrix in a checkpoint, or a rank's part of it. It borrows the tensors' bytes and holds no weights.
///
/// ```
/// use moe_quant::safetensors::SafeTensors;
/// use moe_quant::write::{IntMatrix, pack};
/// use moe_quant::{QuantConfig, Reader, dequantise};
///
/// let config = serde_json::json!({"quantization_config": {
///     "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "desc_act": false,
/// }});
/// let config = QuantConfig::from_json(&config)?.ok_or("not quantised")?;
/// let module = "model.layers.0.mlp.experts.0.up_proj";
/// let format = config.format_of(module)?;
/// # let matrix = IntMatrix { n: 8, k: 32, q: vec![9; 256], scale: vec![0.5; 8], zero: vec![8; 8], g_idx: None };
/// # let tensors = pack(module, format, &matrix, moe_quant::safetensors::Dtype::F16)?;
/// # let views = tensors.iter().map(|t| {
/// #     let view = moe_quant::safetensors::tensor::TensorView::new(t.spec.dtype, t.spec.shape.clone(), &t.bytes);
/// #     Ok((format!("{module}.{}", t.spec.suffix), view?))
/// # });
/// # let views = views.collect::<Result<Vec<_>, moe_quant::safetensors::SafeTensorError>>()?;
/// # let bytes = moe_quant::safetensors::serialize(views, None)?;
/// // `bytes`: a memory-mapped file.
/// let file = SafeTensors::deserialize(&bytes)?;
/// let find = |suffix: &str| file.tensor(&format!("{module}.{suffix}")).ok();
/// let reader = Reader::new(module, format, (8, 32), find)?; // N = 8, K = 32
/// reader.check_finite()?;
/// assert_eq!(dequantise(&reader)?, [0.5; 8 * 32]); // 0.5 * (9 - 8)
/// // A rank's part: half of the rows.
/// assert_eq!(dequantise(&reader.rows(4..8)?)?.len(), 4 * 32);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    name: String,
    format: Format,
    /// N and K of the stored matrix.
    stored: (usize, usize),
    rows: Range<usize>,
    /// Which rows of the stored matrix these are: the first, and every how many-th.
    turns: (usize, usize),
    columns: Columns,
    g_idx: Option<Vec<u32>>,
    codes: &'a [u8],
    zeros: Option<&'a [u8]>,
    scales: Scales<'a>,
}

impl<'a> Reader<'a> {
    /// The matrix \[n, k\] of a module. `find` gives the tensor of a suffix, as `qweight`; each is checked against
    /// [`layout`]. Scales of groups are not looked at: [`check_finite`](Self::check_finite) does.
    ///
    /// # Errors
    /// A tensor that is missing or has another dtype or shape; a `g_idx` out of range or with groups of several sizes;
    /// a `weight_shape` that contradicts n and k; a scale of a matrix in NVFP4 that is not a finite number above 0; a
    /// format that is not quantised.
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
        let scales = match format {
            Format::Ggml(_) => codes,
            _ => tensors.need(suffixes(StoredTensor::Scales))?,
        };
        let mut scales = Scales::new(format, n, k, scales);
        if let Format::Nvfp4(names) = format {
            let scale = tensors.need(&[names.matrix_scale()])?;
            scales = scales.times(matrix_factor(module, names, scale)?);
        }
        let mut reader = Self {
            name: module.to_string(),
            format,
            stored: (n, k),
            rows: 0..n,
            turns: (0, 1),
            columns: Columns { source: 0..k, width: k, group: k, groups: vec![0], order: None },
            g_idx,
            codes: codes.data(),
            zeros: tensors.get(suffixes(StoredTensor::Zeros)).map(TensorView::data),
            scales,
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

    /// Only every `step`-th row, from row `first` on: one of several matrices whose rows take turns. Only of a whole
    /// matrix.
    ///
    /// # Errors
    /// Turns that do not divide the rows, or a part of a matrix.
    pub fn turns(self, first: usize, step: usize) -> Result<Self, QuantError> {
        let n = self.stored.0;
        if first >= step || !n.is_multiple_of(step) || self.rows != (0..n) || self.turns != (0, 1) {
            let problem = format!("rows {:?} have no turn {first} of {step}", self.rows);
            return Err(QuantError::matrix(&self.name, problem));
        }
        Ok(Self { rows: 0..n / step, turns: (first, step), ..self })
    }

    /// The row of the stored matrix.
    fn stored_row(&self, row: usize) -> usize {
        let (first, step) = self.turns;
        first + row * step
    }

    /// Only these columns, counted from this reader's first column: a row-parallel part. With act-order all groups'
    /// scales are kept whose columns are among them; groups may become smaller
    /// ([`QuantRows::scheme`](moe_kernels::quant::QuantRows::scheme)), and K grows by columns of weight zero that fill
    /// them up.
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
        if let Format::Ggml(_) = self.format {
            return self.check_finite_blocks();
        }
        for n in self.rows.clone().map(|row| self.stored_row(row)) {
            self.columns.groups.iter().try_for_each(|group| self.finite_scale(n, *group).map(drop))?;
        }
        Ok(())
    }

    /// The scale of a row and a group, if it is a number.
    fn finite_scale(&self, n: usize, group: usize) -> Result<f32, QuantError> {
        let scale = self.scales.get(n, group);
        if scale.is_finite() {
            return Ok(scale);
        }
        let problem = format!("the scale of row {n}, group {group} is {scale}; the file is damaged");
        Err(QuantError::matrix(&self.name, problem))
    }

    /// Adds the scales of a row of the stored matrix.
    fn push_scales(&self, n: usize, out: &mut LogicalRows) -> Result<(), QuantError> {
        let groups = &self.columns.groups;
        let Format::Nvfp4(_) = self.format else {
            out.scale.extend(groups.iter().map(|group| self.scales.get(n, *group)));
            return Ok(());
        };
        // Kernels decode the levels, which have no NaN.
        for &group in groups {
            out.scale.push(self.finite_scale(n, group)?);
            out.scale_levels.factor.push(self.scales.byte(n, group));
        }
        out.scale_levels.shared.extend(groups.first().map(|_| self.scales.factor()));
        Ok(())
    }

    /// [`check_finite`](Self::check_finite) of blocks that hold their scales.
    fn check_finite_blocks(&self) -> Result<(), QuantError> {
        let mut out = LogicalRows::default();
        for n in 0..self.rows.len() {
            self.fill(n..n + 1, &mut out)?;
            let mut all = out.scale.iter().chain(&out.minimum);
            if let Some(scale) = all.find(|scale| !scale.is_finite()) {
                let row = self.rows.start + n;
                let problem = format!("a scale of row {row} is {scale}; the file is damaged");
                return Err(QuantError::matrix(&self.name, problem));
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

    /// The codes of these rows, which with turns are each on their own.
    fn codes_into(&self, rows: Range<usize>, q: &mut [u8]) {
        let unpack =
            |rows, q: &mut [u8]| unpack::codes(self.format, self.codes, self.stored, rows, &self.columns, q);
        if self.turns == (0, 1) {
            return unpack(rows, q);
        }
        for (row, q) in rows.zip(q.chunks_exact_mut(self.columns.width.max(1))) {
            let stored = self.stored_row(row);
            unpack(stored..stored + 1, q);
        }
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
        if let Format::Ggml(ggml) = self.format {
            ggml::fill(ggml, self.codes, self.stored.1, rows, &self.columns.source, out);
            return Ok(());
        }
        let width = self.columns.width;
        let groups = &self.columns.groups;
        out.clear();
        for n in rows.clone().map(|row| self.stored_row(row)) {
            self.push_scales(n, out)?;
            if let Some(int) = self.format.int() {
                for &group in groups {
                    out.zero.push(self.zero(int, n, group)?);
                }
            }
        }
        out.q.resize(rows.len() * width, 0);
        self.codes_into(rows.clone(), &mut out.q);
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
