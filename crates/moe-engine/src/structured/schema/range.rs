//! Regular expressions of the numbers on one side of a bound. Signs are not part of them.
//!
//! Both are about texts that are numbers without zeros in front; of other texts they take some and not others.

use super::decimal::Decimal;

const FRACTION: &str = r"(?:\.[0-9]+)?";

/// Numbers that are not less than a bound above zero.
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

/// Numbers that are not greater than a bound.
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
            // The digits that the bound begins with are less than the bound: its last digit is not zero.
            rest.extend((1..fraction.len()).map(|n| fraction[..n].to_string()));
            rest.push(fraction + "0*");
            format!(r"(?:\.(?:{}))?", rest.join("|"))
        }
    };
    all.push(whole + &equal);
    all.join("|")
}

/// Which digits follow the first one that differs.
#[derive(Clone, Copy)]
enum Rest {
    /// As many as there are.
    SameLength,
    /// Any number of them.
    Any,
}

/// Digits that come after `digits`.
fn greater(digits: &str, rest: Rest) -> Vec<String> {
    differing(digits, rest, |digit, _| (digit < '9').then(|| (next(digit, 1), '9')))
}

/// Digits that come before `digits`; the first one is `lowest` or more.
fn less(digits: &str, rest: Rest, lowest: char) -> Vec<String> {
    differing(digits, rest, |digit, at| {
        let lowest = if at == 0 { lowest } else { '0' };
        (digit > lowest).then(|| (lowest, next(digit, -1)))
    })
}

fn next(digit: char, step: i8) -> char {
    char::from((digit as u8).wrapping_add_signed(step))
}

/// For each place: the digits before it, a digit of the range there, and what may follow.
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
