//! Returns the weights as floats, for tests and for backends that compute with matrices of floats.

use candle_core::Result;
use moe_kernels::quant::{LogicalRows, QuantRows};

/// The number of rows that are unpacked at a time.
const ROWS: usize = 32;

/// The matrix [N, inputs] in f32, columns in the order of the layer's input: scale * (q - zero), rounded once.
///
/// # Errors
/// Any error of reading `matrix`.
pub fn dequantise(matrix: &dyn QuantRows) -> Result<Vec<f32>> {
    let (n, k) = matrix.shape();
    let scheme = matrix.scheme();
    let group = scheme.group_size(k);
    let groups = scheme.groups(k);
    let input = |column: usize| matrix.perm().map_or(column, |perm| perm[column] as usize);
    let inputs = (0..k).map(input).max().map_or(0, |last| last + 1);
    // A column that fills up a group repeats an input that an earlier column has.
    let mut seen = vec![false; inputs];
    let columns: Vec<_> =
        (0..k).filter(|column| !std::mem::replace(&mut seen[input(*column)], true)).collect();
    let mut weights = vec![0f32; n * inputs];
    let mut rows = LogicalRows::default();
    for first in (0..n).step_by(ROWS) {
        let last = n.min(first + ROWS);
        matrix.read(first..last, &mut rows)?;
        for row in 0..last - first {
            for &column in &columns {
                let at = row * groups + column / group;
                let q = rows.q[row * k + column];
                let zero = rows.zero.get(at).map_or(0.0, |zero| f32::from(*zero));
                let minimum = rows.minimum.get(at).copied().unwrap_or(0.0);
                weights[(first + row) * inputs + input(column)] =
                    rows.scale[at] * (scheme.value(q) - zero) - minimum;
            }
        }
    }
    Ok(weights)
}

/// Returns the value of an E4M3 float without infinities (`float8_e4m3fn`). The bias is 7. NaN has all bits set except
/// the sign.
pub fn e4m3(bits: u8) -> f32 {
    let exponent = i32::from(bits >> 3 & 15);
    let mantissa = f32::from(bits & 7);
    let size = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if bits & 128 == 0 { size } else { -size }
}
