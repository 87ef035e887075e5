//! Answers in other forms: token ids instead of text, and messages with reasoning and tool calls.

use model_runtime::RoutedExperts;

use super::*;

/// A run without a tokenizer.
fn in_ids(body: Value) -> Result<Job, ApiError> {
    parse_with(Parser { tokenizer: None, ..parser() }, "/v1/completions", body)
}

fn choice(text: &str, finish: FinishReason) -> Choice {
    Choice {
        text: text.into(),
        num_tokens: 2,
        token_ids: vec![8, 9],
        finish: Some(finish),
        ..Choice::default()
    }
}

fn end() -> FinishReason {
    FinishReason::Stop(StopReason::EndOfSequence)
}

#[test]
fn without_a_tokenizer_ids_go_in_and_out() {
    let job = in_ids(json!({"prompt": [[1, 2, 3], [4]], "logprobs": 0, "prompt_logprobs": 0})).unwrap();
    let prompts: Vec<_> = job.requests.iter().map(|request| request.prompt.clone()).collect();
    assert_eq!(prompts, [vec![1, 2, 3], vec![4]]);
    let mut first = choice("", FinishReason::Length);
    let one = TokenLogprob { token_id: 8, logprob: -0.5, rank: 1 };
    first.logprobs.push(&TokenLogprobs { chosen: one, top: vec![] });
    first.prompt_logprobs = Some(first.logprobs.clone());
    let got = body_of("r", &job.form, &[first, choice("", end())], None).unwrap();
    let choice = &got["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!(""), &json!([8, 9])));
    assert_eq!(choice["prompt_token_ids"], json!([1, 2, 3]));
    assert_eq!(choice["logprobs"]["tokens"], json!(["token_id:8"]), "vLLM's name for a token without a text");
    assert_eq!(choice["prompt_logprobs"][1]["8"]["decoded_token"], Value::Null);
}

#[test]
fn what_needs_a_tokenizer_is_refused_without_one() {
    for (body, param) in [
        (json!({"prompt": "text"}), "prompt"),
        (json!({"prompt": [[1], "text"]}), "prompt"),
        (json!({"prompt": [1], "stop": "x"}), "stop"),
        (json!({"prompt": [1], "bad_words": ["x"]}), "bad_words"),
    ] {
        let error = in_ids(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{}", error.message);
        assert!(error.message.contains("--skip-tokenizer-init"), "{}", error.message);
    }
    assert!(in_ids(json!({"prompt": [1], "stop": []})).is_ok());
    let parser = Parser { tokenizer: None, ..parser() };
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let error = parse_with(parser, "/v1/chat/completions", body).err().unwrap();
    assert!(error.status == 400 && error.message.contains("needs a tokenizer"), "{}", error.message);
}

#[test]
fn experts_are_returned_on_request() {
    let routed = RoutedExperts::from_ids(2, 1, 2, vec![1, 2, 3, 0]).unwrap();
    let answer = |job: &Job| {
        let choice = Choice { routed_experts: Some(routed.clone()), ..choice("c", end()) };
        body_of("r", &job.form, &[choice], Some(&bytes())).unwrap()["choices"][0].clone()
    };
    let asked = completions(json!({"prompt": "ab", "return_routed_experts": true})).unwrap();
    assert!(asked.requests[0].capture_routing);
    assert_eq!(answer(&asked)["routed_experts"], json!(crate::routing::base64_npy(&routed)));
    let plain = completions(json!({"prompt": "ab"})).unwrap();
    assert!(!plain.requests[0].capture_routing && answer(&plain).get("routed_experts").is_none());
    let defaults = Request { capture_routing: true, ..parser().defaults };
    let body = json!({"messages": [{"role": "user", "content": "x"}], "return_routed_experts": false});
    let job = parse_with(Parser { defaults, ..parser() }, "/v1/chat/completions", body).unwrap();
    assert!(!job.requests[0].capture_routing, "the body wins over the flag");
    let wrong = completions(json!({"prompt": "ab", "return_routed_experts": 1})).err().unwrap();
    assert_eq!((wrong.status, wrong.param.as_deref()), (400, Some("return_routed_experts")));
}

#[test]
fn token_ids_are_returned_on_request() {
    let job = completions(json!({"prompt": "ab", "return_token_ids": true})).unwrap();
    let got = body_of("r", &job.form, &[choice("c", end())], Some(&bytes())).unwrap();
    let ids = bytes().encode("ab").unwrap();
    assert_eq!(
        (&got["choices"][0]["text"], &got["choices"][0]["prompt_token_ids"]),
        (&json!("c"), &json!(ids))
    );
    let body = json!({"messages": [{"role": "user", "content": "x"}], "return_token_ids": true});
    let job = chat(body).unwrap();
    let got = body_of("r", &job.form, &[choice("c", end())], Some(&bytes())).unwrap();
    assert_eq!((&got["choices"][0]["token_ids"], got["prompt_token_ids"].is_array()), (&json!([8, 9]), true));
}

#[test]
fn megabytes_are_refused_before_they_are_tokenized() {
    let start = std::time::Instant::now();
    let text = "word ".repeat(4 << 18);
    let error = completions(json!({ "prompt": text })).err().unwrap();
    let chat = chat(json!({"messages": [{"role": "user", "content": text}]})).err().unwrap();
    for (error, name) in [(error, "prompt"), (chat, "messages")] {
        assert_eq!((error.status, error.param.as_deref()), (400, Some(name)));
        // A count of bytes needs no tokens.
        assert!(
            error.message.contains(" bytes") && error.message.contains("100 tokens"),
            "{}",
            error.message
        );
    }
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

const SAID: &str =
    "<think>\nHm.\n</think>\n\nSure.\n<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";

/// The choice that a run with both parsers makes of a text.
fn answer(more: Value, said: &str, finish: FinishReason) -> Value {
    let parser = Parser { answer: both(), ..parser() };
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let job = parse_with(parser, "/v1/chat/completions", body).unwrap();
    let got = body_of("r", &job.form, &[choice(said, finish)], Some(&bytes())).unwrap();
    got["choices"][0].clone()
}

#[test]
fn reasoning_and_calls_have_fields_of_their_own() {
    let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
    let got = answer(tools.clone(), SAID, end());
    let message = &got["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("Hm."), &json!("Sure.")));
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "f", "arguments": "{\"x\":1}"}));
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_") && id.ends_with("_0_0")), "{call}");
    assert_eq!((&call["type"], &got["finish_reason"]), (&json!("function"), &json!("tool_calls")));
    assert_eq!(answer(tools.clone(), SAID, end()), got, "the same each time");
    assert_eq!(answer(tools.clone(), SAID, FinishReason::Length)["finish_reason"], "length");
    let broken = SAID.replace("}}", "}");
    let got = answer(tools, &broken, end());
    assert_eq!((&got["message"]["tool_calls"], &got["finish_reason"]), (&json!([]), &json!("stop")));
    assert!(got["message"]["content"].as_str().unwrap().contains("<tool_call>{"), "it stays text");
}

#[test]
fn nothing_is_looked_for_where_nobody_asks() {
    let message = |more: Value| answer(more, SAID, end())["message"].clone();
    let without_tools = message(json!({}));
    assert!(without_tools["content"].as_str().unwrap().starts_with("Sure.\n<tool_call>"));
    assert!(without_tools.get("tool_calls").is_none() && without_tools["reasoning"] == "Hm.");
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert!(message(json!({"tools": tools, "tool_choice": "none"})).get("tool_calls").is_none());
    let job = chat(json!({"messages": [{"role": "user", "content": "x"}], "tools": tools})).unwrap();
    let got = body_of("r", &job.form, &[choice(SAID, end())], Some(&bytes())).unwrap();
    assert_eq!(got["choices"][0]["message"], json!({"role": "assistant", "content": SAID}));
}

#[test]
fn a_prompt_may_begin_the_reasoning() {
    let config = json!({"chat_template": "{{ messages[0].content }}<think>\n"}).to_string();
    let parser = Parser {
        template: ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap(),
        answer: AnswerForm { calls: None, ..both() },
        ..parser()
    };
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let job = parse_with(parser, "/v1/chat/completions", body).unwrap();
    let got = body_of("r", &job.form, &[choice("Hm.\n</think>\n\nSure.", end())], Some(&bytes()));
    let message = json!({"role": "assistant", "content": "Sure.", "reasoning": "Hm."});
    assert_eq!(got.unwrap()["choices"][0]["message"], message);
}
