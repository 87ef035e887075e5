//! The kinds of codes that number formats have, and the values of those that stand for floats.

/// What a stored code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codes {
    /// No codes: weights in the activation dtype.
    Floats,
    /// Unsigned integers of this number of bits: 4, 5, 6 or 8.
    Int(u8),
    /// Floats of 8 bits, E4M3 without infinities.
    E4m3,
    /// Floats of 4 bits, E2M1: a sign, 2 bits of exponent (bias 1), 1 of mantissa.
    E2m1,
    /// Integers of 4 bits that stand for sixteen values, which are closer to each other near zero: ggml's IQ4_NL.
    Iq4Nl,
}

/// The values of E2M1 codes.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The values of IQ4_NL codes (ggml, `kvalues_iq4nl`).
const IQ4_NL: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

impl Codes {
    /// What a code stands for, which is not NaN.
    pub(crate) fn value(self, q: u8) -> f32 {
        match self {
            Self::Floats | Self::Int(_) => f32::from(q),
            Self::E4m3 => e4m3(q),
            Self::E2m1 => E2M1[usize::from(q & 0xf)],
            Self::Iq4Nl => IQ4_NL[usize::from(q & 0xf)],
        }
    }

    /// The values of codes of 4 bits that a codec looks up.
    pub(crate) fn book(self) -> Option<&'static [f32; 16]> {
        match self {
            Self::E2m1 => Some(&E2M1),
            Self::Iq4Nl => Some(&IQ4_NL),
            Self::Floats | Self::Int(_) | Self::E4m3 => None,
        }
    }
}

/// The values of a table as unsigned integers: value = unit * (integer - middle).
pub(crate) struct IntBook {
    /// The integer of each code.
    pub integers: [u8; 16],
    /// The integer that stands for 0.
    pub middle: u8,
    /// The step between two integers.
    pub unit: f32,
}

impl IntBook {
    /// E2M1 in halves.
    pub(crate) const E2M1: Self = Self::new(&E2M1, 12, 0.5);
    /// IQ4_NL, whose values are integers.
    pub(crate) const IQ4_NL: Self = Self::new(&IQ4_NL, 127, 1.0);

    const fn new(values: &[f32; 16], middle: u8, unit: f32) -> Self {
        let mut integers = [0; 16];
        let mut code = 0;
        while code < 16 {
            integers[code] = (values[code] / unit + middle as f32) as u8;
            code += 1;
        }
        Self { integers, middle, unit }
    }
}

/// The value of an E4M3 byte that is not NaN: a sign, 4 bits of exponent (bias 7), 3 of mantissa.
pub(crate) fn e4m3(q: u8) -> f32 {
    // As bits of an f32, the exponent is 120 too small.
    const SCALE: f32 = (1u128 << 120) as f32;
    f32::from_bits(u32::from(q & 0x80) << 24 | u32::from(q & 0x7f) << 20) * SCALE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_is_its_definition() {
        for q in 0..=255u8 {
            let exponent = i32::from(q >> 3 & 0xf);
            let mantissa = f64::from(q & 7);
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let want = if q & 0x80 == 0 { magnitude } else { -magnitude };
            assert_eq!(f64::from(e4m3(q)), want, "{q:#x}");
        }
    }

    #[test]
    fn e2m1_is_its_definition() {
        for q in 0..16u8 {
            let mantissa = f32::from(q & 1) / 2.0;
            let magnitude = match q >> 1 & 3 {
                0 => mantissa,
                exponent => (1.0 + mantissa) * f32::from(1u8 << (exponent - 1)),
            };
            let want = if q & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(Codes::E2m1.value(q).to_bits(), want.to_bits(), "{q:#x}");
        }
    }

    #[test]
    fn integers_of_a_table_stand_for_its_values() {
        for (codes, book) in [(Codes::E2m1, IntBook::E2M1), (Codes::Iq4Nl, IntBook::IQ4_NL)] {
            let values = codes.book().unwrap();
            for (value, integer) in values.iter().zip(book.integers) {
                assert_eq!(book.unit * (f32::from(integer) - f32::from(book.middle)), *value, "{codes:?}");
            }
        }
        assert!(Codes::Int(4).book().is_none());
    }
}
