//! Edits of single logits as a list that does not change while a sequence runs. With it a device can make the edits
//! without the host.

use super::SamplingParams;

/// The exclusions and biases of a request: pairs of an id and a bias, -inf to exclude.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitEdits {
    /// First the exclusions that end at some output position, then all that stay; each part in the order of ids, and
    /// the edits of one id in the order in which they are made.
    pub list: Vec<(u32, f32)>,
    /// Entries of the first part.
    pub bans: usize,
}

impl LogitEdits {
    /// The edits of a request, with `banned` ids that are excluded at first. `None` if a list is not enough: for a
    /// request that allows only some tokens.
    pub fn new(params: &SamplingParams, banned: impl IntoIterator<Item = u32>) -> Option<Self> {
        if params.allowed_token_ids.is_some() {
            return None;
        }
        let excluded = |id| (id, f32::NEG_INFINITY);
        let mut list: Vec<(u32, f32)> = banned.into_iter().map(excluded).collect();
        list.sort_by_key(|(id, _)| *id);
        let bans = list.len();
        list.extend(&params.logit_bias);
        // The sort is stable: exclusions stay before biases, and biases stay in their order.
        list[bans..].sort_by_key(|(id, _)| *id);
        Some(Self { list, bans })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SampleRow, processors};
    use super::*;

    /// What the list does to logits, as its documentation says.
    fn apply(logits: &mut [f32], edits: &LogitEdits, early: bool) {
        for &(id, bias) in &edits.list[if early { 0 } else { edits.bans }..] {
            let x = &mut logits[id as usize];
            *x = match *x {
                _ if bias == f32::NEG_INFINITY => bias,
                x if x.is_finite() => (x + bias).clamp(f32::MIN, f32::MAX),
                x => x,
            };
        }
    }

    #[test]
    fn the_list_does_what_the_processors_do() {
        let params = SamplingParams {
            logit_bias: vec![(5, 1e-8), (2, 3.0), (5, -1.0), (4, f32::MAX), (4, f32::MAX), (1, 2.0)],
            ..SamplingParams::default()
        };
        let banned = [6, 1, 1];
        let edits = LogitEdits::new(&params, banned).unwrap();
        assert_eq!((edits.list.len(), edits.bans), (9, 3));
        let logits = [0.5, f32::NEG_INFINITY, 1.0, f32::NAN, 4.0, 1.0, -2.0];
        for early in [false, true] {
            let mut want = logits;
            let mut got = logits;
            let banned = if early { &banned[..] } else { &[] };
            processors::apply(
                &mut want,
                &SampleRow { params: &params, prompt: &[0], output: &[], banned, mask: None },
            );
            apply(&mut got, &edits, early);
            assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits), "early: {early}");
        }
    }

    #[test]
    fn what_no_list_can_do_has_none() {
        let allowed = SamplingParams { allowed_token_ids: Some(vec![1]), ..SamplingParams::default() };
        assert_eq!(LogitEdits::new(&allowed, []), None);
        assert_eq!(LogitEdits::new(&SamplingParams::default(), []), Some(LogitEdits::default()));
    }
}
