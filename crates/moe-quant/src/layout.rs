//! Which tensors a quantised matrix has in a checkpoint: their names, dtypes and shapes, so that a file is verified
//! before any weight is read.

use moe_kernels::QuantGroup;
use safetensors::Dtype;

use crate::error::QuantError;
use crate::format::{Format, IntFormat};

/// One tensor of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// What follows the module's name and a dot.
    pub suffix: &'static str,
    /// Dtypes that it may have.
    pub dtypes: &'static [Dtype],
    /// Shapes that it may have, the usual one first.
    pub shapes: Vec<Vec<usize>>,
    /// Whether the file must hold it.
    pub required: bool,
}

const FLOATS: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];
/// Words of packed integers: the makers write I32, some tools U32.
const WORDS: &[Dtype] = &[Dtype::I32, Dtype::U32];
const BYTES: &[Dtype] = &[Dtype::U8];
const FP8: &[Dtype] = &[Dtype::F8_E4M3];
const INDICES: &[Dtype] = &[Dtype::I32, Dtype::I64];

impl TensorSpec {
    fn new(suffix: &'static str, dtypes: &'static [Dtype], shape: impl Into<Vec<usize>>) -> Self {
        Self { suffix, dtypes, shapes: vec![shape.into()], required: true }
    }

    fn optional(self) -> Self {
        Self { required: false, ..self }
    }

    fn or_shape(mut self, shape: impl Into<Vec<usize>>) -> Self {
        self.shapes.push(shape.into());
        self
    }

    /// Whether a tensor of this dtype and shape fits.
    ///
    /// # Errors
    /// One sentence: expected and got. `module` is the name before the suffix.
    pub fn check(&self, module: &str, dtype: Dtype, shape: &[usize]) -> Result<(), QuantError> {
        let name = format!("{module}.{}", self.suffix);
        if !self.dtypes.contains(&dtype) {
            let expected: Vec<_> = self.dtypes.iter().map(|d| format!("{d:?}")).collect();
            let problem = format!("expected dtype {}, got {dtype:?}", expected.join(" or "));
            return Err(QuantError::matrix(&name, problem));
        }
        if !self.shapes.iter().any(|expected| expected == shape) {
            let expected: Vec<_> = self.shapes.iter().map(|s| format!("{s:?}")).collect();
            let problem = format!("expected shape {}, got {shape:?}", expected.join(" or "));
            return Err(QuantError::matrix(&name, problem));
        }
        Ok(())
    }
}

/// The tensors of a linear layer with weights \[n, k\], biases aside. Other tensors of the module (`input_scale`) are
/// not read.
///
/// # Errors
/// Sizes that the format cannot hold: groups or blocks that do not divide k (but in GPTQ, where the last group may be
/// shorter), sizes that do not fill words of 32 bits.
pub fn layout(format: Format, n: usize, k: usize) -> Result<Vec<TensorSpec>, QuantError> {
    let name = format!("{} [{n}, {k}]", format.name());
    if n == 0 || k == 0 {
        return Err(QuantError::matrix(&name, "a quantised matrix has at least one row and one column"));
    }
    if let Some(int) = format.int() {
        check_sizes(&name, format, int, n, k)?;
    }
    let block = format.block();
    if !k.is_multiple_of(block) {
        let problem = format!("blocks of {block} columns do not divide {k} columns");
        return Err(QuantError::matrix(&name, problem));
    }
    let groups = format.scheme().groups(k);
    Ok(match format {
        Format::Plain => vec![TensorSpec::new("weight", FLOATS, [n, k])],
        Format::Gptq { int, .. } => {
            let g_idx = TensorSpec::new("g_idx", INDICES, [k]);
            vec![
                TensorSpec::new("qweight", WORDS, [k / int.per_word(), n]),
                TensorSpec::new("qzeros", WORDS, [groups, n / int.per_word()]),
                TensorSpec::new("scales", FLOATS, [groups, n]),
                if int.act_order { g_idx } else { g_idx.optional() },
            ]
        }
        Format::Awq { int } => vec![
            TensorSpec::new("qweight", WORDS, [k, n / int.per_word()]),
            TensorSpec::new("qzeros", WORDS, [groups, n / int.per_word()]),
            TensorSpec::new("scales", FLOATS, [groups, n]),
        ],
        Format::PackQuantized { int } => pack_quantized(int, n, k, groups),
        Format::Ggml(ggml) => vec![TensorSpec::new("weight", BYTES, [n, k / block * ggml.bytes()])],
        Format::Mxfp4(tensors) => vec![
            TensorSpec::new(tensors.codes(), BYTES, [n, k / 2]),
            TensorSpec::new("weight_scale", BYTES, [n, groups]),
        ],
        Format::Nvfp4(tensors) => vec![
            TensorSpec::new(tensors.codes(), BYTES, [n, k / 2]),
            TensorSpec::new("weight_scale", FP8, [n, groups]),
            TensorSpec::new(tensors.matrix_scale(), &[Dtype::F32], [1]).or_shape([]),
        ],
        Format::Fp8 { scales, scale_inv } => {
            let suffix = if scale_inv { "weight_scale_inv" } else { "weight_scale" };
            let scale = match scales {
                QuantGroup::Size(_) => TensorSpec::new(suffix, FLOATS, [n, groups]),
                QuantGroup::Block { n: rows, .. } => {
                    TensorSpec::new(suffix, FLOATS, [n.div_ceil(rows.max(1)), groups])
                }
                QuantGroup::Channel => TensorSpec::new(suffix, FLOATS, [n, 1]).or_shape([n]),
                QuantGroup::Tensor => TensorSpec::new(suffix, FLOATS, [1]).or_shape([]).or_shape([1, 1]),
            };
            vec![TensorSpec::new("weight", FP8, [n, k]), scale]
        }
    })
}

fn pack_quantized(int: IntFormat, n: usize, k: usize, groups: usize) -> Vec<TensorSpec> {
    let mut specs = vec![
        TensorSpec::new("weight_packed", WORDS, [n, k.div_ceil(int.per_word())]),
        TensorSpec::new("weight_scale", FLOATS, [n, groups]),
        TensorSpec::new("weight_shape", INDICES, [2]),
    ];
    if int.group == QuantGroup::Channel {
        specs[1] = specs[1].clone().or_shape([n]);
    }
    if int.zero_point {
        specs.push(TensorSpec::new("weight_zero_point", WORDS, [n.div_ceil(int.per_word()), groups]));
    }
    if int.act_order {
        specs.push(TensorSpec::new("weight_g_idx", INDICES, [k]));
    }
    specs
}

/// Fails unless whole groups make up the columns.
pub(crate) fn check_groups(name: &str, int: IntFormat, k: usize) -> Result<(), QuantError> {
    match int.group {
        QuantGroup::Size(group) if !k.is_multiple_of(group) => {
            Err(QuantError::matrix(name, format!("groups of {group} columns do not divide {k} columns")))
        }
        _ => Ok(()),
    }
}

fn check_sizes(name: &str, format: Format, int: IntFormat, n: usize, k: usize) -> Result<(), QuantError> {
    let awq = matches!(format, Format::Awq { .. });
    if !(int.bits == 4 || int.bits == 8 && !awq) || awq && int.act_order {
        let what = if int.act_order { " with act-order" } else { "" };
        return Err(QuantError::matrix(name, format!("the format has no {} bits{what}", int.bits)));
    }
    // GPTQModel and AutoRound end a row with a shorter group; the other makers refuse to.
    if !matches!(format, Format::Gptq { .. }) {
        check_groups(name, int, k)?;
    }
    let (rows, columns) = match format {
        Format::Gptq { .. } => (true, true),
        Format::Awq { .. } => (true, false),
        _ => (false, false),
    };
    let words = int.per_word();
    for (checked, what, size) in [(rows, "rows", n), (columns, "columns", k)] {
        if checked && !size.is_multiple_of(words) {
            let problem = format!("{what} are packed {words} to a word, but there are {size}");
            return Err(QuantError::matrix(name, problem));
        }
    }
    Ok(())
}
