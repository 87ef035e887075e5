//! The bytes of the scales of FP4 on a device (`cuda/quant/fp4.cuh`).

use candle_core::{Result, bail};

use super::tile_rows::TILE_ROWS;
use crate::scheme::{Levels, QuantScheme};

/// The byte of a scale that is NaN.
const NAN: u8 = 255;
/// The byte of the largest scale of a row.
const LARGEST: i32 = 254;

/// The scales of a tile row: 16 factors in f32 and the bytes of its groups. `lines` are `TileRow::scales`.
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
                "scales {scale:e} and {largest:e} of a row of FP4: expected a factor of 2^-254 to 1 between them that is \
                 a power of two, as in MXFP4; quantise the checkpoint again"
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
    use super::*;
    use crate::codes::e4m3;
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
            assert!(error.contains("a power of two"), "{error}");
        }
        // Other rows may have another largest scale.
        let rows: Vec<f32> = (0..TILE_ROWS).map(|row| 0.1 * (row + 1) as f32).collect();
        let lines = [rows.clone(), rows.iter().map(|scale| scale / 8.0).collect()].concat();
        let (factors, bytes) = scales(mxfp4(), &lines).unwrap();
        assert_eq!((factors, bytes), (rows, [[254; TILE_ROWS], [251; TILE_ROWS]].concat()));
    }
}
