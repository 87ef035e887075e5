//! Random quantised matrices, for benchmarks: integers or FP8 bytes, in the form in which the reader of a checkpoint
//! returns them.
//!
//! A weight depends on (seed, module, row, column) alone, so ranks that share a matrix hold parts of the same one.
//! Weights have the same standard deviation as random floats.

use std::ops::Range;

use candle_core::{Result, bail};
use half::f16;
use moe_kernels::quant::{LogicalRows, QuantPart, QuantRows};
use moe_kernels::{Codes, Levels, QuantScheme};
use moe_quant::e4m3;

use super::slice::check_ranges;
use crate::hash::{GOLDEN, mix};

/// Standard deviation of the weights, as in `initializer_range` of most models.
pub(super) const STD: f64 = 0.02;
/// Root mean square of the E4M3 values of all bytes that are not NaN.
const FP8_DEVIATION: f64 = 107.2;
/// Root of the mean square of E2M1 codes.
const FP4_DEVIATION: f64 = 2.926;
/// Scales of MXFP4, which are powers of two, and in how many of 16 groups the larger one stands: their root of the mean
/// square is that of the usual scale.
const E8M0_SCALES: [f32; 2] = [1.0 / 256.0, 1.0 / 128.0];
const LARGER_OF_16: u64 = 11;
/// The E4M3 codes of 0.75 to 1.25.
const FP8_SPREAD: std::ops::RangeInclusive<u8> = 0x34..=0x3a;
/// The integers of scales in two levels, of which 32 stands for the usual scale.
const LEVELS: std::ops::RangeInclusive<u8> = 24..=40;
/// Root mean square of the values of IQ4_NL.
const IQ4_NL_DEVIATION: f64 = 67.44;

/// A random matrix or a rank's part of it.
struct RandomRows {
    key: u64,
    scheme: QuantScheme,
    /// The rows of the whole matrix that this part has.
    rows: Range<usize>,
    columns: Range<usize>,
    /// Columns of the whole.
    k: usize,
    perm: Option<Vec<u32>>,
}

/// The part `ranges` of a random matrix of these dims, or the whole.
///
/// # Errors
/// Ranges outside of it; columns that cut a group.
pub(super) fn random_part(
    (module, key): (&str, u64),
    scheme: QuantScheme,
    dims: [usize; 2],
    ranges: Option<&[Range<usize>]>,
) -> Result<QuantPart<'static>> {
    let [n, k] = dims;
    let whole = [0..n, 0..k];
    let ranges = ranges.unwrap_or(&whole);
    check_ranges(module, ranges, &dims)?;
    let rows = ranges[0].clone();
    let held = ranges[1].clone();
    // All modules of one size have the same order, because gate and up share it.
    let perm = scheme.act_order.then(|| {
        let mut order: Vec<u32> = (0..k as u32).collect();
        order.sort_by_key(|column| mix(u64::from(*column) ^ GOLDEN));
        order
    });
    // This is the same as in the reader of a checkpoint: with act-order a rank keeps all groups.
    let (columns, inputs) = if perm.is_some() { (0..k, held) } else { (held.clone(), 0..held.len()) };
    let group = scheme.group_size(k);
    let cuts = |end: usize| end != k && !end.is_multiple_of(group);
    if group < k && (cuts(columns.start) || cuts(columns.end)) {
        bail!("{module}: columns {columns:?} cut a group of {group} columns")
    }
    Ok(QuantPart { rows: Box::new(RandomRows { key, scheme, rows, columns, k, perm }), inputs })
}

impl RandomRows {
    fn hash(&self, what: u64, i: usize) -> u64 {
        mix(self.key ^ what.wrapping_mul(GOLDEN)).wrapping_add((i as u64).wrapping_mul(GOLDEN))
    }

    /// Random bits of a group of a row of the whole matrix.
    fn group(&self, row: usize, group: usize) -> u64 {
        let row = self.scheme.group.scale_row(row);
        mix(self.hash(1, row * self.scheme.groups(self.k) + group))
    }

    /// The usual scale.
    fn scale(&self) -> f64 {
        let scheme = self.scheme;
        let deviation = match scheme.codes {
            Codes::E4m3 => FP8_DEVIATION,
            Codes::E2m1 => FP4_DEVIATION,
            Codes::Iq4Nl => IQ4_NL_DEVIATION,
            _ => f64::from(1u32 << scheme.bits()) / 12f64.sqrt(),
        };
        STD / deviation
    }

    /// The integer around which the codes of integers are.
    fn center(&self) -> u8 {
        if self.scheme.has_minima() { 1 << (self.scheme.bits() - 1) } else { self.scheme.middle() }
    }

    /// The float that all groups of the matrix share, where an integer and a float make a scale.
    fn shared(&self) -> f32 {
        f16::from_f64(self.scale() / 32.0).to_f32()
    }

    /// Adds the scale of a group, from its random bits.
    fn push_scale(&self, bits: u64, out: &mut LogicalRows) {
        if let Levels::Two(_) = self.scheme.levels {
            let integer = LEVELS.start() + (bits >> 48) as u8 % LEVELS.len() as u8;
            out.scale_levels.factor.push(integer);
            return out.scale.push(f32::from(integer) * self.shared());
        }
        if self.scheme.levels == Levels::Fp8 {
            let spread = FP8_SPREAD.start() + (bits >> 48) as u8 % FP8_SPREAD.len() as u8;
            out.scale_levels.factor.push(spread);
            return out.scale.push(e4m3(spread) * self.scale() as f32);
        }
        if self.scheme.codes == Codes::E2m1 {
            return out.scale.push(E8M0_SCALES[usize::from((bits >> 48) % 16 < LARGER_OF_16)]);
        }
        let spread = 0.75 + (bits >> 48) as f64 / f64::from(1 << 17);
        out.scale.push(f16::from_f64(self.scale() * spread).to_f32());
    }

    /// Adds the minima of rows whose scales are complete: the center of the codes times the scale.
    fn push_minima(&self, out: &mut LogicalRows) {
        let center = f32::from(self.center());
        let LogicalRows { scale, minimum, scale_levels, minimum_levels, .. } = out;
        minimum.extend(scale.iter().map(|scale| scale * center));
        minimum_levels.factor.extend(&scale_levels.factor);
        minimum_levels.shared.extend(scale_levels.shared.iter().map(|shared| shared * center));
    }

    /// The zero point of a group, from its random bits.
    fn zero(&self, bits: u64) -> u8 {
        let near = if self.scheme.has_zero_points() { (bits % 3) as u8 } else { 1 };
        (self.scheme.middle() + near).saturating_sub(1)
    }
}

impl QuantRows for RandomRows {
    fn shape(&self) -> (usize, usize) {
        (self.rows.len(), self.columns.len())
    }

    fn scheme(&self) -> QuantScheme {
        self.scheme
    }

    fn perm(&self) -> Option<&[u32]> {
        self.perm.as_deref()
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let group = self.scheme.group_size(self.k);
        let groups = self.scheme.groups(self.columns.len());
        let first_group = self.columns.start / group;
        let mask = u64::from_le_bytes([self.scheme.largest_code(); 8]);
        let words = self.k.div_ceil(8);
        out.clear();
        for row in rows.map(|row| self.rows.start + row) {
            let start = out.q.len();
            let range = self.columns.start / 8..self.columns.end.div_ceil(8);
            for word in range.clone() {
                out.q.extend_from_slice(&(mix(self.hash(0, row * words + word)) & mask).to_le_bytes());
            }
            let ahead = self.columns.start - range.start * 8;
            out.q.drain(start..start + ahead);
            out.q.truncate(start + self.columns.len());
            // NaN is left out, and so is the lowest integer, whose opposite does not exist. Otherwise the mean of the
            // integers would not be the zero point. All rows of a product would then grow alike, and every token would
            // choose the same experts.
            let codes = &mut out.q[start..];
            let middle = self.center();
            match self.scheme.codes {
                Codes::E4m3 => codes.iter_mut().filter(|q| **q & 0x7f == 0x7f).for_each(|q| *q ^= 1),
                Codes::E2m1 | Codes::Iq4Nl => {}
                _ => codes.iter_mut().filter(|q| **q == 0).for_each(|q| *q = middle),
            }
            for g in 0..groups {
                let bits = self.group(row, first_group + g);
                self.push_scale(bits, out);
                if self.scheme.is_int() && !self.scheme.has_minima() {
                    out.zero.push(self.zero(bits));
                }
            }
            let shared = self.scheme.shared_scales(self.columns.len());
            match self.scheme.levels {
                Levels::Fp8 => out.scale_levels.shared.push(self.scale() as f32),
                Levels::Two(_) => out.scale_levels.shared.extend(std::iter::repeat_n(self.shared(), shared)),
                Levels::One => {}
            }
        }
        if self.scheme.has_minima() {
            self.push_minima(out);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::QuantGroup;

    use super::*;

    fn schemes() -> [QuantScheme; 9] {
        let int = |bits, group, zero_point| {
            QuantScheme::int(bits, QuantGroup::Size(group)).with_zero_points(zero_point)
        };
        let block = QuantScheme::fp8(QuantGroup::Block { n: 16, k: 32 });
        let fp4 = QuantScheme::fp4(QuantGroup::Size(32));
        let nvfp4 = QuantScheme::fp4(QuantGroup::Size(16)).with_fp8_scales();
        let q4k = int(4, 32, false).with_minima().with_shared_scales(8);
        let q4_1 = int(4, 32, false).with_minima();
        let q6k = int(6, 16, false).with_shared_scales(16);
        let tensor = QuantScheme::fp8(QuantGroup::Tensor);
        [int(4, 32, false), int(8, 64, true), block, tensor, fp4, nvfp4, q4k, q4_1, q6k]
    }

    fn floats(part: &QuantPart<'_>) -> Result<Vec<f32>> {
        let rows = &part.rows;
        let (n, k) = part.rows.shape();
        let mut all = LogicalRows::default();
        rows.read(0..n, &mut all)?;
        let scheme = rows.scheme();
        let groups = rows.scheme().groups(k);
        let value = |i: usize| {
            let at = i / k * groups + i % k / scheme.group_size(k);
            let zero = all.zero.get(at).map_or(0.0, |zero| f32::from(*zero));
            all.scale[at] * (scheme.value(all.q[i]) - zero) - all.minimum.get(at).unwrap_or(&0.0)
        };
        Ok((0..n * k).map(value).collect())
    }

    #[test]
    fn weights_have_the_deviation_of_floats() -> Result<()> {
        for scheme in schemes() {
            let all = floats(&random_part(("m", 5), scheme, [64, 256], None)?)?;
            let square = all.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / all.len() as f64;
            assert!((0.8..1.25).contains(&(square.sqrt() / STD)), "{scheme}: {}", square.sqrt());
            // The bound is five standard errors of the mean of 2^14 weights.
            let mean = all.iter().map(|x| f64::from(*x)).sum::<f64>() / all.len() as f64;
            assert!(mean.abs() < 5.0 * STD / 128.0, "{scheme}: {mean}");
        }
        Ok(())
    }

    #[test]
    fn parts_are_those_of_the_whole() -> Result<()> {
        for scheme in schemes() {
            let whole = floats(&random_part(("m", 5), scheme, [32, 192], None)?)?;
            let part = floats(&random_part(("m", 5), scheme, [32, 192], Some(&[3..20, 64..192]))?)?;
            let want: Vec<f32> =
                (3..20).flat_map(|row| whole[row * 192 + 64..(row + 1) * 192].to_vec()).collect();
            assert_eq!(part, want, "{scheme}");
        }
        let cut = random_part(("m", 5), schemes()[0], [32, 192], Some(&[0..32, 16..192])).map(|_| ());
        assert!(cut.unwrap_err().to_string().contains("cut a group of 32"));
        Ok(())
    }
}
