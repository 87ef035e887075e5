//! The prices of tokens.

/// Prices of a million tokens, in any currency.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prices {
    /// Of prompts.
    pub input: Option<f64>,
    /// Of answers.
    pub output: Option<f64>,
}

impl Prices {
    /// The price of these numbers of tokens; `None` if there is neither price.
    pub fn cost(&self, input: u64, output: u64) -> Option<f64> {
        let of = |tokens: u64, price: Option<f64>| tokens as f64 * price.unwrap_or(0.0) / 1e6;
        self.input.or(self.output).map(|_| of(input, self.input) + of(output, self.output))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_price_is_enough() {
        let cost = |input, output| Prices { input, output }.cost(2_000_000, 1000);
        assert_eq!(cost(None, None), None);
        assert_eq!([cost(Some(0.25), None), cost(None, Some(3.0))], [Some(0.5), Some(0.003)]);
        assert_eq!(cost(Some(0.0), None), Some(0.0), "a price of nothing is a price");
    }
}
