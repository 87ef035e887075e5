//! The context in which a token is sampled.

use super::params::SamplingParams;

/// A request at the position whose token is sampled.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Token ids of the prompt.
    pub prompt: &'a [u32],
    /// Token ids generated so far; their number is the output position.
    pub output: &'a [u32],
    /// Token ids that are excluded here: the stop ids, as long as the output is shorter than the
    /// request's minimum of tokens.
    pub banned: &'a [u32],
    /// Bits of the tokens that a grammar and bad words allow: token i is bit i % 32 of word i / 32, and tokens after
    /// the last word are excluded. `None` allows all.
    pub mask: Option<&'a [u32]>,
}
