//! `multipleOf`: which numbers are multiples, and the texts of multiples.

use llguidance::derivre::RegexAst;

use super::decimal::Decimal;

/// The greatest divisor, without zeros at its end: the lexer keeps a state for each remainder.
pub(super) const LARGEST: u64 = 500;
/// Digits behind the decimal point of a divisor.
const MOST_PLACES: usize = 5;

/// A divisor: digits times 10^-places.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Divisor {
    /// Not a multiple of 10.
    digits: u64,
    places: usize,
    /// Zeros at the end of a divisor such as 1200.
    zeros: usize,
}

impl Divisor {
    /// The divisor of a schema.
    ///
    /// # Errors
    /// It is zero, or has too many digits.
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

    /// Whether a number is a multiple.
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

    /// The texts of multiples that are not negative, besides other texts that are no numbers.
    pub fn texts(&self) -> RegexAst {
        // One of two places behind the decimal point may have one: 0.5 is a multiple of 0.25.
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

    /// Digits behind the decimal point that multiples have.
    pub fn places(&self) -> usize {
        self.places
    }

    /// It without zeros at the end and the decimal point.
    pub fn digits(&self) -> u64 {
        self.digits
    }

    /// Digits of it, about.
    pub fn length(&self) -> usize {
        self.digits.to_string().len() + self.zeros
    }

    /// The least number that all divide, as an integer of `places` digits behind the decimal point.
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
