//! Random quantised matrices, for benchmarks: integers or FP8 bytes, as a reader of a checkpoint would hand them over.
//!
//! A weight depends on (seed, module, row, column) alone, so ranks that share a matrix hold parts of the same one.
//! Weights have the same standard deviation as random floats.

use std::ops::Range;

use candle_core::{Result, bail};
use half::f16;
use moe_kernels::quant::{LogicalRows, QuantPart, QuantRows};
use moe_kernels::{Codes, QuantScheme};

use super::slice::check_ranges;
use crate::hash::{GOLDEN, mix};

/// Standard deviation of the weights, as in `initializer_range` of most models.
pub(super) const STD: f64 = 0.02;
/// Root of the mean square of E4M3 bytes of all bits but NaN.
const FP8_DEVIATION: f64 = 107.2;
/// Root of the mean square of E2M1 codes.
const FP4_DEVIATION: f64 = 2.926;

/// A random matrix or a rank's part of it.
struct RandomRows {
    key: u64,
    scheme: QuantScheme,
    /// The rows and columns of the whole matrix that these are.
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
    // One order for all modules of a size: gate and up share it.
    let perm = scheme.act_order.then(|| {
        let mut order: Vec<u32> = (0..k as u32).collect();
        order.sort_by_key(|column| mix(u64::from(*column) ^ GOLDEN));
        order
    });
    // As a checkpoint's reader: with act-order a rank keeps all groups.
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

    /// Scale and zero point of a group of a row of the whole matrix.
    fn group(&self, row: usize, group: usize) -> (f32, u8) {
        let scheme = self.scheme;
        let row = self.scheme.group.scale_row(row);
        let bits = mix(self.hash(1, row * scheme.groups(self.k) + group));
        let deviation = match scheme.codes {
            Codes::E4m3 => FP8_DEVIATION,
            Codes::E2m1 => FP4_DEVIATION,
            _ => f64::from(1u32 << scheme.bits()) / 12f64.sqrt(),
        };
        let spread = 0.75 + (bits >> 48) as f64 / f64::from(1 << 17);
        let near = if scheme.has_zero_points() { (bits % 3) as u8 } else { 1 };
        let zero = (scheme.middle() + near).saturating_sub(1);
        (f16::from_f64(STD / deviation * spread).to_f32(), zero)
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
            // Without NaN; and without the lowest integer, whose opposite there is not: their mean is to be the zero point,
            // or all rows of a product would grow alike, and every token choose the same experts.
            let codes = &mut out.q[start..];
            let middle = self.scheme.middle();
            match self.scheme.codes {
                Codes::E4m3 => codes.iter_mut().filter(|q| **q & 0x7f == 0x7f).for_each(|q| *q ^= 1),
                Codes::E2m1 => {}
                _ => codes.iter_mut().filter(|q| **q == 0).for_each(|q| *q = middle),
            }
            for g in 0..groups {
                let (scale, zero) = self.group(row, first_group + g);
                out.scale.push(scale);
                if self.scheme.is_int() {
                    out.zero.push(zero);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::QuantGroup;

    use super::*;

    fn schemes() -> [QuantScheme; 5] {
        let int = |bits, group, zero_point| {
            QuantScheme::int(bits, QuantGroup::Size(group)).with_zero_points(zero_point)
        };
        let block = QuantScheme::fp8(QuantGroup::Block { n: 16, k: 32 });
        let fp4 = QuantScheme::fp4(QuantGroup::Size(32));
        [int(4, 32, false), int(8, 64, true), block, QuantScheme::fp8(QuantGroup::Tensor), fp4]
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
            all.scale[at] * (scheme.value(all.q[i]) - all.zero.get(at).map_or(0.0, |zero| f32::from(*zero)))
        };
        Ok((0..n * k).map(value).collect())
    }

    #[test]
    fn weights_have_the_deviation_of_floats() -> Result<()> {
        for scheme in schemes() {
            let all = floats(&random_part(("m", 5), scheme, [64, 256], None)?)?;
            let square = all.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / all.len() as f64;
            assert!((0.8..1.25).contains(&(square.sqrt() / STD)), "{scheme}: {}", square.sqrt());
            // Five standard errors of the mean of 2^14 weights.
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
