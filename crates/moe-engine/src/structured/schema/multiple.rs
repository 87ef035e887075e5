//! Implements `multipleOf`: which numbers are multiples, and the texts of multiples.

use llguidance::derivre::RegexAst;

use super::decimal::Decimal;

/// The largest divisor, without its trailing zeros. The lexer keeps a state for each remainder.
pub(super) const LARGEST: u64 = 500;
/// The largest number of digits after the decimal point of a divisor.
const MOST_PLACES: usize = 5;

/// A divisor. Its value is digits times 10^-places.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Divisor {
    /// The digits, which are not a multiple of 10.
    digits: u64,
    places: usize,
    /// The number of trailing zeros of a divisor such as 1200.
    zeros: usize,
}

impl Divisor {
    /// Reads the divisor of a schema.
    ///
    /// # Errors
    /// The divisor is zero, or has too many digits.
    pub fn of(value: &Decimal) -> Result<Self, String> {
        if value.is_zero() || value.is_negative() {
            return Err("multipleOf: expected a number above 0".into());
        }
        let whole = value.whole();
        let fraction = value.fraction();
        let all = format!("{whole}{fraction}");
        let digits = all.trim_start_matches('0').trim_end_matches('0');
        let zeros = if fraction.is_empty() { whole.len() - whole.trim_end_matches('0').len() } else { 0 };
        match digits.parse() {
            Ok(digits) if digits <= LARGEST && fraction.len() <= MOST_PLACES => {
                Ok(Self { digits, places: fraction.len(), zeros })
            }
            _ => Err(format!(
                "multipleOf {}: at most {LARGEST} is supported, without zeros at the end and the decimal point",
                value.plain()
            )),
        }
    }

    /// Returns whether a number is a multiple.
    pub fn divides(&self, value: &Decimal) -> bool {
        if value.fraction().len() > self.places {
            return false;
        }
        let digits = value.cut(self.places);
        let Some(kept) = digits.len().checked_sub(self.zeros) else { return value.is_zero() };
        let (kept, zeros) = digits.split_at(kept);
        zeros.bytes().all(|b| b == b'0')
            && kept.bytes().fold(0, |rest, b| (rest * 10 + u64::from(b - b'0')) % self.digits) == 0
    }

    /// Returns the texts of the multiples that are not negative. The result also contains texts that are not numbers.
    pub fn texts(&self) -> RegexAst {
        // A multiple of a divisor with two digits after the decimal point may have one such digit: 0.5 is a multiple of
        // 0.25.
        let of_places = |places: usize| {
            let power = 10i128.pow((self.places - places) as u32);
            let digits = i128::from(self.digits) / greatest_common(i128::from(self.digits), power);
            RegexAst::MultipleOf(digits as u32, places as u32)
        };
        let multiple = RegexAst::Or((0..=self.places).map(of_places).collect());
        if self.zeros == 0 {
            return multiple;
        }
        let zeros = RegexAst::Regex(format!("0{{{}}}", self.zeros));
        RegexAst::Or(vec![RegexAst::Literal("0".into()), RegexAst::Concat(vec![multiple, zeros])])
    }

    /// Returns the number of digits after the decimal point that multiples have.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Returns the divisor's digits without the decimal point and without trailing zeros.
    pub fn digits(&self) -> u64 {
        self.digits
    }

    /// Returns the approximate number of digits of the divisor.
    pub fn length(&self) -> usize {
        self.digits.to_string().len() + self.zeros
    }

    /// Returns the least common multiple of the divisors, as an integer in units of 10^-places.
    pub fn common(divisors: &[Self], places: usize) -> Option<i128> {
        let scaled = |divisor: &Self| {
            let power = u32::try_from(places - divisor.places + divisor.zeros).ok()?;
            10i128.checked_pow(power)?.checked_mul(divisor.digits.into())
        };
        divisors.iter().try_fold(1i128, |common, divisor| {
            let other = scaled(divisor)?;
            (common / greatest_common(common, other)).checked_mul(other)
        })
    }
}

pub(super) fn greatest_common(mut a: i128, mut b: i128) -> i128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
