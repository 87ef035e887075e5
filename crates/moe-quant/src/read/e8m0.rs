//! Scales of 8 bits that are powers of two.

/// The value of an E8M0 byte: 2^(q - 127), NaN for 255.
pub(crate) fn e8m0(q: u8) -> f32 {
    match q {
        // This value is a subnormal f32.
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        _ => f32::from_bits(u32::from(q) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_is_its_definition() {
        for q in 0..u8::MAX {
            assert_eq!(f64::from(e8m0(q)), 2f64.powi(i32::from(q) - 127), "{q}");
        }
        assert!(e8m0(u8::MAX).is_nan());
    }
}
