//! Regular expressions of the numbers on one side of a bound. Signs are not part of the expressions.
//!
//! The expressions are correct for numbers without leading zeros. They match some other texts and do not match others.

use super::decimal::Decimal;

const FRACTION: &str = r"(?:\.[0-9]+)?";

/// Returns an expression for the numbers that are not less than a bound. The bound is above zero.
pub(super) fn at_least(bound: &Decimal) -> String {
    let whole = bound.whole();
    let fraction = bound.fraction();
    let mut all = vec![format!("[1-9][0-9]{{{},}}{FRACTION}", whole.len())];
    all.extend(greater(&whole, Rest::SameLength).into_iter().map(|ints| ints + FRACTION));
    let equal = match fraction.is_empty() {
        true => FRACTION.to_string(),
        false => {
            let mut rest = greater(&fraction, Rest::Any);
            rest.push(fraction + "[0-9]*");
            format!(r"\.(?:{})", rest.join("|"))
        }
    };
    all.push(whole + &equal);
    all.join("|")
}

/// Returns an expression for the numbers that are not greater than a bound.
pub(super) fn at_most(bound: &Decimal) -> String {
    let whole = bound.whole();
    let fraction = bound.fraction();
    let mut all = Vec::new();
    if whole.len() > 1 {
        all.push(format!("(?:0|[1-9][0-9]{{0,{}}}){FRACTION}", whole.len() - 2));
    }
    let first = if whole.len() > 1 { '1' } else { '0' };
    all.extend(less(&whole, Rest::SameLength, first).into_iter().map(|ints| ints + FRACTION));
    let equal = match fraction.is_empty() {
        true => r"(?:\.0+)?".to_string(),
        false => {
            let mut rest = less(&fraction, Rest::Any, '0');
            // A shorter prefix of the bound's digits is less than the bound, because the bound's last digit is not
            // zero.
            rest.extend((1..fraction.len()).map(|n| fraction[..n].to_string()));
            rest.push(fraction + "0*");
            format!(r"(?:\.(?:{}))?", rest.join("|"))
        }
    };
    all.push(whole + &equal);
    all.join("|")
}

/// Which digits may follow the first digit that differs.
#[derive(Clone, Copy)]
enum Rest {
    /// As many digits as the bound has there.
    SameLength,
    /// Any number of digits.
    Any,
}

/// Returns expressions for the digits that are greater than `digits`.
fn greater(digits: &str, rest: Rest) -> Vec<String> {
    differing(digits, rest, |digit, _| (digit < '9').then(|| (next(digit, 1), '9')))
}

/// Returns expressions for the digits that are less than `digits`. The first digit is at least `lowest`.
fn less(digits: &str, rest: Rest, lowest: char) -> Vec<String> {
    differing(digits, rest, |digit, at| {
        let lowest = if at == 0 { lowest } else { '0' };
        (digit > lowest).then(|| (lowest, next(digit, -1)))
    })
}

fn next(digit: char, step: i8) -> char {
    char::from((digit as u8).wrapping_add_signed(step))
}

/// Returns one expression for each place: the digits before the place, a digit of the range, and the digits that may
/// follow.
fn differing(digits: &str, rest: Rest, range: impl Fn(char, usize) -> Option<(char, char)>) -> Vec<String> {
    let of = |(at, digit): (usize, char)| {
        let (low, high) = range(digit, at)?;
        let rest = match (rest, digits.len() - at - 1) {
            (Rest::Any, _) => "[0-9]*".to_string(),
            (Rest::SameLength, 0) => String::new(),
            (Rest::SameLength, left) => format!("[0-9]{{{left}}}"),
        };
        Some(format!("{}[{low}-{high}]{rest}", &digits[..at]))
    };
    digits.chars().enumerate().filter_map(of).collect()
}
