//! Tests of reasoning and tool calls: the fields of a body about them, and the answer to such a body.

use moe_engine::structured::{Reasoning, StructuredOutput};

use super::*;

const THINKS: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}\
    <assistant>{{ opens }}{{ reasoning_effort }}{% endif %}";
const TWO_CALLS: &str = "<think>Hm.</think>\n\n<tool_call>{\"name\": \"f\", \"arguments\": \"\"}</tool_call>\
    <tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 18446744073709551616}}</tool_call>";

/// The reasoning before structured output.
fn reasoning(open: bool) -> Option<Reasoning> {
    Some(Reasoning { parser: both().reasoning.unwrap(), open })
}

fn asked(body: Value) -> Result<Job, ApiError> {
    let config = json!({ "chat_template": THINKS }).to_string();
    let parser = Parser {
        answer: both(),
        template: ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap(),
        template_kwargs: serde_json::Map::new(),
        ..parser()
    };
    let mut all = json!({"messages": [{"role": "user", "content": "q"}]});
    all.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let line = json!({"custom_id": "a", "url": "/v1/chat/completions", "body": all});
    parser.parse(line.as_object().unwrap(), "a")
}

fn tools() -> Value {
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    json!([function("f"), function("g")])
}

/// The choice of an answer with this text that ended by itself.
fn answer(job: &Job, text: &str) -> Value {
    let finish = Some(FinishReason::Stop(StopReason::EndOfSequence));
    let choice = Choice { text: text.into(), finish, ..Choice::default() };
    body_of("r", &job.form, &[choice], Some(&bytes())).unwrap()["choices"][0].clone()
}

#[test]
fn structured_output_comes_after_the_reasoning() {
    let before = |more: Value| {
        let mut body = json!({"guided_regex": "a+"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked(body).unwrap().requests[0].reasoning
    };
    assert_eq!(before(json!({})), reasoning(false));
    let opens = |text: &str| json!({"chat_template_kwargs": {"opens": text}});
    assert_eq!(before(opens("<think>\n")), reasoning(true));
    assert_eq!(before(opens("<think>\n\n</think>\n\n")), None, "it is over");
    let continued = |content: &str| {
        let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]);
        json!({"messages": messages, "continue_final_message": true})
    };
    assert_eq!(before(continued("<think>\nHm, let")), reasoning(true));
    assert_eq!(before(continued("The answer")), None);
    let job = asked(continued("<think>\nHm, let")).unwrap();
    let message = &answer(&job, " me see.</think>\n\nYes.")["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!(" me see."), &json!("Yes.")));
    assert_eq!(
        chat(json!({"messages": [{"role": "user", "content": "q"}]})).unwrap().requests[0].reasoning,
        None
    );
}

/// The tags of channels are special tokens, which are left out of a text by default.
#[test]
fn tags_that_are_special_tokens_are_shown_to_the_parser() {
    let token = json!({"id": 0, "content": "<|channel|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let json = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [token], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<|channel|>": 0, "a": 1}, "unk_token": "a"}});
    let skips = |answer: AnswerForm| {
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let parser = Parser { answer, tokenizer: Some(tokenizer), ..parser() };
        let body = json!({"messages": [{"role": "user", "content": "q"}], "skip_special_tokens": true});
        parse_with(parser, "/v1/chat/completions", body).unwrap().requests[0].skip_special_tokens
    };
    let channels = AnswerForm { reasoning: ReasoningParser::named("openai_gptoss"), calls: None };
    assert!(!skips(channels) && skips(both()) && skips(AnswerForm::default()));
}

/// The schema of a tool gives the types of arguments that a model writes as text.
#[test]
fn arguments_without_types_get_those_of_the_schema() {
    let properties = json!({"s": {"type": "string"}, "n": {"type": "integer"}});
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}});
    let glm = AnswerForm { calls: CallParser::named("glm45"), ..both() };
    let said = "<think>Hm.</think><tool_call>f\n<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>1\
                </arg_value></tool_call>";
    let body = json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool]});
    let job = parse_with(Parser { answer: glm, ..parser() }, "/v1/chat/completions", body.clone()).unwrap();
    let calls = &answer(&job, said)["message"]["tool_calls"];
    assert_eq!(calls[0]["function"], json!({"name": "f", "arguments": "{\"s\":\"1\",\"n\":1}"}));
    let mut required = body;
    required["tool_choice"] = "required".into();
    let job = parse_with(Parser { answer: glm, ..parser() }, "/v1/chat/completions", required).unwrap();
    let Some(StructuredOutput::ToolCalls { parser, .. }) = job.requests[0].structured_output.as_deref()
    else {
        panic!("{:?}", job.requests[0].structured_output)
    };
    assert_eq!(parser.name, "glm45");
}

#[test]
fn calls_are_required_by_a_grammar() {
    let job = asked(json!({"tools": tools(), "tool_choice": "required"})).unwrap();
    let Some(StructuredOutput::ToolCalls { functions, parallel, .. }) =
        job.requests[0].structured_output.as_deref()
    else {
        panic!("{:?}", job.requests[0].structured_output)
    };
    assert_eq!((functions.len(), *parallel, job.form.structured), (2, true, Some("tool_choice")));
    let got = answer(&job, TWO_CALLS);
    let calls = got["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &got["finish_reason"]), (2, &json!("tool_calls")));
    assert_eq!(calls[0]["function"]["arguments"], "{}");
    assert_eq!(calls[1]["function"]["arguments"], "{\"x\":18446744073709551616}");
    let named = json!({"type": "function", "function": {"name": "f"}});
    let job = asked(json!({"tools": tools(), "tool_choice": named})).unwrap();
    let got = answer(&job, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>");
    assert_eq!(
        (&got["message"]["tool_calls"][0]["function"]["name"], &got["finish_reason"]),
        (&json!("f"), &json!("stop"))
    );
    let none = answer(&asked(json!({"tools": tools(), "tool_choice": "none"})).unwrap(), TWO_CALLS);
    assert!(none["message"].get("tool_calls").is_none() && none["finish_reason"] == "stop");
    for body in [
        json!({"tool_choice": "required"}),
        json!({"tools": tools(), "tool_choice": "any"}),
        json!({"tools": tools(), "tool_choice": "required", "guided_json": {}}),
    ] {
        let error = asked(body.clone()).err().unwrap_or_else(|| panic!("{body} is taken"));
        assert_eq!((error.status, error.param.as_deref()), (400, Some("tool_choice")), "{}", error.message);
    }
}

#[test]
fn calls_and_reasoning_are_left_out_where_a_body_says_so() {
    let job =
        asked(json!({"tools": tools(), "parallel_tool_calls": false, "include_reasoning": false})).unwrap();
    let got = answer(&job, TWO_CALLS);
    assert_eq!(got["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!((&got["message"]["reasoning"], &got["message"]["content"]), (&Value::Null, &Value::Null));
    let job = asked(json!({"reasoning_effort": "low"})).unwrap();
    assert!(text(&job.requests[0].prompt).ends_with("<assistant>low"), "the template's matter");
}

#[test]
fn tokens_go_by_their_ids_where_a_body_says_so() {
    let job =
        completions(json!({"prompt": "ab", "logprobs": 1, "return_tokens_as_token_ids": true})).unwrap();
    let choice = Choice {
        text: "c".into(),
        logprobs: [logprobs("c", -0.5, &[("c", -0.5), ("d", -1.0)])].into_iter().collect(),
        finish: Some(FinishReason::Length),
        ..Choice::default()
    };
    let got = body_of("r", &job.form, &[choice], Some(&bytes())).unwrap();
    let [c, d] = ["c", "d"].map(|t| format!("token_id:{}", bytes().encode(t).unwrap()[0]));
    assert_eq!(got["choices"][0]["logprobs"]["tokens"], json!([&c]));
    let top = &got["choices"][0]["logprobs"]["top_logprobs"][0];
    assert_eq!((&top[&c], &top[&d]), (&json!(-0.5), &json!(-1.0)));
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    for (name, value) in [
        ("thinking_token_budget", json!(1)),
        ("logprob_token_ids", json!([5])),
        ("vllm_xargs", json!({"a": 1})),
        ("kv_transfer_params", json!({"a": 1})),
        ("repetition_detection", json!({"max_pattern_size": 2})),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "a"})),
        ("stream", json!(1)),
    ] {
        let error = asked(json!({name: value})).err().unwrap_or_else(|| panic!("{name} is taken"));
        assert_eq!((error.status, error.param.as_deref()), (400, Some(name)), "{}", error.message);
    }
    for body in [json!({"vllm_xargs": {}}), json!({"modalities": ["text"]}), json!({"best_of": 1})] {
        assert!(asked(body.clone()).is_ok(), "{body}");
    }
}
