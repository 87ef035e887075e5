//! Bodies to requests and back, without a model: every byte is a token of the tokenizer here.

mod calls;
mod forms;

use model_runtime::sampling::{TokenLogprob, TokenLogprobs, request_seed};
use moe_engine::chat::{AnswerForm, CallParser, ChatTemplate, ReasoningParser};
use moe_engine::engine::{FinishReason, Request, StopReason};
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::answer::Choice;
use super::completion;
use super::fields::ApiError;
use super::job::{Form, Job};
use super::parser::Parser;
use super::served::Served;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
    [{{ c.function.arguments.x }}]{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}";

fn bytes() -> Tokenizer {
    Tokenizer::bytes().unwrap()
}

/// Qwen3's forms.
fn both() -> AnswerForm {
    AnswerForm { reasoning: ReasoningParser::named("qwen3"), calls: CallParser::named("hermes") }
}

pub fn parser() -> Parser {
    let config = json!({ "chat_template": TEMPLATE }).to_string();
    let mut defaults = Request::new(Vec::new());
    defaults.sampling.temperature = 0.7;
    defaults.eos_token_ids = vec![7];
    Parser {
        tokenizer: Some(bytes()),
        answer: AnswerForm::default(),
        template: ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap(),
        template_kwargs: json!({"mood": "!"}).as_object().unwrap().clone(),
        defaults,
        seed: 3,
        max_model_len: 100,
        routing_bytes: 0,
        served: Served::new(Some("tiny"), true),
    }
}

fn parse_with(parser: Parser, url: &str, body: Value) -> Result<Job, ApiError> {
    let line = json!({"custom_id": "a", "url": url, "body": body});
    parser.parse(line.as_object().unwrap(), "a")
}

fn parse(url: &str, body: Value) -> Result<Job, ApiError> {
    let line = json!({"custom_id": "a", "method": "POST", "url": url, "body": body});
    parser().parse(line.as_object().unwrap(), "a")
}

fn completions(body: Value) -> Result<Job, ApiError> {
    parse("/v1/completions", body)
}

fn chat(body: Value) -> Result<Job, ApiError> {
    parse("/v1/chat/completions", body)
}

fn text(ids: &[u32]) -> String {
    bytes().decode(ids).unwrap()
}

#[test]
fn parameters_come_from_the_body_over_the_defaults() {
    let job = completions(json!({"prompt": "ab", "unknown": {"x": 1}, "top_p": null})).unwrap();
    let request = &job.requests[0];
    assert_eq!((text(&request.prompt).as_str(), request.max_tokens, request.n), ("ab", Some(16), 1));
    assert_eq!((request.sampling.temperature, request.sampling.top_p), (0.7, 1.0));
    assert_eq!((request.sampling.seed, &request.eos_token_ids[..]), (request_seed(3, "a"), &[7][..]));
    assert_eq!((job.form.model.as_str(), job.form.logprobs), ("tiny", None));

    let body = json!({
        "prompt": "ab", "model": "m", "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 200, "6": -1}, "seed": -1, "n": 3,
        "stop": "x", "stop_token_ids": [1, 2], "ignore_eos": true, "include_stop_str_in_output": true,
        "skip_special_tokens": false, "min_tokens": 2, "max_tokens": 9, "logprobs": 2, "prompt_logprobs": 1,
        "allowed_token_ids": [9], "bad_words": ["z"],
    });
    let job = completions(body).unwrap();
    let r = &job.requests[0];
    let s = &r.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty), (0.0, 0.5, 0, 0.1, 1.5));
    assert_eq!((s.presence_penalty, s.frequency_penalty, s.seed, s.logprobs), (0.5, -0.5, u64::MAX, Some(2)));
    assert_eq!(s.logit_bias, [(5, 100.0), (6, -1.0)], "vLLM's bounds");
    assert_eq!((s.allowed_token_ids.as_deref(), &r.bad_words[..]), (Some(&[9][..]), &["z".to_string()][..]));
    assert_eq!((r.n, r.min_tokens, r.max_tokens, r.prompt_logprobs), (3, 2, Some(9), Some(1)));
    assert_eq!((&r.stop[..], &r.stop_token_ids[..]), (&["x".to_string()][..], &[1, 2][..]));
    assert!(r.ignore_eos && r.include_stop_str_in_output && !r.skip_special_tokens);
    assert_eq!((job.form.model.as_str(), job.form.n), ("m", 3));
}

#[test]
fn a_default_limit_is_cut_and_a_limit_of_the_body_must_fit() {
    let limit = |body: Value| completions(body).map(|job| job.requests[0].max_tokens).map_err(|e| e.message);
    let long = "x".repeat(90);
    assert_eq!(limit(json!({"prompt": "x".repeat(80)})), Ok(Some(16)), "the API's default");
    assert_eq!(limit(json!({"prompt": long})), Ok(Some(10)), "what the context leaves of it");
    assert_eq!(limit(json!({"prompt": long, "max_tokens": 10})), Ok(Some(10)));
    let error = limit(json!({"prompt": long, "max_tokens": 11})).unwrap_err();
    assert_eq!(error, "max_tokens: 11 is too large: the context is 100 tokens, the prompt has 90");
    let chat = chat(json!({"messages": [{"role": "user", "content": "Hi"}]})).unwrap();
    assert_eq!(chat.requests[0].max_tokens, None, "the rest of the context");
}

#[test]
fn prompts_have_four_forms() {
    let prompts = |prompt: Value| -> Vec<String> {
        let job = completions(json!({"prompt": prompt, "n": 2})).unwrap();
        assert_eq!(job.form.prompts.len(), job.requests.len());
        job.requests.iter().map(|request| text(&request.prompt)).collect()
    };
    let ids = |text: &str| bytes().encode(text).unwrap();
    assert_eq!(prompts(json!("one")), ["one"]);
    assert_eq!(prompts(json!(["one", "two"])), ["one", "two"]);
    assert_eq!(prompts(json!(ids("one"))), ["one"]);
    assert_eq!(prompts(json!([ids("one"), ids("two")])), ["one", "two"]);
    let job = completions(json!({"prompt": ["same", "same"], "n": 2})).unwrap();
    let seeds: Vec<u64> = job.requests.iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds[1], seeds[0].wrapping_add(2), "four choices, four seeds");
    let job = completions(json!({"prompt": ["same", "same"], "seed": 5})).unwrap();
    assert!(job.requests.iter().all(|request| request.sampling.seed == 5), "as if each were alone");
}

#[test]
fn what_is_wrong_is_named() {
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [1, "x"]}), "prompt"),
        (json!({"prompt": [[1], [-1]]}), "prompt"),
        (json!({"prompt": "x", "temperature": "hot"}), "temperature"),
        (json!({"prompt": "x", "top_k": -2}), "top_k"),
        (json!({"prompt": "x", "n": 1.5}), "n"),
        (json!({"prompt": vec!["x"; 100], "n": 100}), "n"),
        (json!({"prompt": "x", "max_tokens": -1}), "max_tokens"),
        (json!({"prompt": "x", "max_tokens": 100}), "max_tokens"),
        (json!({"prompt": "x", "max_completion_tokens": 100}), "max_completion_tokens"),
        (json!({"prompt": "x", "max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "x", "temperature": 1e300}), "temperature"),
        (json!({"prompt": "x", "bad_words": ["a", " "]}), "bad_words"),
        (json!({"prompt": "x", "logit_bias": {"a": 1}}), "logit_bias"),
        (json!({"prompt": "x", "logit_bias": {"1": "a"}}), "logit_bias"),
        (json!({"prompt": "x", "stop": [1]}), "stop"),
        (json!({"prompt": "x", "logprobs": true}), "logprobs"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "x", "prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"prompt": "x", "stream": true}), "stream"),
        (json!({"prompt": "x", "use_beam_search": true}), "use_beam_search"),
        (json!({"prompt": "x", "response_format": {"type": "xml"}}), "response_format"),
        (json!({"prompt": "x", "guided_json": {}, "guided_regex": "a"}), "guided_regex"),
    ] {
        let error = completions(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {}", error.message);
    }
    for body in
        [json!({"stream": false}), json!({"best_of": 1}), json!({"response_format": {"type": "text"}})]
    {
        let mut body = body;
        body["prompt"] = "x".into();
        assert!(completions(body.clone()).is_ok(), "{body}");
    }
    let line = |line: Value| parser().parse(line.as_object().unwrap(), "a").err().unwrap().param;
    assert_eq!(
        line(json!({"method": "GET", "url": "/v1/completions", "body": {}})).as_deref(),
        Some("method")
    );
    assert_eq!(line(json!({"url": "/v1/embeddings", "body": {}})).as_deref(), Some("url"));
    assert_eq!(line(json!({"url": "/v1/completions"})).as_deref(), Some("body"));
}

#[test]
fn conversations_are_rendered() {
    let prompt = |body: Value| text(&chat(body).unwrap().requests[0].prompt);
    assert_eq!(prompt(json!({"messages": [{"role": "user", "content": "hi"}]})), "<user>hi<assistant>!");
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"x\": 5}"}});
    let messages = json!([
        {"role": "user", "content": parts},
        {"role": "assistant", "content": null, "tool_calls": [call]},
    ]);
    let body =
        json!({"messages": messages, "add_generation_prompt": false, "chat_template_kwargs": {"mood": "?"}});
    assert_eq!(prompt(body), "<user>a\nb<assistant>[5]?");
    let job = chat(json!({
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}],
        "continue_final_message": true, "echo": true,
    }));
    let job = job.unwrap();
    assert_eq!(text(&job.requests[0].prompt), "<user>q<assistant>so");
    assert_eq!((job.form.role.as_str(), job.form.prompts[0].echo.as_deref()), ("assistant", Some("so")));
    assert_eq!(job.requests[0].max_tokens, None, "until the context ends");
    for (body, word) in [
        (json!({}), "messages"),
        (json!({"messages": "hi"}), "list of objects"),
        (json!({"messages": []}), "at least one message"),
        (json!({"messages": [{"content": "x"}]}), "role"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "content"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "text only"),
        (json!({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}), "logprobs"),
        (json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}), "tool_choice"),
    ] {
        let error = chat(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert!(error.status == 400 && error.message.contains(word), "{body}: {}", error.message);
    }
    let user = json!([{"role": "user", "content": "x"}]);
    for (body, param) in [
        (json!({"messages": user, "chat_template_kwargs": {"tools": 1}}), "chat_template_kwargs"),
        (json!({"messages": user, "logprobs": true, "top_logprobs": 1000}), "top_logprobs"),
        (json!({"messages": user, "max_completion_tokens": 0}), "max_completion_tokens"),
    ] {
        let error = chat(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert_eq!(error.param.as_deref(), Some(param), "{body}: {}", error.message);
    }
    let parser = Parser { template: None, ..parser() };
    let line =
        json!({"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}});
    let error = parser.parse(line.as_object().unwrap(), "a").err().unwrap();
    assert!(error.message.contains("no chat template") && error.message.contains("--chat-template"));
}

/// The body of an answer as a value.
fn body_of(
    id: &str,
    form: &Form,
    choices: &[Choice],
    tokenizer: Option<&Tokenizer>,
) -> Result<Value, ApiError> {
    completion::body(id, form, choices, tokenizer).map(|body| serde_json::to_value(body).unwrap())
}

fn logprobs(token: &str, logprob: f32, top: &[(&str, f32)]) -> TokenLogprobs {
    let one = |(token, logprob): (&str, f32)| {
        let token_id = bytes().encode(token).unwrap()[0];
        TokenLogprob { token_id, logprob, rank: 1 }
    };
    TokenLogprobs { chosen: one((token, logprob)), top: top.iter().copied().map(one).collect() }
}

#[test]
fn bodies_have_the_objects_of_the_apis() {
    let body = json!({"prompt": "ab", "echo": true, "logprobs": 1, "prompt_logprobs": 1, "n": 2});
    let job = completions(body).unwrap();
    let choice = |text: &str, finish: FinishReason, prompt: Option<Vec<TokenLogprobs>>| Choice {
        text: text.into(),
        num_tokens: 1,
        token_ids: vec![5],
        logprobs: [logprobs("c", -0.5, &[("c", -0.5)])].into_iter().collect(),
        prompt_logprobs: prompt.map(|prompt| prompt.into_iter().collect()),
        routed_experts: None,
        finish: Some(finish),
    };
    let prompt = vec![logprobs("b", f32::NEG_INFINITY, &[("x", -0.25)])];
    let stop = FinishReason::Stop(StopReason::Text("!".into()));
    let choices = [choice("c", FinishReason::Length, Some(prompt)), choice("c", stop, None)];
    let got = body_of("r", &job.form, &choices, Some(&bytes())).unwrap();
    assert_eq!(
        (&got["object"], &got["id"], &got["model"]),
        (&json!("text_completion"), &json!("cmpl-r"), &json!("tiny"))
    );
    assert_eq!(got["usage"], json!({"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}));
    let second = &got["choices"][1];
    assert_eq!((&second["index"], &second["text"]), (&json!(1), &json!("abc")));
    assert_eq!((&second["finish_reason"], &second["stop_reason"]), (&json!("stop"), &json!("!")));
    let want = json!({
        "text_offset": [0, 1, 2], "token_logprobs": [null, -9999.0, -0.5], "tokens": ["a", "b", "c"],
        "top_logprobs": [null, {"x": -0.25, "b": -9999.0}, {"c": -0.5}],
    });
    assert_eq!(second["logprobs"], want, "the prompt's are the same for both");
    let [b, x] = ["b", "x"].map(|t| bytes().encode(t).unwrap()[0].to_string());
    let want = json!([null, {
        &b: {"logprob": -9999.0, "rank": 1, "decoded_token": "b"},
        &x: {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
    }]);
    assert_eq!(second["prompt_logprobs"], want);

    let job =
        chat(json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 1}))
            .unwrap();
    let choices = [choice("c", FinishReason::Stop(StopReason::EndOfSequence), None)];
    let got = body_of("r", &job.form, &choices, Some(&bytes())).unwrap();
    assert_eq!((&got["object"], &got["prompt_logprobs"]), (&json!("chat.completion"), &Value::Null));
    let top = json!([{"token": "c", "logprob": -0.5, "bytes": [99]}]);
    let content = json!([{"token": "c", "logprob": -0.5, "bytes": [99], "top_logprobs": top}]);
    let want = json!({
        "index": 0, "message": {"role": "assistant", "content": "c"}, "logprobs": {"content": content},
        "finish_reason": "stop", "stop_reason": null,
    });
    assert_eq!(got["choices"][0], want);
}

#[test]
fn a_prompt_alone_can_be_scored() {
    let job = completions(json!({"prompt": "ab", "echo": true, "logprobs": 0, "max_tokens": 0})).unwrap();
    assert_eq!((job.requests[0].max_tokens, job.requests[0].prompt_logprobs), (Some(0), Some(0)));
    let choice = Choice {
        text: "c".into(),
        num_tokens: 1,
        token_ids: vec![5],
        logprobs: [logprobs("c", -1.0, &[])].into_iter().collect(),
        prompt_logprobs: Some([logprobs("b", -2.0, &[])].into_iter().collect()),
        routed_experts: None,
        finish: Some(FinishReason::Length),
    };
    let got = body_of("r", &job.form, &[choice], Some(&bytes())).unwrap();
    assert_eq!((&got["choices"][0]["text"], &got["usage"]["completion_tokens"]), (&json!("ab"), &json!(0)));
    assert_eq!(got["choices"][0]["logprobs"]["token_logprobs"], json!([null, -2.0]));
}

#[test]
fn a_choice_that_failed_is_an_internal_error() {
    let job = completions(json!({"prompt": "ab"})).unwrap();
    let choice = Choice { finish: Some(FinishReason::Failed("NaN".into())), ..Choice::default() };
    let error = completion::body("r", &job.form, &[choice], Some(&bytes())).err().unwrap();
    assert_eq!((error.status, error.message.as_str()), (500, "NaN"));
}

#[test]
fn a_line_that_may_hold_too_much_is_refused() {
    let parser = Parser { max_model_len: 32768, ..parser() };
    let line = json!({"custom_id": "a", "url": "/v1/completions",
        "body": {"prompt": "x", "n": 4096, "logprobs": 20, "max_tokens": 900}});
    let error = parser.parse(line.as_object().unwrap(), "a").err().unwrap();
    assert_eq!((error.status, error.param.as_deref()), (400, Some("n")));
    assert!(error.message.contains("a line may hold 512 MiB"), "{}", error.message);
}

#[test]
fn a_line_is_checked_without_a_model() {
    let check = |line: &str| super::check_line(line.as_bytes(), &bytes(), None, 100);
    let body = r#"{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}"#;
    assert_eq!(check(body), Ok(2));
    assert!(check("{").unwrap_err().contains("it is not JSON"));
    assert!(check(&body.replace("\"x\"", "true")).unwrap_err().contains("prompt"));
}
