//! Tensors and headers of quantised checkpoints: the inverse of the readers, for GPTQ and `pack-quantized`. Of
//! `mxfp4-pack-quantized` and `nvfp4-pack-quantized` the header and the list of tensors.

mod header;
mod pack;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::QuantError;
use crate::format::{Format, Fp4Tensors, IntFormat};
use crate::layout::{TensorSpec, check_groups, layout};

pub use header::{Exception, header};
pub use pack::pack;

/// A matrix \[n, k\] in integers: w = scale * (q - zero), columns in the order of the layer's input.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntMatrix {
    /// Rows: outputs.
    pub n: usize,
    /// Columns: inputs.
    pub k: usize,
    /// \[n, k\]: integers 0 .. 2^bits - 1.
    pub q: Vec<u8>,
    /// \[n, groups\], each exact in the dtype that it is stored in.
    pub scale: Vec<f32>,
    /// \[n, groups\]; 2^(bits - 1) everywhere in a symmetric format.
    pub zero: Vec<u8>,
    /// With act-order: the group of each column, \[k\].
    pub g_idx: Option<Vec<u32>>,
}

impl IntMatrix {
    /// The weights \[n, k\] that it stands for, in f32.
    ///
    /// # Errors
    /// Lists whose lengths do not fit `n` and `k`: the error names the list.
    pub fn weights(&self) -> Result<Vec<f32>, QuantError> {
        let groups = self.groups().map_err(|problem| QuantError::matrix("IntMatrix", problem))?;
        let size = self.k / groups.max(1);
        let group = |column: usize| self.g_idx.as_ref().map_or(column / size.max(1), |g| g[column] as usize);
        let of_column: Vec<usize> = (0..self.k).map(group).collect();
        let mut weights = Vec::with_capacity(self.q.len());
        for (row, q) in self.q.chunks_exact(self.k.max(1)).enumerate() {
            weights.extend(q.iter().zip(&of_column).map(|(q, group)| {
                let at = row * groups + group;
                self.scale[at] * f32::from(i16::from(*q) - i16::from(self.zero[at]))
            }));
        }
        Ok(weights)
    }

    /// The groups of a row, if all lists have the lengths that they imply and all columns are in a group.
    fn groups(&self) -> Result<usize, String> {
        let Self { n, k, .. } = *self;
        let scales = self.scale.len();
        let integers = n.checked_mul(k).ok_or(format!("[{n}, {k}] are more integers than memory holds"))?;
        if self.q.len() != integers {
            return Err(format!("expected `q` with n * k = {integers} integers, got {}", self.q.len()));
        }
        if integers == 0 {
            return Ok(0);
        }
        let groups = scales / n;
        if groups == 0 || scales != groups * n || !k.is_multiple_of(groups) {
            return Err(format!(
                "expected `scale` with one scale for each of n = {n} rows and each group of equal parts of k = {k} \
                 columns, got {scales} scales"
            ));
        }
        if self.zero.len() != scales {
            return Err(format!("expected `zero` as long as `scale`, {scales}, got {}", self.zero.len()));
        }
        let Some(g_idx) = &self.g_idx else { return Ok(groups) };
        if g_idx.len() != k {
            return Err(format!("expected `g_idx` with k = {k} groups of columns, got {}", g_idx.len()));
        }
        match g_idx.iter().find(|group| **group as usize >= groups) {
            Some(group) => Err(format!("expected groups below {groups} in `g_idx`, got {group}")),
            None => Ok(groups),
        }
    }
}

/// A tensor as a file holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name, dtype and shape.
    pub spec: StoredSpec,
    /// Little-endian elements in row-major order.
    pub bytes: Vec<u8>,
}

/// Name, dtype and shape of a tensor that [`pack`] makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSpec {
    /// What follows the module's name and a dot.
    pub suffix: &'static str,
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Vec<usize>,
}

impl StoredSpec {
    /// Bytes of the tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The tensors of a matrix \[n, k\] in a format that is written, known before there are any weights: of integers
/// those that [`pack`] makes, with scales of dtype `scales`.
///
/// GPTQ has `g_idx` with and without act-order, as its makers write it; `weight_shape` is I64.
///
/// # Errors
/// A format that is not written; sizes that it cannot hold, a shorter last group among them; another dtype than F16,
/// BF16 and F32.
pub fn stored(format: Format, n: usize, k: usize, scales: Dtype) -> Result<Vec<StoredSpec>, QuantError> {
    written(format)?;
    if !matches!(scales, Dtype::F16 | Dtype::BF16 | Dtype::F32) {
        let problem = format!("scales are written in F16, BF16 or F32, not in {scales:?}");
        return Err(QuantError::matrix(format.name(), problem));
    }
    let dtype = |spec: &TensorSpec| match (spec.suffix, format.int()) {
        (_, None) => spec.dtypes[0],
        ("scales" | "weight_scale", _) => scales,
        ("weight_shape", _) => Dtype::I64,
        _ => Dtype::I32,
    };
    let specs = layout(format, n, k)?.into_iter();
    if let Some(int) = format.int() {
        check_groups(&format!("{} [{n}, {k}]", format.name()), int, k)?;
    }
    Ok(specs
        .map(|mut spec| StoredSpec {
            suffix: spec.suffix,
            dtype: dtype(&spec),
            shape: spec.shapes.swap_remove(0),
        })
        .collect())
}

/// Refuses formats that are not written.
fn written(format: Format) -> Result<(), QuantError> {
    match format {
        Format::Gptq { .. } | Format::PackQuantized { .. } => Ok(()),
        Format::Mxfp4(Fp4Tensors::Packed) | Format::Nvfp4(Fp4Tensors::Packed) => Ok(()),
        other => Err(QuantError::unsupported(
            format!("writing the format {}", other.name()),
            "gptq, pack-quantized, mxfp4-pack-quantized and nvfp4-pack-quantized are written",
        )),
    }
}

/// The value of `scale` in a dtype that holds scales, rounded up, so that no weight of the group is outside of its
/// range; `None` if it is not finite there.
pub fn round_scale(scale: f32, dtype: Dtype) -> Option<f32> {
    let up = |nearest: f32, next: fn(u16) -> f32, bits: u16| {
        if nearest < scale { next(bits + 1) } else { nearest }
    };
    let rounded = match dtype {
        Dtype::F32 => scale,
        Dtype::BF16 => {
            let nearest = bf16::from_f32(scale);
            up(nearest.to_f32(), |bits| bf16::from_bits(bits).to_f32(), nearest.to_bits())
        }
        _ => {
            let nearest = f16::from_f32(scale);
            up(nearest.to_f32(), |bits| f16::from_bits(bits).to_f32(), nearest.to_bits())
        }
    };
    (rounded.is_finite() && rounded > 0.).then_some(rounded)
}

/// Columns of a group in rows of k columns.
pub(crate) fn group_size(int: IntFormat, k: usize) -> usize {
    int.group.columns(k)
}
