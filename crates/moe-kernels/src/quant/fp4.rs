//! The codes of FP4 on a device: their signs, and the order of their bits in a word (`cuda/quant/fp4.cuh`).

/// The sign of a code.
const SIGN: u8 = 8;

/// Moves the sign of a group's scale to the codes of the group. Where the scale is zero or NaN, the codes become zeros
/// with that sign.
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

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::codes::Codes;

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
