//! The log-probabilities of a choice until its line is complete: 8 bytes for each listed token.

use model_runtime::sampling::{TokenLogprob, TokenLogprobs};

/// Log-probabilities, token by token.
#[derive(Clone, Debug, Default)]
pub struct LogprobList {
    chosen: Vec<TokenLogprob>,
    /// Number of tokens listed at each position. A vocabulary may have fewer than were requested.
    listed: usize,
    /// The top tokens of all positions, most likely first: their ranks are 1, 2, ..
    top: Vec<(u32, f32)>,
}

impl LogprobList {
    /// Bytes of one position with `listed` listed tokens.
    pub const fn bytes_per_token(listed: usize) -> usize {
        size_of::<TokenLogprob>() + listed * size_of::<(u32, f32)>()
    }

    /// Adds a position.
    pub fn push(&mut self, logprobs: &TokenLogprobs) {
        // All positions of a choice list the same number.
        self.listed = logprobs.top.len();
        self.chosen.push(logprobs.chosen);
        self.top.extend(logprobs.top.iter().map(|token| (token.token_id, token.logprob)));
    }

    /// The positions in order.
    pub fn iter(&self) -> impl Iterator<Item = TokenLogprobs> {
        self.chosen.iter().enumerate().map(|(i, &chosen)| {
            let top = self.top.get(i * self.listed..(i + 1) * self.listed).unwrap_or_default();
            let entry = |(&(token_id, logprob), rank)| TokenLogprob { token_id, logprob, rank };
            TokenLogprobs { chosen, top: top.iter().zip(1..).map(entry).collect() }
        })
    }
}

impl FromIterator<TokenLogprobs> for LogprobList {
    fn from_iter<I: IntoIterator<Item = TokenLogprobs>>(all: I) -> Self {
        let mut list = Self::default();
        all.into_iter().for_each(|logprobs| list.push(&logprobs));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_of_a_few_bytes() {
        let entry = |token_id, rank| TokenLogprob { token_id, logprob: -(token_id as f32), rank };
        let at = |id| TokenLogprobs { chosen: entry(id, 9), top: vec![entry(3, 1), entry(id + 1, 2)] };
        let list: LogprobList = [at(4), at(7)].into_iter().collect();
        assert_eq!(list.iter().collect::<Vec<_>>(), [at(4), at(7)]);
        let bare = TokenLogprobs { chosen: entry(1, 1), top: Vec::new() };
        assert_eq!([bare.clone(), bare.clone()].into_iter().collect::<LogprobList>().iter().count(), 2);
        assert_eq!(LogprobList::bytes_per_token(20), 172);
    }
}
