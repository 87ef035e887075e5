//! Tests of answers of Qwen3, cut into pieces at any place.

use proptest::prelude::*;
use serde_json::json;

use super::parsers::{END_THINK, THINK};
use super::{
    Answer, AnswerForm, Begun, CallParser, ChatFiles, Part, ReasoningParser, Schemas, Splitter, ToolCall,
};

const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";

/// The form of answers with the parsers of these names; an empty name means that there is no such parser.
pub(super) fn form(reasoning: &str, calls: &str) -> AnswerForm {
    AnswerForm { reasoning: ReasoningParser::named(reasoning), calls: CallParser::named(calls) }
}

fn all() -> AnswerForm {
    form("qwen3", "hermes")
}
/// Joins adjacent parts of the same kind.
pub(super) fn joined(pieces: impl IntoIterator<Item = Part>) -> Vec<Part> {
    let mut all: Vec<Part> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(Part::Reasoning(text)), Part::Reasoning(more))
            | (Some(Part::Text(text)), Part::Text(more)) => text.push_str(&more),
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn parts(pieces: &[&str], form: AnswerForm, opened: bool) -> Vec<Part> {
    let mut splitter = Splitter::new(form, begun(opened), Schemas::default());
    let mut all: Vec<Part> = pieces.iter().flat_map(|piece| splitter.push(piece)).collect();
    all.extend(splitter.finish());
    joined(all)
}

fn begun(opened: bool) -> Begun {
    if opened { Begun::Reasoning } else { Begun::Nothing }
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.into())
}

fn called(name: &str, arguments: &str) -> Part {
    Part::Call(ToolCall::new(name, arguments))
}

/// White space between calls, and after the last one, is no text.
#[test]
fn white_space_after_calls_is_left_out() {
    let call = |name: &str| format!("{CALL}{{\"name\": \"{name}\", \"arguments\": {{}}}}{END_CALL}");
    let answer = format!("{} \n {}\n  ", call("f"), call("g"));
    let spoken = format!("{} \n and {}", call("f"), call("g"));
    for at in 0..=answer.len() {
        let calls = [called("f", "{}"), called("g", "{}")];
        assert_eq!(parts(&[&answer[..at], &answer[at..]], all(), false), calls, "cut at {at}");
    }
    for at in 0..=spoken.len() {
        let expected = [called("f", "{}"), text(" \n and "), called("g", "{}")];
        assert_eq!(parts(&[&spoken[..at], &spoken[at..]], all(), false), expected, "cut at {at}");
    }
}

#[test]
fn an_answer_of_qwen3_has_three_kinds_of_parts() {
    let answer = "<think>\nHm.\n\nYes.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": \
                  {\"x\": [1, \"é\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
    let want =
        [reasoning("Hm.\n\nYes."), text("Let me see."), called("f", r#"{"x":[1,"é"]}"#), called("g", "{}")];
    assert_eq!(parts(&[answer], all(), false), want);
    let whole = Answer::of(answer, all(), Begun::Nothing, Schemas::default());
    assert_eq!((whole.reasoning.as_deref(), whole.calls.len()), (Some("Hm.\n\nYes."), 2));
    let as_it_is = Answer { text: answer.into(), ..Answer::default() };
    assert_eq!(Answer::of(answer, AnswerForm::default(), Begun::Nothing, Schemas::default()), as_it_is);
}

#[test]
fn the_prompt_may_have_opened_the_reasoning() {
    assert_eq!(parts(&["Hm.\n</think>\n\nYes.\n"], all(), true), [reasoning("Hm."), text("Yes.\n")]);
    assert_eq!(parts(&["Hm.\n"], all(), true), [reasoning("Hm.\n")], "it never ends");
    assert_eq!(parts(&["\n\n</think>\n\nYes"], all(), true), [text("Yes")], "nothing was thought");
}

#[test]
fn what_only_looks_like_a_tag_is_text() {
    for answer in [
        "",
        " \n",
        "<thin",
        "I say <think> is a tag.</think>",
        "\n x",
        "a < b <tool",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\n</tool_call>\n",
        "x\n<tool_call>{\"arguments\": {}}</tool_call> y",
        "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
        "\n\n<tool_call>[]",
    ] {
        let want: Vec<Part> = [text(answer)].into_iter().filter(|_| !answer.is_empty()).collect();
        assert_eq!(parts(&[answer], all(), false), want);
    }
    assert_eq!(
        parts(&["<tool_call>{\"name\": \"f\", \"arguments\": {}}"], all(), false),
        [called("f", "{}")],
        "the closing tag may be lost with the end of the text"
    );
}

#[test]
fn a_closing_tag_in_the_arguments_is_part_of_them() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"a</tool_call>b\"}}\n</tool_call>";
    let want = called("f", "{\"x\":\"a</tool_call>b\"}");
    assert_eq!(parts(&[&format!("{call}\n{call}")], all(), false), [want.clone(), want]);
    // A string that never ends must not hide a later call.
    let broken = "<tool_call>{\"name\": \"f</tool_call> <tool_call>{\"name\": \"g\"}</tool_call>";
    let got = parts(&[broken], all(), false);
    assert_eq!(got.last(), Some(&called("g", "{}")), "{got:?}");
}

#[test]
fn reasoning_that_the_prompt_is_within_keeps_its_line_ends() {
    let of = |begun| Answer::of("\n\nso</think>\n\nYes", all(), begun, Schemas::default()).reasoning;
    assert_eq!(of(Begun::MoreReasoning).as_deref(), Some("\n\nso"));
    assert_eq!(of(Begun::Reasoning).as_deref(), Some("so"));
}

#[test]
fn parts_come_out_as_soon_as_they_are_certain() {
    let mut splitter = Splitter::new(all(), Begun::Nothing, Schemas::default());
    let mut push = |text: &str| splitter.push(text);
    assert_eq!([push("<th"), push("ink>"), push("\n")], [vec![], vec![], vec![]]);
    assert_eq!(push("So"), [reasoning("So")]);
    assert_eq!((push(" it <"), push("/x")), (vec![reasoning(" it ")], vec![reasoning("</x")]));
    assert_eq!((push("\n</thi"), push("nk>\n\nYes")), (vec![], vec![text("Yes")]));
}

#[test]
fn templates_show_what_their_models_write() {
    let of = |template: &str| {
        let config = json!({ "chat_template": template }).to_string();
        AnswerForm::of(&ChatFiles::from_tokenizer_config(config.as_bytes()).unwrap())
    };
    let qwen3 = "{% if '</think>' in content %}..{% endif %}{{ '<tool_call>\\n{\"name\": \"' }}";
    assert_eq!(of(qwen3), all());
    assert_eq!(of("<tool_call>\n<function={{ name }}>"), form("", "qwen3_coder"));
    assert_eq!(of("{{ messages[0].content }}"), AnswerForm::default());
}

proptest! {
    #[test]
    fn parts_do_not_depend_on_the_pieces(
        words in prop::collection::vec(prop::sample::select(vec![
            THINK, END_THINK, CALL, END_CALL, "\n", "\n\n", " ", "<", "</", "a", "é€", "{\"name\": \"f\"}",
            "{\"name\": \"f\", \"arguments\": {\"x\": 1}}", "{\"name\": \"</tool_call>\"}", "\"", "\\", "{\"name\"", "tool_call>", "<think", "think>",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..200, 0..12),
        form in (any::<bool>(), any::<bool>()),
        opened in any::<bool>(),
    ) {
        let name = |name: &'static str, looked_for: bool| if looked_for { name } else { "" };
        let form = super::answer_tests::form(name("qwen3", form.0), name("hermes", form.1));
        let whole = words.concat();
        let mut at: Vec<usize> = cuts.into_iter().map(|cut| whole.floor_char_boundary(cut)).collect();
        at.extend([0, whole.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parts(&pieces, form, opened), parts(&[&whole], form, opened));
    }
}
