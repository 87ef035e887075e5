//! Encodes weights in the block formats of ggml. `moe-quant` documents and reads the layouts.
//!
//! Types with one scale for 32 columns give the bytes of ggml's reference. For types with scales in two levels, each
//! group gets the scale (and minimum) with the least squared error among a few, and then the codes of both levels with
//! the least squared error near them.

use anyhow::{Result, bail};
use moe_quant::GgmlType;
use rayon::prelude::*;

use super::bits::{extreme, inverse, put_half, put_nibbles};
use super::super_blocks::{q4_k, q5_k, q6_k};

/// The columns of a block with one scale.
const BLOCK: usize = 32;

/// Encodes one block of weights into zeroed bytes. Returns `None` if a scale is too large for F16.
type Encode = fn(&[f32], &mut [u8]) -> Option<()>;

/// Returns the types that can be written.
fn encoder(ggml: GgmlType) -> Option<Encode> {
    Some(match ggml {
        GgmlType::Q4_0 => |weights, out| with_sign(weights, out, 4),
        GgmlType::Q5_0 => |weights, out| with_sign(weights, out, 5),
        GgmlType::Q5_1 => q5_1,
        GgmlType::Q8_0 => q8_0,
        GgmlType::Q4K => q4_k,
        GgmlType::Q5K => q5_k,
        GgmlType::Q6K => q6_k,
        _ => return None,
    })
}

/// Returns the blocks of a matrix whose rows have `columns` weights.
///
/// # Errors
/// The type cannot be written or blocks do not divide a row. Weights are not finite, or too large for scales in F16;
/// the error names the row.
pub fn encode(ggml: GgmlType, weights: &[f32], columns: usize) -> Result<Vec<u8>> {
    let name = ggml.name();
    let Some(encode) = encoder(ggml) else { bail!("weights in {name} cannot be written") };
    if columns == 0 || !columns.is_multiple_of(ggml.columns()) || !weights.len().is_multiple_of(columns) {
        bail!("blocks of {} columns of {name} do not divide rows of {columns}", ggml.columns())
    }
    let mut out = vec![0; weights.len() / ggml.columns() * ggml.bytes()];
    let blocks = out.par_chunks_mut(ggml.bytes()).zip(weights.par_chunks(ggml.columns())).enumerate();
    let failed = blocks.filter_map(|(at, (out, weights))| {
        let is_finite = weights.iter().all(|w| w.is_finite());
        let encoded = if is_finite { encode(weights, out) } else { None };
        encoded.is_none().then_some(at)
    });
    if let Some(block) = failed.min() {
        let row = block * ggml.columns() / columns;
        bail!("row {row} holds weights that are not finite, or too large for scales of {name} in F16")
    }
    Ok(out)
}

/// Writes the fifth bits of 32 codes.
fn put_fifth_bits(codes: &[u8], out: &mut [u8]) {
    for (at, code) in codes.iter().enumerate() {
        out[at / 8] |= (code >> 4 & 1) << (at % 8);
    }
}

/// Q8_0: the largest magnitude is 127 steps.
fn q8_0(weights: &[f32], out: &mut [u8]) -> Option<()> {
    let scale = extreme(weights).abs() / 127.0;
    put_half(out, 0, scale)?;
    let inverse = inverse(scale);
    for (byte, w) in out[2..].iter_mut().zip(weights) {
        *byte = ((w * inverse).round() as i8).cast_unsigned();
    }
    Some(())
}

/// Q4_0 and Q5_0: the weight with the largest magnitude is the lowest code, whatever its sign.
fn with_sign(weights: &[f32], out: &mut [u8], bits: u32) -> Option<()> {
    let middle = f32::from(1u8 << (bits - 1));
    let scale = extreme(weights) / -middle;
    put_half(out, 0, scale)?;
    let inverse = inverse(scale);
    let mut codes = [0; BLOCK];
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = (w * inverse + middle + 0.5).clamp(0.0, 2.0 * middle - 1.0) as u8;
    }
    if bits == 5 {
        put_fifth_bits(&codes, &mut out[2..6]);
    }
    let first = out.len() - BLOCK / 2;
    put_nibbles(&codes, &mut out[first..]);
    Some(())
}

/// Q5_1: the smallest weight is code 0, the largest one is code 31.
fn q5_1(weights: &[f32], out: &mut [u8]) -> Option<()> {
    let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (high - low) / 31.0;
    put_half(out, 0, scale)?;
    put_half(out, 2, low)?;
    let inverse = inverse(scale);
    let mut codes = [0; BLOCK];
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = ((w - low) * inverse + 0.5).clamp(0.0, 31.0) as u8;
    }
    put_fifth_bits(&codes, &mut out[4..8]);
    put_nibbles(&codes, &mut out[8..]);
    Some(())
}

#[cfg(test)]
mod tests {
    use moe_quant::safetensors::Dtype;
    use moe_quant::safetensors::tensor::TensorView;
    use moe_quant::{Format, Reader, dequantise};

    use super::*;

    const WRITTEN: [GgmlType; 7] = [
        GgmlType::Q4_0,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
    ];

    /// Weights with about the distribution of a normal one: a sum of uniform numbers.
    fn weights(count: usize, deviation: f32) -> Vec<f32> {
        let mut state = 17u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * deviation).collect()
    }

    fn decoded(ggml: GgmlType, bytes: &[u8], columns: usize) -> Vec<f32> {
        let rows = bytes.len() / (columns / ggml.columns() * ggml.bytes());
        let view = TensorView::new(Dtype::U8, vec![rows, bytes.len() / rows], bytes).unwrap();
        let find = |suffix: &str| (suffix == "weight").then(|| view.clone());
        dequantise(&Reader::new("m", Format::Ggml(ggml), (rows, columns), find).unwrap()).unwrap()
    }

    fn relative_error(got: &[f32], want: &[f32]) -> f64 {
        let square = |x: f32| f64::from(x).powi(2);
        let error: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
        (error / want.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
    }

    /// The errors of normally distributed weights are about the errors of the format.
    #[test]
    fn what_is_read_is_near_to_what_was_written() {
        let columns = 512;
        let weights = weights(64 * columns, 0.02);
        let bounds = [0.093, 0.046, 0.044, 0.0058, 0.071, 0.036, 0.021];
        for (ggml, bound) in WRITTEN.into_iter().zip(bounds) {
            let bytes = encode(ggml, &weights, columns).unwrap();
            let error = relative_error(&decoded(ggml, &bytes, columns), &weights);
            assert!(error < bound && error > 0.6 * bound, "{}: {error}, bound {bound}", ggml.name());
        }
    }

    /// A matrix that blocks can hold exactly is read back unchanged.
    #[test]
    fn what_blocks_hold_is_exact() {
        let grid = |columns: usize, value: &dyn Fn(usize) -> f32| (0..columns).map(value).collect::<Vec<_>>();
        for (ggml, weights) in [
            (GgmlType::Q8_0, grid(32, &|at| (at as f32 * 8.0 - 127.0).clamp(-127.0, 127.0) * 0.5)),
            (GgmlType::Q4_0, grid(32, &|at| (at % 16) as f32 * 0.25 - 2.0)),
            (GgmlType::Q5_0, grid(32, &|at| at as f32 * 0.25 - 4.0)),
            (GgmlType::Q5_1, grid(32, &|at| at as f32 * 0.25 + 1.0)),
            // Two levels: scales 63 and 63 / 9 steps, and minima of the same ratio.
            (GgmlType::Q4K, grid(256, &|at| [0.63, 0.07][at / 32 % 2] * ((at % 16) as f32 - 4.0))),
            (GgmlType::Q5K, grid(256, &|at| [0.63, 0.07][at / 32 % 2] * ((at % 32) as f32 - 8.0))),
            (GgmlType::Q6K, grid(256, &|at| [1.28, 0.32][at / 16 % 2] * ((at * 4 % 64) as f32 - 32.0))),
        ] {
            let bytes = encode(ggml, &weights, weights.len()).unwrap();
            let error = relative_error(&decoded(ggml, &bytes, weights.len()), &weights);
            assert!(error < 1e-3, "{}: {error}", ggml.name());
        }
    }

    #[test]
    fn constant_blocks_and_zeros() {
        for ggml in WRITTEN {
            for value in [0.0f32, 0.75, -0.75, 1e-9] {
                let weights = vec![value; ggml.columns()];
                let bytes = encode(ggml, &weights, weights.len()).unwrap();
                for got in decoded(ggml, &bytes, weights.len()) {
                    assert!(
                        (got - value).abs() <= 0.01 * value.abs().max(1e-6),
                        "{}: {got} {value}",
                        ggml.name()
                    );
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_encoded_is_refused() {
        let mut weights = vec![0.5; 4 * 256];
        for ggml in WRITTEN {
            for wrong in [f32::NAN, f32::INFINITY, 3e38] {
                weights[2 * 256 + 3] = wrong;
                let error = encode(ggml, &weights, 256).unwrap_err().to_string();
                assert!(error.starts_with("row 2 ") && error.contains(ggml.name()), "{error}");
            }
            weights[2 * 256 + 3] = 0.5;
        }
        let error = encode(GgmlType::Q4K, &weights[..128], 128).unwrap_err().to_string();
        assert!(error.contains("blocks of 256 columns of Q4_K do not divide rows of 128"), "{error}");
        let error = encode(GgmlType::Q2K, &weights, 256).unwrap_err().to_string();
        assert!(error.contains("Q2_K cannot be written"), "{error}");
    }
}
