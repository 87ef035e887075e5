//! Numbers of JSON as exact decimal numbers.

use std::cmp::Ordering;

/// The largest number of digits of a number that is written without an exponent.
const MOST_DIGITS: i64 = 400;

/// The number 0.d1 d2 d3 .. times 10^point, with its sign.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Decimal {
    negative: bool,
    /// The digits in ASCII, without zeros at either end. The number zero has no digits.
    digits: Vec<u8>,
    point: i64,
}

impl Decimal {
    /// Reads a number in the syntax of JSON.
    ///
    /// # Errors
    /// The text is not a number, or the number has too many digits.
    pub fn read(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a number, got {text:.60}");
        let (negative, unsigned) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().unwrap_or(i64::MAX)),
            None => (unsigned, 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        let mut digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).collect();
        let leading = digits.iter().take_while(|&&digit| digit == b'0').count();
        digits.drain(..leading);
        while digits.last() == Some(&b'0') {
            digits.pop();
        }
        if digits.is_empty() {
            return Ok(Self::zero());
        }
        let point = exponent.saturating_add(whole.len() as i64 - leading as i64);
        if point > MOST_DIGITS || digits.len() as i64 - point.min(0) > MOST_DIGITS {
            return Err(format!("{text:.60}: at most {MOST_DIGITS} digits are taken"));
        }
        Ok(Self { negative, digits, point })
    }

    pub fn zero() -> Self {
        Self { negative: false, digits: Vec::new(), point: 0 }
    }

    pub fn is_zero(&self) -> bool {
        self.digits.is_empty()
    }

    pub fn is_negative(&self) -> bool {
        self.negative
    }

    pub fn negated(&self) -> Self {
        Self { negative: !self.negative && !self.is_zero(), ..self.clone() }
    }

    /// Returns the digits before the decimal point without leading zeros, or "0" if there are none.
    pub fn whole(&self) -> String {
        if self.point <= 0 || self.is_zero() {
            return "0".into();
        }
        let digits = self.digits.iter().map(|&b| char::from(b)).chain(std::iter::repeat('0'));
        digits.take(self.point as usize).collect()
    }

    /// Returns the digits after the decimal point without trailing zeros.
    pub fn fraction(&self) -> String {
        let zeros = usize::try_from(-self.point).unwrap_or(0);
        let before = usize::try_from(self.point).unwrap_or(0).min(self.digits.len());
        let digits = self.digits[before..].iter().map(|&b| char::from(b));
        if self.is_zero() || before == self.digits.len() {
            return String::new();
        }
        std::iter::repeat_n('0', zeros).chain(digits).collect()
    }

    pub fn is_integer(&self) -> bool {
        self.fraction().is_empty()
    }

    /// Returns the value as a count, if it is an integer that is not negative.
    pub fn size(&self) -> Option<usize> {
        (self.is_integer() && !self.negative).then(|| self.whole().parse().ok())?
    }

    /// Returns the number written without an exponent.
    pub fn plain(&self) -> String {
        let sign = if self.negative { "-" } else { "" };
        let fraction = self.fraction();
        let dot = if fraction.is_empty() { "" } else { "." };
        format!("{sign}{}{dot}{fraction}", self.whole())
    }

    /// Returns the least number with `places` digits after the decimal point that is at least this number. Without
    /// `or_equal` it is greater than this number.
    pub fn up(&self, places: usize, or_equal: bool) -> Self {
        if self.negative {
            return self.negated().down_magnitude(places, or_equal).negated();
        }
        self.up_magnitude(places, or_equal)
    }

    /// Returns the greatest number with `places` digits after the decimal point that is at most this number. Without
    /// `or_equal` it is less than this number.
    pub fn down(&self, places: usize, or_equal: bool) -> Self {
        self.negated().up(places, or_equal).negated()
    }

    fn up_magnitude(&self, places: usize, or_equal: bool) -> Self {
        match self.fraction().len() <= places && or_equal {
            true => self.clone(),
            false => Self::scaled(&add_one(&self.cut(places)), places),
        }
    }

    fn down_magnitude(&self, places: usize, or_equal: bool) -> Self {
        let cut = self.cut(places);
        match self.fraction().len() <= places && !or_equal {
            // A number below zero has the other sign.
            true if cut.bytes().all(|b| b == b'0') => Self::scaled("1", places).negated(),
            true => Self::scaled(&subtract_one(&cut), places),
            false => Self::scaled(&cut, places),
        }
    }

    /// Returns the digits of the number up to `places` digits after the decimal point.
    pub fn cut(&self, places: usize) -> String {
        let fraction: String = self.fraction().chars().chain(std::iter::repeat('0')).take(places).collect();
        self.whole() + &fraction
    }

    /// Returns an integer divided by 10^places.
    fn scaled(digits: &str, places: usize) -> Self {
        Self::read(&format!("{digits}e-{places}")).unwrap_or_else(|_| Self::zero())
    }
}

fn add_one(digits: &str) -> String {
    let mut digits: Vec<u8> = digits.bytes().collect();
    for digit in digits.iter_mut().rev() {
        if *digit < b'9' {
            *digit += 1;
            return digits.iter().map(|&b| char::from(b)).collect();
        }
        *digit = b'0';
    }
    std::iter::once('1').chain(digits.iter().map(|&b| char::from(b))).collect()
}

/// Subtracts one from a number above zero.
fn subtract_one(digits: &str) -> String {
    let mut digits: Vec<u8> = digits.bytes().collect();
    for digit in digits.iter_mut().rev() {
        if *digit > b'0' {
            *digit -= 1;
            break;
        }
        *digit = b'9';
    }
    digits.iter().map(|&b| char::from(b)).collect()
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        if self.is_zero() || other.is_zero() || self.negative != other.negative {
            let sign = |x: &Self| {
                if x.is_zero() {
                    0
                } else if x.negative {
                    -1
                } else {
                    1
                }
            };
            return sign(self).cmp(&sign(other));
        }
        let magnitude = self.point.cmp(&other.point).then_with(|| self.digits.cmp(&other.digits));
        if self.negative { magnitude.reverse() } else { magnitude }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::Decimal;

    fn of(text: &str) -> Decimal {
        Decimal::read(text).unwrap()
    }

    #[test]
    fn numbers_are_exact() {
        for (text, plain) in [
            ("12345678901234567890123", "12345678901234567890123"),
            ("-0.0", "0"),
            ("1.50e3", "1500"),
            ("-12.5e-4", "-0.00125"),
            ("100", "100"),
            ("5e-324", &format!("0.{}5", "0".repeat(323))),
        ] {
            assert_eq!(of(text).plain(), plain);
        }
        assert!(
            of("9007199254740993") > of("9007199254740992")
                && of("-2") < of("-1.99")
                && of("0.1") > of("0.0999")
        );
        assert!(of("10") > of("9") && of("1") == of("1.0") && of("-1") < of("0"));
        assert!(
            Decimal::read("1e399").is_ok()
                && Decimal::read("1e400").is_err()
                && Decimal::read("1e99999999999").is_err()
        );
        assert_eq!((of("5.0").size(), of("-1").size(), of("0.5").size()), (Some(5), None, None));
    }

    #[test]
    fn rounding_goes_to_the_next_number_of_so_many_places() {
        for (text, places, or_equal, up, down) in [
            ("5", 0, true, "5", "5"),
            ("5", 0, false, "6", "4"),
            ("5.5", 0, true, "6", "5"),
            ("-5.5", 0, false, "-5", "-6"),
            ("-5", 0, false, "-4", "-6"),
            ("0", 0, false, "1", "-1"),
            ("9.99", 1, true, "10", "9.9"),
            ("-0.5", 0, true, "0", "-1"),
            ("0", 2, false, "0.01", "-0.01"),
        ] {
            let x = of(text);
            assert_eq!(
                (x.up(places, or_equal).plain(), x.down(places, or_equal).plain()),
                (up.into(), down.into()),
                "{text}"
            );
        }
    }
}
