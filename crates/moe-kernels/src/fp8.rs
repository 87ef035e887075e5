//! Activations in FP8 (E4M3): a readable definition of the kernels that quantise rows.
//!
//! Each 128 columns of a row have a scale, which is their largest magnitude over 448. Each value x becomes the nearest
//! E4M3 number of x / scale. DeepSeek-V3's report (arXiv 2412.19437) quantises activations in this way for weights in
//! blocks.

/// Columns of a row that share a scale.
pub const FP8_GROUP: usize = 128;
/// The largest E4M3.
const MOST: f32 = 448.0;
/// Exponent of the smallest normal E4M3, and number of bits after the first one.
const LEAST_EXPONENT: i32 = -6;
const FRACTION_BITS: i32 = 3;

/// The values of the quantised rows `x`, as kernels with FP8 activations multiply them: f32 in, f32 out, in groups of
/// [`FP8_GROUP`] columns. The number of columns must be a multiple of the group. Groups whose scale would be subnormal
/// become zeros.
pub fn quantised_to_fp8(x: &[f32]) -> Vec<f32> {
    let group = |group: &[f32]| {
        let most = group.iter().fold(0f32, |most, x| most.max(x.abs()));
        let scale = most / MOST;
        let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
        group.iter().map(|x| nearest_e4m3(x * inverse) * scale).collect::<Vec<_>>()
    };
    x.chunks(FP8_GROUP).flat_map(group).collect()
}

/// The nearest E4M3 number, ties to even. Values beyond the largest number become the largest number.
fn nearest_e4m3(x: f32) -> f32 {
    let magnitude = x.abs().min(MOST);
    // The exponent in f32. Zero and small numbers are multiples of the smallest step.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(LEAST_EXPONENT);
    let step = f32::powi(2.0, exponent - FRACTION_BITS);
    ((magnitude / step).round_ties_even() * step).copysign(x)
}

/// The order of each 128 columns of a row in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fp8Order {
    /// The order of the second operand in shared memory, and of a pack's rows.
    Rows,
    /// The order of the first operand: the four columns of a lane are next to each other.
    Quads,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All magnitudes of E4M3, by their definition.
    fn all() -> Vec<f32> {
        let value = |bits: i32| match (bits >> 3, bits & 7) {
            (0, m) => m as f32 / 8.0 * f32::powi(2.0, -6),
            (e, m) => (1.0 + m as f32 / 8.0) * f32::powi(2.0, e - 7),
        };
        (0..0x7f).map(value).collect()
    }

    #[test]
    fn rounding_takes_the_nearest_of_all() {
        let all = all();
        assert_eq!(all.last(), Some(&MOST));
        for (i, pair) in all.windows(2).enumerate() {
            let low = pair[0];
            let high = pair[1];
            assert_eq!((nearest_e4m3(low), nearest_e4m3(-high)), (low, -high));
            let middle = (low + high) / 2.0;
            assert_eq!(nearest_e4m3(middle), if i % 2 == 0 { low } else { high }, "{middle}");
            assert_eq!(nearest_e4m3(middle * 1.0001), high);
            assert_eq!(nearest_e4m3(middle * 0.9999), low);
        }
        assert_eq!((nearest_e4m3(1e9), nearest_e4m3(-460.0)), (MOST, -MOST));
    }

    #[test]
    fn a_group_keeps_its_largest_value_and_its_zeros() {
        let mut x: Vec<f32> = (0..2 * FP8_GROUP).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
        x[..FP8_GROUP].fill(0.0);
        x[200] = -44.8;
        let got = quantised_to_fp8(&x);
        assert_eq!(got[..FP8_GROUP], [0.0; FP8_GROUP]);
        assert!((got[200] + 44.8).abs() < 1e-5);
        // The error is at most half a step of a number with 3 bits after its first one, or of the smallest number.
        for (x, got) in x.iter().zip(&got) {
            assert!((x - got).abs() <= (x.abs() / 16.0).max(0.1 / 1024.0) * 1.0001, "{x} became {got}");
        }
        assert_eq!(quantised_to_fp8(&[f32::MIN_POSITIVE; FP8_GROUP]), vec![0.0; FP8_GROUP]);
    }
}
