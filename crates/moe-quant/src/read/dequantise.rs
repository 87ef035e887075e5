//! Returns the weights as floats: for tests, for backends that compute with floats, and for checkpoints that are loaded
//! as floats.

use std::ops::Range;

use candle_core::{Result, bail};
use moe_kernels::quant::{LogicalRows, QuantRows};

/// The number of rows that are unpacked at a time.
const ROWS: usize = 32;

/// The matrix [N, inputs] in f32, columns in the order of the layer's input: scale * (q - zero), rounded once.
///
/// # Errors
/// Any error of reading `matrix`.
pub fn dequantise(matrix: &dyn QuantRows) -> Result<Vec<f32>> {
    let rows = FloatRows::new(matrix);
    let n = matrix.shape().0;
    let mut weights = vec![0f32; n * rows.inputs()];
    let mut stored = LogicalRows::default();
    for first in (0..n).step_by(ROWS) {
        let some = first..n.min(first + ROWS);
        let out = &mut weights[some.start * rows.inputs()..some.end * rows.inputs()];
        rows.read(some, &mut stored, out)?;
    }
    Ok(weights)
}

/// The rows of a quantised matrix as floats, some at a time, from any thread.
pub struct FloatRows<'a> {
    matrix: &'a dyn QuantRows,
    inputs: usize,
    /// With act-order the input of each column; `None` for a column that fills up a group: it repeats an input that an
    /// earlier column has.
    places: Option<Vec<Option<usize>>>,
    /// What each code stands for.
    values: [f32; 256],
}

impl<'a> FloatRows<'a> {
    /// The rows of `matrix`.
    pub fn new(matrix: &'a dyn QuantRows) -> Self {
        let k = matrix.shape().1;
        let scheme = matrix.scheme();
        let inputs = matrix.perm().map_or(k, |perm| perm.iter().max().map_or(0, |last| *last as usize + 1));
        let places = matrix.perm().map(|perm| {
            let mut seen = vec![false; inputs];
            let place = |input: &u32| {
                let input = *input as usize;
                (!std::mem::replace(&mut seen[input], true)).then_some(input)
            };
            perm.iter().map(place).collect()
        });
        let values = std::array::from_fn(|code| scheme.value(code as u8));
        Self { matrix, inputs, places, values }
    }

    /// The columns of a row: what the layer's input has.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Writes these rows, [rows, inputs], to `out`. `stored` is memory that is kept from call to call.
    ///
    /// # Errors
    /// Any error of reading the matrix; another length of `out`.
    pub fn read(&self, rows: Range<usize>, stored: &mut LogicalRows, out: &mut [f32]) -> Result<()> {
        if out.len() != rows.len() * self.inputs {
            bail!("{} rows of {} floats: expected room for them, got {}", rows.len(), self.inputs, out.len())
        }
        let k = self.matrix.shape().1;
        let scheme = self.matrix.scheme();
        let group = scheme.group_size(k);
        let groups = scheme.groups(k);
        self.matrix.read(rows, stored)?;
        if self.places.is_some() {
            // An input that no column stands for has the weight 0.
            out.fill(0.0);
        }
        let codes = stored.q.chunks_exact(k.max(1));
        for (row, (out, codes)) in out.chunks_exact_mut(self.inputs.max(1)).zip(codes).enumerate() {
            for (at, codes) in codes.chunks(group).enumerate() {
                let place = row * groups + at;
                let scale = stored.scale[place];
                let zero = stored.zero.get(place).map_or(0.0, |zero| f32::from(*zero));
                let minimum = stored.minimum.get(place).copied().unwrap_or(0.0);
                let float = |code: &u8| scale * (self.values[usize::from(*code)] - zero) - minimum;
                let first = at * group;
                match &self.places {
                    None => out[first..].iter_mut().zip(codes).for_each(|(out, code)| *out = float(code)),
                    Some(places) => {
                        for (place, code) in places[first..].iter().zip(codes) {
                            place.iter().for_each(|place| out[*place] = float(code));
                        }
                    }
                }
            }
        }
        Ok(())
    }
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
