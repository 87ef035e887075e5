//! Implements rounding to floats of 4 bits (E2M1): the scales of blocks, and the codes of a matrix.
//!
//! Scales are chosen as compressed-tensors chooses them for NVFP4. For MXFP4, of the two powers of two that may fit a
//! block, the one with the smaller squared error is taken.

use anyhow::{Result, bail};
use moe_quant::write::{StoredTensor, stored};
use moe_quant::{Format, e4m3};
use rayon::prelude::*;
use safetensors::Dtype;

use crate::plan::Linear;

/// The values of E2M1 codes without their sign.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The largest of them.
const LARGEST: f32 = 6.0;
/// The largest E4M3 float, and its code.
const LARGEST_FP8: f32 = 448.0;
const LARGEST_FP8_CODE: u8 = 0x7e;

/// Returns the tensors of a linear layer in MXFP4 or NVFP4, with the weights [n, k] rounded to nearest.
///
/// # Errors
/// The format has other tensors, or weights are not finite; the error names the row.
pub fn round_fp4(linear: &Linear, weights: &[f32]) -> Result<Vec<StoredTensor>> {
    if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
        bail!("row {} holds weights that are not finite", at / linear.k.max(1))
    }
    let divisor = (LARGEST * LARGEST_FP8 / largest(weights)).min(f32::MAX);
    let factor = 1.0 / divisor;
    let block = linear.format.scheme().group_size(linear.k);
    let blocks: Vec<(u8, Vec<u8>)> = weights
        .par_chunks(block)
        .map(|weights| match linear.format {
            Format::Nvfp4(_) => {
                let scale = nearest_e4m3(largest(weights) / LARGEST / factor);
                (scale, codes(weights, e4m3(scale) * factor))
            }
            _ => power_of_two(weights),
        })
        .collect();
    let tensor = |spec: moe_quant::write::StoredSpec| {
        let bytes = match spec.suffix {
            "weight_packed" => blocks.iter().flat_map(|(_, codes)| pairs(codes)).collect(),
            "weight_scale" => blocks.iter().map(|(scale, _)| *scale).collect(),
            "weight_global_scale" => divisor.to_le_bytes().to_vec(),
            other => bail!("{} has a tensor {other} that is not written", linear.format.name()),
        };
        Ok(StoredTensor { spec, bytes })
    };
    stored(linear.format, linear.n, linear.k, Dtype::F32)?.into_iter().map(tensor).collect()
}

/// Returns the largest magnitude, or 1 if all weights are 0.
fn largest(weights: &[f32]) -> f32 {
    let largest = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
    if largest > 0.0 { largest } else { 1.0 }
}

/// Returns the code of the E4M3 float that is nearest to a positive number. Codes without a sign are in the order of
/// their values.
fn nearest_e4m3(x: f32) -> u8 {
    let codes: Vec<u8> = (0..=LARGEST_FP8_CODE).collect();
    let above = codes.partition_point(|code| e4m3(*code) < x).min(codes.len() - 1);
    let below = above.saturating_sub(1);
    let [low, high] = [below, above].map(|code| (e4m3(codes[code]) - x).abs());
    // Ties go to the even code.
    let is_below = low < high || low == high && below.is_multiple_of(2);
    if is_below { codes[below] } else { codes[above] }
}

/// Returns the code of the nearest E2M1 float; ties go to the even code.
fn nearest_e2m1(x: f32) -> u8 {
    let size = x.abs();
    let mut code = 0;
    for next in 1..MAGNITUDES.len() {
        let middle = (MAGNITUDES[next - 1] + MAGNITUDES[next]) / 2.0;
        if size > middle || size == middle && next.is_multiple_of(2) {
            code = next as u8;
        }
    }
    if x < 0.0 && code > 0 { code | 8 } else { code }
}

/// Returns the codes of weights with this scale. Of a scale of 0, which was too small for its dtype, all weights are 0.
fn codes(weights: &[f32], scale: f32) -> Vec<u8> {
    weights.iter().map(|w| if scale > 0.0 { nearest_e2m1(w / scale) } else { 0 }).collect()
}

/// Returns the E8M0 code and the codes of a block in MXFP4.
fn power_of_two(weights: &[f32]) -> (u8, Vec<u8>) {
    let exponent = i32::from((largest(weights).to_bits() >> 23) as u8);
    let fitted = |exponent: i32| {
        let scale = exponent.clamp(1, 254) as u8;
        let value = f32::from_bits(u32::from(scale) << 23);
        let codes = codes(weights, value);
        let error = codes.iter().zip(weights).map(|(code, w)| {
            let magnitude = MAGNITUDES[usize::from(code & 7)] * value;
            f64::from(magnitude - w.abs()).powi(2)
        });
        (error.sum::<f64>(), scale, codes)
    };
    // The largest weight is between 4 and 8 scales, where those above 6 are cut off, or between 2 and 4.
    let [cut, whole] = [exponent - 2, exponent - 1].map(fitted);
    let (_, scale, codes) = if cut.0 <= whole.0 { cut } else { whole };
    (scale, codes)
}

/// Returns two codes to a byte, the first in the lower half.
fn pairs(codes: &[u8]) -> impl Iterator<Item = u8> {
    codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_nearest_values() {
        for (x, code) in [
            (0.0, 0),
            (0.25, 0),
            (0.26, 1),
            (0.75, 2),
            (1.25, 2),
            (1.26, 3),
            (1.75, 4),
            (2.5, 4),
            (3.5, 6),
            (5.0, 6),
            (5.1, 7),
            (100.0, 7),
            (-0.1, 0),
            (-3.0, 13),
        ] {
            assert_eq!(nearest_e2m1(x), code, "{x}");
        }
        for code in 0..=LARGEST_FP8_CODE {
            assert_eq!(nearest_e4m3(e4m3(code)), code);
        }
        assert_eq!([1e-9, 1000.0, 1.06, 1.0625].map(nearest_e4m3), [0, 0x7e, 0x38, 0x38]);
    }

    #[test]
    fn a_power_of_two_leaves_the_smaller_error() {
        // 7 is cut off at 6; alone it is nearer to 8 = 4 * 2 halves than to 6.
        let mut weights = vec![0.0f32; 32];
        weights[0] = 7.5;
        assert_eq!(power_of_two(&weights).0, 128);
        weights[0] = 6.0;
        assert_eq!(power_of_two(&weights), (127, [vec![7], vec![0; 31]].concat()));
        assert_eq!(power_of_two(&[0.0; 32]).1, vec![0; 32]);
    }
}
