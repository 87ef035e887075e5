//! Limits the memory of a line. Its choices are in memory until all of them have ended, and a line of a few bytes may
//! request thousands of them.

use moe_engine::engine::Request;

use super::fields::ApiError;
use super::logprobs::LogprobList;

/// The largest number of bytes that the answers of a line may need.
const MAX_HELD: usize = 512 << 20;
/// Bytes of a token: its id here and in the engine, its text, and room for both to grow.
const TOKEN: usize = 24;

/// Refuses a line whose answers may not fit. `context` is the largest number of tokens in a sequence, `routing` the
/// number of bytes for the experts of a token.
pub fn check(requests: &[Request], context: usize, routing: usize) -> Result<(), ApiError> {
    let bytes =
        requests.iter().map(|request| bytes_of(request, context, routing)).fold(0, usize::saturating_add);
    if bytes <= MAX_HELD {
        return Ok(());
    }
    let choices: usize = requests.iter().map(|request| request.n).sum();
    let new = requests.iter().map(|request| new_tokens(request, context)).max().unwrap_or(0);
    let listed = requests.iter().find_map(|request| request.sampling.logprobs);
    let with = listed.map(|n| format!(" with {n} log-probabilities each")).unwrap_or_default();
    Err(ApiError::field(
        "n",
        format!(
            "{choices} choices of up to {new} tokens{with} can come to {} MiB, and a line may hold {} MiB: lower n, \
             max_tokens or the number of log-probabilities, or ask in several lines",
            bytes >> 20,
            MAX_HELD >> 20
        ),
    ))
}

fn new_tokens(request: &Request, context: usize) -> usize {
    let room = context.saturating_sub(request.prompt.len());
    request.max_tokens.map_or(room, |max| max.min(room))
}

/// The largest number of bytes that the choices of a prompt may need.
fn bytes_of(request: &Request, context: usize, routing: usize) -> usize {
    let prompt = request.prompt.len();
    let new = new_tokens(request, context);
    let routing = if request.capture_routing { routing } else { 0 };
    let listed = |n: Option<usize>| n.map_or(0, LogprobList::bytes_per_token);
    let token = TOKEN + routing + listed(request.sampling.logprobs);
    let choice = new.saturating_mul(token).saturating_add(prompt.saturating_mul(size_of::<u32>() + routing));
    // The engine also keeps the log-probabilities of the prompt until they are complete.
    let scored = prompt.saturating_mul(2 * listed(request.prompt_logprobs));
    choice.saturating_mul(request.n).saturating_add(scored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_line_may_ask_for_too_much() {
        let mut request = Request { n: 4096, max_tokens: Some(150), ..Request::new(vec![1; 10]) };
        request.sampling.logprobs = Some(20);
        assert_eq!(check(&[request.clone()], 32768, 0), Ok(()));
        request.max_tokens = None;
        let error = check(&[request.clone()], 32768, 0).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        for word in
            ["4096 choices", "32758 tokens", "20 log-probabilities", "a line may hold 512 MiB", "lower n"]
        {
            assert!(error.message.contains(word), "{}", error.message);
        }
        request = Request { n: 100, capture_routing: true, ..request };
        request.sampling.logprobs = None;
        assert!(check(&[request.clone()], 32768, 48 * 8 * 4).is_err(), "the experts of its tokens");
        assert!(check(&[Request { capture_routing: false, ..request }], 32768, 48 * 8 * 4).is_ok());
        // A prompt of most of the context, for each choice.
        let long = Request { n: 4096, max_tokens: Some(1), ..Request::new(vec![1; 100_000]) };
        assert!(check(&[long], 131_072, 0).is_err());
    }
}
