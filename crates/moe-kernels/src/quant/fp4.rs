//! FP4 on a device: the order of bits in a word, and the bytes of scales. `cuda/quant/fp4.cuh` defines both and says
//! why.

use candle_core::{Result, bail};

use super::tiles::TILE_ROWS;
use crate::scheme::{Levels, QuantScheme};

/// The byte of a scale that is NaN.
const NAN: u8 = 255;
/// The byte of the largest scale of a row.
const LARGEST: i32 = 254;
/// The sign of a code.
const SIGN: u8 = 8;

/// Moves the sign of a group's scale to the codes of the group. The codes become zeros with that sign where the scale is
/// zero or NaN.
pub(super) fn take_scale(codes: &mut [u8], scale: f32) {
    let sign = if scale.is_sign_negative() { SIGN } else { 0 };
    let kept = if scale == 0.0 || scale.is_nan() { SIGN } else { u8::MAX };
    codes.iter_mut().for_each(|code| *code = (*code ^ sign) & kept);
}

/// Puts the bits of words that hold codes in the order of int4 into the order of FP4.
pub(super) fn order_bits(q: &mut [u8]) {
    let (words, _) = q.as_chunks_mut::<4>();
    for bytes in words {
        let word = u32::from_le_bytes(*bytes);
        // Pair i of a lane: its codes are in the lowest bits of both halves.
        let pair = |i: u32| word >> (4 * i) & 0x000f_000f;
        let magnitude = |i: u32| pair(i) & 0x0007_0007;
        let sign = |i: u32| pair(i) >> 3 & 0x0001_0001;
        let ordered = magnitude(0)
            | sign(0) << 9
            | magnitude(1) << 4
            | sign(1) << 13
            | magnitude(2) << 10
            | sign(2).rotate_left(16) << 3
            | (pair(3) & 0x0001_0001) << 14
            | (pair(3) & 0x0006_0006) << 6
            | sign(3) << 15;
        *bytes = ordered.to_le_bytes();
    }
}

/// The scales of a tile row, 16 factors in f32 and the bytes of its groups. `lines` are those of `TileRow::scales`.
///
/// # Errors
/// Scales of a row that are not powers of two apart, or too far apart, where each of them is one float.
pub(super) fn push_scales(scheme: QuantScheme, lines: &[f32], bytes: &mut Vec<u8>) -> Result<()> {
    let (factors, groups) = match scheme.levels {
        Levels::Fp8 => {
            let (shared, factors) = lines.split_at(TILE_ROWS.min(lines.len()));
            (shared.to_vec(), factors.iter().map(|factor| widened(*factor as u8)).collect())
        }
        Levels::One | Levels::Two(_) => relative(lines)?,
    };
    bytes.extend(factors.iter().flat_map(|factor| factor.to_le_bytes()));
    bytes.extend(groups);
    Ok(())
}

/// The largest scale of each row, and the scales as bytes: 254 - log2(largest / scale).
fn relative(lines: &[f32]) -> Result<(Vec<f32>, Vec<u8>)> {
    let mut largest = vec![0f32; TILE_ROWS];
    for line in lines.chunks_exact(TILE_ROWS) {
        // `max` takes the other number where one is NaN.
        largest.iter_mut().zip(line).for_each(|(largest, scale)| *largest = largest.max(scale.abs()));
    }
    let byte = |(i, scale): (usize, &f32)| {
        let largest = largest[i % TILE_ROWS];
        if scale.is_nan() {
            return Ok(NAN);
        }
        if *scale == 0.0 {
            return Ok(0);
        }
        let ratio = f64::from(scale.abs()) / f64::from(largest);
        let exponent = (ratio.to_bits() >> 52) as i32 - 1023;
        let is_power = ratio.to_bits() << 12 == 0;
        match u8::try_from(LARGEST + exponent) {
            Ok(byte) if is_power => Ok(byte),
            _ => bail!(
                "scales {scale:e} and {largest:e} of a row of FP4 are not a power of two from 2^-254 to 1 apart, as those of \
                 MXFP4 are; load it with --dequantise, or quantise it again"
            ),
        }
    };
    let bytes = lines.iter().enumerate().map(byte).collect::<Result<_>>()?;
    Ok((largest, bytes))
}

/// The magnitude of an E4M3 byte with 5 bits of exponent (bias 10), without subnormal numbers.
fn widened(e4m3: u8) -> u8 {
    match e4m3 & 0x7f {
        // One significant bit is the mantissa's first; the others follow it.
        small @ 0..8 => match small.checked_ilog2() {
            None => 0,
            Some(first) => (first as u8 + 1) << 3 | (small << (3 - first) & 7),
        },
        normal => normal + (3 << 3),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::codes::{Codes, e4m3};
    use crate::scheme::QuantGroup;

    fn mxfp4() -> QuantScheme {
        QuantScheme::fp4(QuantGroup::Size(32))
    }

    /// The factors and bytes of a tile row.
    fn scales(scheme: QuantScheme, lines: &[f32]) -> Result<(Vec<f32>, Vec<u8>)> {
        let mut bytes = Vec::new();
        push_scales(scheme, lines, &mut bytes)?;
        let (factors, groups) = bytes.split_at(4 * TILE_ROWS);
        let factors = factors.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok((factors, groups.to_vec()))
    }

    #[test]
    fn bytes_of_e4m3_keep_their_values() {
        for byte in (0..0x7f).chain(0x80..0xff) {
            let wide = widened(byte);
            let value = (1.0 + f32::from(wide & 7) / 8.0) * 2f32.powi(i32::from(wide >> 3) - 10);
            let want = e4m3(byte & 0x7f);
            assert_eq!(if wide == 0 { 0.0 } else { value }, want, "{byte:#x}");
            // The operand's exponent, which must stay below that of infinity.
            assert!(u32::from(wide >> 3) + 235 < 255, "{byte:#x}");
        }
    }

    #[test]
    fn scales_of_the_whole_range_are_relative_to_the_largest_of_their_row() -> Result<()> {
        let e8m0 = |exponent: i32| if exponent == 255 { f32::NAN } else { 2f64.powi(exponent - 127) as f32 };
        // Row r has the exponents r, r + 100, .., and one row has both ends of the range, one NaN, one nothing but
        // zeros.
        let groups = 4;
        let mut lines: Vec<f32> = (0..groups * TILE_ROWS)
            .map(|i| e8m0((i / TILE_ROWS * 100 + i % TILE_ROWS) as i32 % 255))
            .collect();
        lines[15] = e8m0(0);
        lines[TILE_ROWS + 15] = e8m0(254);
        lines[2 * TILE_ROWS + 3] = f32::NAN;
        (0..groups).for_each(|group| lines[group * TILE_ROWS + 7] = 0.0);
        lines[TILE_ROWS + 9] = -lines[TILE_ROWS + 9];
        let (factors, bytes) = scales(mxfp4(), &lines)?;
        assert_eq!((factors.len(), bytes.len()), (16, lines.len()));
        for (i, (scale, byte)) in lines.iter().zip(&bytes).enumerate() {
            let factor = factors[i % TILE_ROWS];
            let got = f64::from(factor) * 2f64.powi(i32::from(*byte) - 254);
            match scale {
                _ if scale.is_nan() => assert_eq!(*byte, 255),
                0.0 => assert_eq!(*byte, 0),
                _ => assert_eq!(got, f64::from(scale.abs()), "{i}"),
            }
        }
        assert_eq!((bytes[15], bytes[TILE_ROWS + 15], factors[15]), (0, 254, e8m0(254)));
        assert_eq!((factors[7], factors[3]), (0.0, e8m0(103)));
        Ok(())
    }

    #[test]
    fn other_scales_are_refused() {
        for pair in [[1.0, 0.75], [1.0, f32::from_bits(0x3f00_0001)], [2f32.powi(127), 2f32.powi(-149)]] {
            let lines: Vec<f32> = pair.iter().flat_map(|scale| [*scale; TILE_ROWS]).collect();
            let error = scales(mxfp4(), &lines).unwrap_err().to_string();
            assert!(error.contains("power of two"), "{error}");
        }
        // Other rows may have another largest scale.
        let rows: Vec<f32> = (0..TILE_ROWS).map(|row| 0.1 * (row + 1) as f32).collect();
        let lines = [rows.clone(), rows.iter().map(|scale| scale / 8.0).collect()].concat();
        let (factors, bytes) = scales(mxfp4(), &lines).unwrap();
        assert_eq!((factors, bytes), (rows, [[254; TILE_ROWS], [251; TILE_ROWS]].concat()));
    }

    #[test]
    fn codes_take_the_sign_of_their_scale() {
        let of = |scale| {
            let mut codes: Vec<u8> = (0..16).collect();
            take_scale(&mut codes, scale);
            codes
        };
        assert_eq!(of(0.5), (0..16).collect::<Vec<u8>>());
        assert_eq!(of(-0.5), (8..16).chain(0..8).collect::<Vec<u8>>());
        let signs = [[0; 8], [8; 8]].concat();
        assert_eq!((of(0.0), of(f32::NAN.abs())), (signs.clone(), signs));
        assert_eq!(of(-0.0), [[8; 8], [0; 8]].concat());
    }

    /// What the kernels make of the i-th pair of a word (`fp4_bits`): two bf16, of which this is one in f32.
    fn bits(word: u32, i: usize, half: usize) -> f32 {
        let pair = match i {
            0 => word << 6 & 0x81c0_81c0,
            1 => word << 2 & 0x81c0_81c0,
            2 => word.rotate_right(4) & 0x81c0_81c0,
            _ => (word & 0x8180_8180) | (word >> 8 & 0x0040_0040),
        };
        f32::from_bits(pair >> (16 * half) << 16)
    }

    /// The operands of all scales (`fp4_operand`), with what the product's sum is multiplied by and with the scale.
    fn operands() -> Vec<(f32, f64, f64)> {
        let mxfp4 = (1..=254u32).map(|byte| (byte << 7, 0.5, 2f64.powi(byte as i32 - 254)));
        let nvfp4 = (8..=150u32).map(|byte| {
            let scale = (1.0 + f64::from(byte % 8) / 8.0) * 2f64.powi(byte as i32 / 8 - 10);
            ((byte << 4) + 0x7580, 256.0, scale)
        });
        mxfp4.chain(nvfp4).map(|(bf16, unit, scale)| (f32::from_bits(bf16 << 16), unit, scale)).collect()
    }

    /// All codes at all places, with all scales.
    #[test]
    fn kernels_unpack_what_was_packed() {
        for (at, code) in (0..8).flat_map(|at| (0..16u8).map(move |code| (at, code))) {
            // Another code everywhere else.
            let other = code.wrapping_mul(7).wrapping_add(5) & 15;
            let placed = |i: usize| u32::from(if i == at { code } else { other }) << (4 * i);
            let word = (0..8).fold(0, |word, i| word | placed(i));
            let mut bytes = word.to_le_bytes();
            order_bits(&mut bytes);
            let bits = f64::from(bits(u32::from_le_bytes(bytes), at % 4, at / 4));
            let value = f64::from(Codes::E2m1.value(code));
            assert_eq!((bits * 2f64.powi(126)).to_bits(), value.to_bits(), "code {code} at {at}");
            for (operand, unit, scale) in operands() {
                let product = bits * f64::from(operand);
                // It is exact in bf16 unless it is too small next to the largest weight of the row.
                if product == 0.0 || product.abs() >= 2f64.powi(-126) {
                    assert_eq!(bf16::from_f64(product).to_f64(), product, "code {code}, scale {scale:e}");
                }
                assert_eq!(product * unit, value * scale, "code {code}, scale {scale:e}");
            }
        }
    }
}
