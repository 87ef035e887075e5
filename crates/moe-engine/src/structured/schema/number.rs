//! Numbers between bounds: which numbers there are, and how they are written.
//!
//! The number of digits is limited. Otherwise a model that likes digits would write them until `max_tokens` cuts the
//! text off.

use llguidance::derivre::RegexAst;

use super::decimal::Decimal;
use super::multiple::{Divisor, LARGEST, greatest_common};
use super::range::{at_least, at_most};

/// The largest number of digits before the decimal point, which llama.cpp limits in the same way, and of digits after
/// it. Bounds with more digits raise it.
const DIGITS: usize = 16;
/// A bound with more digits than this raises the limit only if the digits are needed to satisfy the bounds.
const FEW_DIGITS: usize = 40;

/// A bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub value: Decimal,
    /// Whether the value itself is within the bounds.
    pub or_equal: bool,
}

/// The conditions that a number must satisfy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub low: Option<Bound>,
    pub high: Option<Bound>,
    pub integer: bool,
    pub divisors: Vec<Divisor>,
    /// The text of the single allowed value.
    pub written: Option<String>,
}

impl Numbers {
    /// Returns the conditions that only this number satisfies.
    ///
    /// # Errors
    /// The number has too many digits.
    pub fn one(text: &str) -> Result<Self, String> {
        let bound = Some(Bound { value: Decimal::read(text)?, or_equal: true });
        Ok(Self { low: bound.clone(), high: bound, written: Some(text.to_string()), ..Self::default() })
    }

    /// Returns the conditions that satisfy both.
    pub fn and(&self, other: &Self) -> Self {
        let stricter = |a: &Option<Bound>, b: &Option<Bound>, higher: bool| match (a, b) {
            (Some(a), Some(b)) => {
                let order = a.value.cmp(&b.value);
                let order = if higher { order } else { order.reverse() };
                Some(if order.then_with(|| b.or_equal.cmp(&a.or_equal)).is_ge() { a } else { b }.clone())
            }
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        let mut divisors = self.divisors.clone();
        divisors.extend(other.divisors.iter().filter(|divisor| !self.divisors.contains(divisor)).cloned());
        Self {
            low: stricter(&self.low, &other.low, true),
            high: stricter(&self.high, &other.high, false),
            integer: self.integer || other.integer,
            divisors,
            written: self.written.clone().or_else(|| other.written.clone()),
        }
    }

    /// Returns the value, if it is the only one within the bounds.
    pub fn value(&self) -> Option<&Decimal> {
        let low = self.low.as_ref()?;
        let high = self.high.as_ref()?;
        (low == high && low.or_equal).then_some(&low.value)
    }

    /// Returns all numbers in order, if there are at most `most`.
    pub fn list(&self, most: usize) -> Option<Vec<Decimal>> {
        let fits = |value: &Decimal| self.divisors.iter().all(|divisor| divisor.divides(value));
        if let Some(value) = self.value() {
            return Some(vec![value.clone()]);
        }
        let (Some(low), Some(high)) = self.rounded(0) else { return None };
        if !self.integer {
            return None;
        }
        let mut all = Vec::new();
        let mut next = low;
        for _ in 0..most * 100 {
            if next > high {
                return (all.len() <= most).then_some(all);
            }
            all.extend(Some(next.clone()).filter(fits));
            next = next.up(0, false);
        }
        None
    }

    /// Returns whether no number satisfies the conditions.
    ///
    /// # Errors
    /// The question is too hard to decide.
    pub fn is_empty(&self) -> Result<bool, String> {
        if let Some(value) = self.value() {
            let fits = |divisor: &Divisor| divisor.divides(value);
            return Ok(self.integer && !value.is_integer() || !self.divisors.iter().all(fits));
        }
        if let (Some(low), Some(high)) = (&self.low, &self.high)
            && low.value >= high.value
        {
            return Ok(true);
        }
        if self.divisors.is_empty() {
            return Ok(self.integer && !self.has_any(0));
        }
        self.has_no_multiple()
    }

    /// Returns the bounds as numbers of `places` digits after the decimal point. The returned numbers are themselves
    /// within the bounds.
    fn rounded(&self, places: usize) -> (Option<Decimal>, Option<Decimal>) {
        let low = self.low.as_ref().map(|low| low.value.up(places, low.or_equal));
        let high = self.high.as_ref().map(|high| high.value.down(places, high.or_equal));
        (low, high)
    }

    /// Returns whether a number of `places` digits after the decimal point satisfies the conditions.
    fn has_any(&self, places: usize) -> bool {
        match self.rounded(places) {
            (Some(low), Some(high)) => low <= high,
            _ => true,
        }
    }

    fn has_no_multiple(&self) -> Result<bool, String> {
        let hard = || "multipleOf: the bounds or divisors have too many digits".to_string();
        if self.divisors.len() > 1
            && self
                .divisors
                .iter()
                .map(Divisor::digits)
                .try_fold(1u64, u64::checked_mul)
                .is_none_or(|product| product > LARGEST)
        {
            return Err(format!(
                "multipleOf: several divisors are supported whose product is at most {LARGEST}"
            ));
        }
        let most = self.divisors.iter().map(Divisor::places).max().unwrap_or(0);
        let unit = 10i128.checked_pow(most as u32).ok_or_else(hard)?;
        let mut step = Divisor::common(&self.divisors, most).ok_or_else(hard)?;
        if self.integer {
            step = (step / greatest_common(step, unit)).checked_mul(unit).ok_or_else(hard)?;
        }
        // Converts the bounds to units of 10^-most.
        let in_units = |bound: Decimal| {
            let digits = bound.cut(most).parse::<i128>().ok().filter(|&digits| digits < i128::MAX / 4);
            digits.map(|digits| if bound.is_negative() { -digits } else { digits })
        };
        let (low, high) = self.rounded(self.places());
        let (Some(low), Some(high)) = (low, high) else { return Ok(false) };
        let below_zero = low.is_negative();
        let above_zero = !high.is_negative();
        match (in_units(low), in_units(high)) {
            _ if below_zero && above_zero => Ok(false),
            (Some(low), Some(high)) => {
                let up = low.div_euclid(step) + i128::from(low.rem_euclid(step) != 0);
                Ok(up * step > high)
            }
            _ => Err(hard()),
        }
    }

    /// Returns the texts of the numbers.
    pub fn texts(&self) -> RegexAst {
        if let Some(value) = self.value() {
            let written = self.written.clone().filter(|_| !self.integer);
            return RegexAst::Literal(written.unwrap_or_else(|| value.plain()));
        }
        let places = self.places();
        if self.low.is_none() && self.high.is_none() && self.divisors.is_empty() {
            let sign_and_whole = format!("-?(?:0|[1-9][0-9]{{0,{}}})", DIGITS - 1);
            return RegexAst::Regex(match self.integer {
                true => format!("0|-?[1-9][0-9]{{0,{}}}", DIGITS - 1),
                false => format!(r"{sign_and_whole}(?:\.[0-9]{{1,{DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"),
            });
        }
        let (low, high) = self.rounded(places);
        let mut signs = Vec::new();
        if high.as_ref().is_none_or(|high| !high.is_negative()) {
            let low = low.clone().filter(|low| !low.is_negative());
            signs.push(self.magnitudes(low, high.clone(), self.whole_numbers(places, false)));
        }
        if low.as_ref().is_none_or(Decimal::is_negative) {
            let low = low.map(|low| low.negated());
            let high = high.filter(Decimal::is_negative);
            let base = self.whole_numbers(places, true);
            let texts = self.magnitudes(high.map(|high| high.negated()), low, base);
            signs.push(RegexAst::Concat(vec![RegexAst::Literal("-".into()), texts]));
        }
        RegexAst::Or(signs)
    }

    /// Returns an expression for numbers without a sign that have at most `places` digits after the decimal point.
    fn whole_numbers(&self, places: usize, negative: bool) -> String {
        let most = self.digits() - 1;
        match (places, negative) {
            // Some readers do not accept minus zero as an integer.
            (0, true) => format!("[1-9][0-9]{{0,{most}}}"),
            (0, false) => format!("0|[1-9][0-9]{{0,{most}}}"),
            _ => format!(r"(?:0|[1-9][0-9]{{0,{most}}})(?:\.[0-9]{{1,{places}}})?"),
        }
    }

    /// Returns the numbers without a sign that are within bounds.
    fn magnitudes(&self, low: Option<Decimal>, high: Option<Decimal>, numbers: String) -> RegexAst {
        let mut all = vec![RegexAst::Regex(numbers)];
        all.extend(low.filter(|low| !low.is_zero()).map(|low| RegexAst::Regex(at_least(&low))));
        // If the upper bound has more digits than a number may have, it excludes nothing.
        let high = high.filter(|high| high.whole().len() <= self.digits());
        all.extend(high.map(|high| RegexAst::Regex(at_most(&high))));
        all.extend(self.divisors.iter().map(Divisor::texts));
        RegexAst::And(all)
    }

    /// Returns the largest number of digits before the decimal point.
    fn digits(&self) -> usize {
        let of = |bound: &Option<Bound>| bound.as_ref().map_or(0, |bound| bound.value.whole().len());
        let few = |digits: usize| if digits <= FEW_DIGITS { digits } else { 0 };
        let low = of(&self.low);
        let high = of(&self.high);
        // There must be enough digits for the bound that is nearer to zero, and for a multiple next to it.
        let positive = self.low.as_ref().is_some_and(|low| !low.value.is_negative());
        let negative = self.high.as_ref().is_some_and(|high| high.value.is_negative());
        let nearest = if positive {
            low
        } else if negative {
            high
        } else {
            0
        };
        let multiple: usize = self.divisors.iter().map(Divisor::length).sum();
        DIGITS.max(few(low)).max(few(high)).max(nearest.max(multiple) + 1)
    }

    /// Returns the largest number of digits after the decimal point.
    fn places(&self) -> usize {
        if self.integer {
            return 0;
        }
        if let Some(places) = self.divisors.iter().map(Divisor::places).min() {
            return places;
        }
        let of = |bound: &Option<Bound>| bound.as_ref().map_or(0, |bound| bound.value.fraction().len());
        let few = |digits: usize| if digits <= FEW_DIGITS { digits } else { 0 };
        let low = of(&self.low);
        let high = of(&self.high);
        let places = DIGITS.max(few(low)).max(few(high)) + 1;
        if self.has_any(places) { places } else { low.max(high) + 1 }
    }
}
