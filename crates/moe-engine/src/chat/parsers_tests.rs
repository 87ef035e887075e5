//! Tests of every form of reasoning and tool calls. Answers are written and read back, cut at each byte, and broken. No
//! word of an answer may be lost.

use proptest::prelude::*;
use serde_json::json;

use super::answer_tests::{form, joined};
use super::{
    Answer, AnswerForm, Begun, CALL_PARSERS, CallParser, ChatFiles, Part, REASONING_PARSERS, ReasoningParser,
    Schemas, Splitter, ToolCall,
};

const SCHEMA: &str =
    r#"{"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}"#;

fn schemas() -> Schemas {
    Schemas::new([("get.weather", SCHEMA), ("g", SCHEMA)])
}

fn parts(pieces: &[&str], form: AnswerForm, begun: Begun) -> Vec<Part> {
    let mut splitter = Splitter::new(form, begun, schemas());
    let mut all: Vec<Part> = pieces.iter().flat_map(|piece| splitter.push(piece)).collect();
    all.extend(splitter.finish());
    joined(all)
}

fn answer(text: &str, form: AnswerForm, begun: Begun) -> Answer {
    Answer::of(text, form, begun, schemas())
}

/// Returns a form of calls together with the form of reasoning that the same models use.
fn with_reasoning(parser: &'static CallParser) -> AnswerForm {
    let reasoning = if parser.is_channel() { "openai_gptoss" } else { "qwen3" };
    AnswerForm { reasoning: ReasoningParser::named(reasoning), calls: Some(parser) }
}

fn calls() -> [ToolCall; 2] {
    let first = r#"{"s":"a \"b\" <x> é","n":12345678901234567890123,"o":{"k":[1,null]}}"#;
    [ToolCall::new("get.weather", first), ToolCall::new("g", r#"{"s":"5"}"#)]
}

/// Returns calls without the ids that some forms give them.
fn unnamed(calls: &[ToolCall]) -> Vec<ToolCall> {
    calls.iter().map(|call| ToolCall { id: None, ..call.clone() }).collect()
}

#[test]
fn calls_are_read_as_they_are_written() {
    for parser in &CALL_PARSERS {
        let form = with_reasoning(parser);
        let said = form.reasoning.unwrap().write("Hm.\nYes.", "Let me see.");
        let between = if parser.is_channel() { "<|end|><|start|>assistant" } else { "\n" };
        let text = format!("{said}{between}{}", parser.write(&calls()));
        let got = answer(&text, form, Begun::Nothing);
        assert_eq!(got.reasoning.as_deref(), Some("Hm.\nYes."), "{}", parser.name);
        assert_eq!(got.text, "Let me see.", "{}", parser.name);
        assert_eq!(unnamed(&got.calls), calls(), "{}", parser.name);
        let alone = AnswerForm { reasoning: None, ..form };
        let one = answer(&parser.write(&calls()[1..]), alone, Begun::Nothing);
        assert_eq!((one.text.as_str(), unnamed(&one.calls)), ("", calls()[1..].to_vec()), "{}", parser.name);
    }
}

#[test]
fn an_answer_may_be_cut_anywhere() {
    for parser in &CALL_PARSERS {
        let form = with_reasoning(parser);
        let said = form.reasoning.unwrap().write("Hm.", "See é.");
        let between = if parser.is_channel() { "<|end|><|start|>assistant" } else { "\n" };
        let text = format!("{said}{between}{} and then", parser.write(&calls()));
        let whole = parts(&[&text], form, Begun::Nothing);
        for at in (0..=text.len()).filter(|&at| text.is_char_boundary(at)) {
            let got = parts(&[&text[..at], &text[at..]], form, Begun::Nothing);
            assert_eq!(got, whole, "{} at {at}", parser.name);
        }
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(parts(&chars, form, Begun::Nothing), whole, "{}", parser.name);
        assert_eq!(whole.last(), Some(&Part::Text(" and then".into())), "{}", parser.name);
    }
}

/// Answers in every form, as models of the family write them.
#[test]
fn published_forms_are_read() {
    let call = |name: &str, arguments: &str| ToolCall::new(name, arguments);
    let with_id = |id: &str, call: ToolCall| ToolCall { id: Some(id.into()), ..call };
    for (parser, text, want) in [
        (
            "hermes",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>",
            call("f", r#"{"x":1}"#),
        ),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
            call("f", r#"{"x":1}"#),
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            call("f", r#"{"x":1}"#),
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"x\": 1}\
             <|tool_call_end|><|tool_calls_section_end|>",
            with_id("functions.f:0", call("f", r#"{"x":1}"#)),
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"g\">\n<parameter name=\"s\">1</parameter>\n<parameter name=\"n\">1\
             </parameter>\n</invoke>\n</minimax:tool_call>",
            call("g", r#"{"s":"1","n":1}"#),
        ),
        (
            "glm45",
            "<tool_call>g\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n<arg_key>o</arg_key>\n<arg_value>{\"a\": 1}\
             </arg_value>\n</tool_call>",
            call("g", r#"{"s":"1","o":{"a":1}}"#),
        ),
        ("glm45", "<tool_call>g</tool_call>", call("g", "{}")),
        (
            "qwen3_coder",
            "<tool_call>\n<function=g>\n<parameter=s>\nif x:\n  y\n</parameter>\n</function>\n</tool_call>",
            call("g", r#"{"s":"if x:\n  y"}"#),
        ),
        ("mistral", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}]", call("f", r#"{"x":1}"#)),
        (
            "mistral",
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}, \"id\": \"abc123def\"}]",
            with_id("abc123def", call("f", "{}")),
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]{\"x\": 1}", call("f", r#"{"x":1}"#)),
        ("mistral", "[TOOL_CALLS]f{\"x\": 1}", call("f", r#"{"x":1}"#)),
        (
            "mistral",
            "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{\"x\": 1}",
            with_id("abc123def", call("f", r#"{"x":1}"#)),
        ),
        (
            "openai",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>",
            call("f", r#"{"x":1}"#),
        ),
        (
            "openai",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}",
            call("f", r#"{"x":1}"#),
        ),
        ("openai", " to=functions.f<|channel|>commentary json<|message|>{}", call("f", "{}")),
    ] {
        let got = answer(text, form("", parser), Begun::Nothing);
        assert_eq!((got.text.as_str(), got.calls), ("", vec![want]), "{parser}: {text}");
    }
}

#[test]
fn what_is_no_call_is_text() {
    for (parser, text) in [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\n```<｜tool▁call▁end｜> y",
        ),
        ("deepseek_v31", "a <｜tool▁calls▁begin｜> b"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:x<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        ("minimax_m2", "<minimax:tool_call>\n<invoke name=\"g\">\n<parameter name=\"s\">1"),
        ("minimax_m2", "an <invoke name=\"g\"></invoke> that is in no section"),
        ("glm45", "<tool_call>g\n<arg_key>s</arg_key>\nno value</tool_call>"),
        ("glm45", "<tool_call>not a name</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\nx</function>\n</tool_call>",
        ),
        ("mistral", "[TOOL_CALLS]: that is the tag"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{\"x\": "),
        ("openai", "<|channel|>commentary to=functions.f<|message|>{\"x\": <|call|>"),
        ("openai", "<|channel|>commentary to=functions.f"),
        ("openai", "<|channel|>other<|message|>x<|end|>"),
        ("openai", "plain text"),
    ] {
        assert_eq!(parts(&[text], form("", parser), Begun::Nothing), [Part::Text(text.into())], "{parser}");
    }
    // A broken call must not hide a later one.
    let broken = "<tool_call>g\n<arg_key>s</arg_key></tool_call><tool_call>g</tool_call>";
    let got = answer(broken, form("", "glm45"), Begun::Nothing);
    assert_eq!(got.text, "<tool_call>g\n<arg_key>s</arg_key></tool_call>");
    assert_eq!(got.calls, [ToolCall::new("g", "{}")]);
}

#[test]
fn reasoning_begins_and_ends_as_the_family_writes_it() {
    let of = |parser: &str, text: &str, begun: Begun| {
        let got = answer(text, form(parser, ""), begun);
        (got.reasoning.unwrap_or_default(), got.text)
    };
    let both = |reasoning: &str, text: &str| (reasoning.to_string(), text.to_string());
    for parser in REASONING_PARSERS.iter().filter(|parser| !parser.channels && !parser.stays) {
        let name = parser.name;
        assert_eq!(of(name, "<think>Hm.</think>\n\nYes", Begun::Nothing), both("Hm.", "Yes"), "{name}");
        assert_eq!(of(name, "Hm.</think>Yes", Begun::Reasoning), both("Hm.", "Yes"), "{name}");
        assert_eq!(of(name, "Yes", Begun::Text), both("", "Yes"), "{name}");
        let bare = of(name, "Hm.</think>Yes", Begun::Nothing);
        let assumed = if parser.assumed { both("Hm.", "Yes") } else { both("", "Hm.</think>Yes") };
        assert_eq!(bare, assumed, "{name}");
    }
    let stays = of("minimax_m2_append_think", "Hm.</think>\n\nYes", Begun::Reasoning);
    assert_eq!(stays, both("", "<think>Hm.</think>\n\nYes"));
    let response = "Hm.\n</think>\n\n\n<response>\nYes\n</response>\n";
    assert_eq!(of("ernie45", response, Begun::Reasoning), both("Hm.", "Yes"));
    assert_eq!(of("ernie45", "Hm.\n</think>\nYes", Begun::Reasoning), both("Hm.", "Yes"));
    let calls = CallParser::named("kimi_k2").unwrap().write(&calls()[1..]);
    let implicit = answer(&format!("Hm.{calls}"), form("kimi_k2", "kimi_k2"), Begun::Nothing);
    assert_eq!(
        (implicit.reasoning.as_deref(), implicit.text.as_str(), implicit.calls.len()),
        (Some("Hm."), "", 1)
    );
}

#[test]
fn channels_are_reasoning_text_and_calls() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>\
                <|start|>assistant<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary \
                to=functions.g <|constrain|>json<|message|>{\"s\": \"<|call|>\"}<|call|><|start|>assistant<|channel|>final\
                <|message|>Done.<|return|>";
    let want = [
        Part::Reasoning("Hm.\nSo.".into()),
        Part::Text("I will look.".into()),
        Part::Call(ToolCall::new("g", r#"{"s":"<|call|>"}"#)),
        Part::Text("\nDone.".into()),
    ];
    assert_eq!(parts(&[text], form("openai_gptoss", "openai"), Begun::Nothing), want);
    // A form without a parser leaves its part in the text as it was written. The final channel is always text.
    let only_calls = answer(text, form("", "openai"), Begun::Nothing);
    assert!(only_calls.text.starts_with("<|channel|>analysis<|message|>Hm.<|end|>"), "{}", only_calls.text);
    assert_eq!((only_calls.reasoning, only_calls.calls.len()), (None, 1));
    let only_reasoning = answer(text, form("openai_gptoss", ""), Begun::Nothing);
    assert!(
        only_reasoning.text.contains("to=functions.g <|constrain|>json<|message|>{"),
        "{}",
        only_reasoning.text
    );
    assert_eq!(answer("Hm.", form("openai_gptoss", ""), Begun::Reasoning).reasoning.as_deref(), Some("Hm."));
}

#[test]
fn templates_choose_the_parsers() {
    let of = |template: &str| {
        let config = json!({ "chat_template": template }).to_string();
        let form = AnswerForm::of(&ChatFiles::from_tokenizer_config(config.as_bytes()).unwrap());
        (form.reasoning.map_or("", |parser| parser.name), form.calls.map_or("", |parser| parser.name))
    };
    for (template, want) in [
        ("<|channel|>analysis<|message|>", ("openai_gptoss", "openai")),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>```json", ("deepseek_r1", "deepseek_v3")),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>", ("deepseek_r1", "deepseek_v31")),
        ("<｜Assistant｜><｜tool▁calls▁begin｜>```json", ("", "deepseek_v3")),
        ("<|im_middle|></think><|tool_calls_section_begin|>", ("kimi_k2", "kimi_k2")),
        ("<|im_middle|><|tool_calls_section_begin|>", ("", "kimi_k2")),
        ("[gMASK]<sop></think><tool_call><arg_key>", ("glm45", "glm45")),
        ("</think><minimax:tool_call>", ("minimax_m2", "minimax_m2")),
        ("</think><response><tool_call>", ("ernie45", "ernie45")),
        ("</think><tool_call>", ("qwen3", "hermes")),
        ("<tool_call><function=", ("", "qwen3_coder")),
        ("[INST][TOOL_CALLS]", ("", "mistral")),
        ("{{ messages }}", ("", "")),
    ] {
        assert_eq!(of(template), want, "{template}");
    }
}

#[test]
fn names_are_those_of_the_table_and_each_is_there_once() {
    let mut names: Vec<&str> = REASONING_PARSERS.iter().map(|parser| parser.name).collect();
    assert!(names.iter().all(|name| ReasoningParser::named(name).is_some_and(|parser| parser.name == *name)));
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), REASONING_PARSERS.len());
    let mut names: Vec<&str> = CALL_PARSERS.iter().map(|parser| parser.name).collect();
    assert!(names.iter().all(|name| CallParser::named(name).is_some_and(|parser| parser.name == *name)));
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), CALL_PARSERS.len());
    assert_eq!(AnswerForm::default().required_calls().name, "hermes");
}

/// Returns all text that the parts contain.
fn all_text(parts: &[Part]) -> String {
    let one = |part: &Part| match part {
        Part::Reasoning(text) | Part::Text(text) => text.clone(),
        Part::Call(ToolCall { name, arguments, id }) => {
            // The id of a call may be its name with a number.
            let id = id.as_deref().unwrap_or_default();
            let name = if id.contains(name.as_str()) { "" } else { name };
            format!(" {name} {arguments} {id} ")
        }
    };
    parts.iter().map(one).collect()
}

proptest! {
    /// The answer consists of words between tags of the form, in any order. Each word must come out exactly once, and
    /// the parts must not depend on the pieces.
    #[test]
    fn no_word_is_lost_and_pieces_do_not_matter(
        which in 0..CALL_PARSERS.len(),
        reasons in 0..REASONING_PARSERS.len(),
        picks in prop::collection::vec((0usize..40, any::<bool>()), 0..16),
        cuts in prop::collection::vec(0usize..600, 0..12),
        opened in any::<bool>(),
    ) {
        let calls = &CALL_PARSERS[which];
        let own = &REASONING_PARSERS[reasons];
        let reasoning = if own.channels == calls.is_channel() { Some(own) } else { None };
        let form = AnswerForm { reasoning, calls: Some(calls) };
        let whole_call = calls.write(&[ToolCall::new("g", r#"{"s":"v","n":1}"#)]);
        let mut tags: Vec<&str> = form.tags();
        tags.extend(["\n", "\n\n", " ", "{", "}", "\"", "\\", "assistant", "final", "analysis", ":", "<function=g>", "g", "```json"]);
        tags.push(&whole_call);
        let mut text = String::new();
        let mut words = Vec::new();
        for (i, (pick, word)) in picks.iter().enumerate() {
            text += tags[pick % tags.len()];
            if *word {
                words.push(format!("w{i}w"));
                text += &words[words.len() - 1];
            }
        }
        let begun = if opened { Begun::Reasoning } else { Begun::Nothing };
        let whole = parts(&[&text], form, begun);
        let said = all_text(&whole);
        for word in &words {
            prop_assert_eq!(said.matches(word.as_str()).count(), 1, "{} of {:?} in {:?}", word, text, whole);
        }
        let mut at: Vec<usize> = cuts.into_iter().map(|cut| text.floor_char_boundary(cut)).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parts(&pieces, form, begun), whole, "{:?}", text);
    }
}
