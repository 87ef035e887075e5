//! Which columns of a table are read, and how a row becomes the line that asks the same.

use parquet::record::{Field, Row};
use parquet::schema::types::{Type, TypePtr};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::super::input::{Line, MAX_LINE};
use super::json::{self, NotText, Object};

/// Fields of a body that a table without a column `body` may have as columns. `model` is none of them: in data sets it
/// says who wrote an earlier answer.
const PARAMETERS: [&str; 43] = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_logprobs",
    "reasoning_effort",
    "repetition_penalty",
    "response_format",
    "return_routed_experts",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
];

/// Parameters that are objects or lists. In many tables they are text in JSON.
const STRUCTURED: [&str; 9] = [
    "chat_template_kwargs",
    "documents",
    "guided_json",
    "logit_bias",
    "messages",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "tools",
];

const CUSTOM_ID: &str = "custom_id";
const METHOD: &str = "method";
const URL: &str = "url";
const BODY: &str = "body";
const PROMPT: &str = "prompt";
const MESSAGES: &str = "messages";

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// What the rows of a table are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Requests, with a body in one column.
    Bodies,
    /// Prompts or conversations, with a column for each other field of the body.
    Fields,
    /// The same, and the prompts are questions to an instruct model.
    Questions,
}

/// The columns of a table that are read.
#[derive(Debug)]
pub struct Columns {
    /// The columns, always in the same order: a row asks the same if a table is written again in another order.
    pub read: Vec<TypePtr>,
    /// Names of the other columns.
    pub ignored: Vec<String>,
    form: Form,
}

impl Columns {
    /// The columns of a table with this schema. Prompts may be `questions`.
    ///
    /// # Errors
    /// It is no table of requests, or a column has the wrong type; the error says which.
    pub fn of(schema: &Type, questions: bool) -> Result<Self, String> {
        let find = |name: &str| schema.get_fields().iter().find(|column| column.name() == name).cloned();
        let form = match [BODY, MESSAGES, PROMPT].map(|name| find(name).is_some()) {
            [true, ..] => Form::Bodies,
            [_, true, true] => {
                return Err(format!("it has the columns `{MESSAGES}` and `{PROMPT}`; leave one of them out"));
            }
            [_, false, false] => return Err(nothing_asked(schema)),
            _ if questions => Form::Questions,
            _ => Form::Fields,
        };
        if questions && !find(PROMPT).is_some_and(|prompt| form == Form::Questions && json::is_text(&prompt))
        {
            return Err(format!("--chat needs texts in a column `{PROMPT}`, and no column `{BODY}`"));
        }
        let names: Vec<&str> = match form {
            Form::Bodies => vec![CUSTOM_ID, METHOD, URL, BODY],
            _ => [CUSTOM_ID, MESSAGES, PROMPT].into_iter().chain(PARAMETERS).collect(),
        };
        let read: Vec<TypePtr> = names.iter().filter_map(|name| find(name)).collect();
        read.iter().try_for_each(|column| check(column))?;
        let others = schema.get_fields().iter().filter(|column| !names.contains(&column.name()));
        let ignored = others.map(|column| column.name().to_string()).collect();
        Ok(Self { read, ignored, form })
    }

    /// The line of a row: its request as a JSON object.
    pub fn line(&self, number: u64, row: &Row) -> Line {
        let mut bytes = Vec::new();
        // Bytes that are not UTF-8 become the line: its error record says where they are wrong.
        if let Err(NotText(wrong)) = self.write(&mut bytes, number, row) {
            bytes = wrong;
        }
        Line { number, bytes: (bytes.len() <= MAX_LINE).then_some(bytes) }
    }

    fn write(&self, out: &mut Vec<u8>, number: u64, row: &Row) -> Result<(), NotText> {
        let value =
            |name: &str| row.get_column_iter().find(|(column, _)| *column == name).map(|(_, value)| value);
        let present = |name: &str| value(name).filter(|value| !matches!(value, Field::Null));
        let mut line = Object::begin(out);
        match value(CUSTOM_ID) {
            Some(Field::Null) => {}
            Some(custom_id) => json::scalar(line.member(CUSTOM_ID), &json::text(custom_id)?),
            None => json::scalar(line.member(CUSTOM_ID), &format!("row-{number}")),
        }
        if let Some(method) = present(METHOD) {
            json::write(line.member(METHOD), method)?;
        }
        let url = match (present(URL), self.form) {
            (Some(url), _) => json::text(url)?,
            (None, Form::Bodies) => url_of(present(BODY)).into(),
            (None, Form::Fields) if present(MESSAGES).is_none() => COMPLETIONS.into(),
            (None, Form::Fields | Form::Questions) => CHAT.into(),
        };
        json::scalar(line.member(URL), &url);
        match (self.form, present(BODY)) {
            (Form::Bodies, None) => {}
            (Form::Bodies, Some(body)) => structured(line.member(BODY), body)?,
            (Form::Fields | Form::Questions, _) => self.write_body(line.member(BODY), row)?,
        }
        line.end();
        Ok(())
    }

    /// Writes the body of a row that has its fields as columns.
    fn write_body(&self, out: &mut Vec<u8>, row: &Row) -> Result<(), NotText> {
        let mut body = Object::begin(out);
        for (name, value) in row.get_column_iter() {
            match name.as_str() {
                CUSTOM_ID => {}
                _ if matches!(value, Field::Null) => {}
                PROMPT if self.form == Form::Questions => {
                    let out = body.member(MESSAGES);
                    out.extend_from_slice(br#"[{"role":"user","content":"#);
                    json::write(out, value)?;
                    out.extend_from_slice(b"}]");
                }
                name if STRUCTURED.contains(&name) => structured(body.member(name), value)?,
                name => json::write(body.member(name), value)?,
            }
        }
        body.end();
        Ok(())
    }
}

/// Writes a value, or the object or list of which it is the text.
fn structured(out: &mut Vec<u8>, value: &Field) -> Result<(), NotText> {
    if matches!(value, Field::Str(_) | Field::Bytes(_)) {
        let text = json::text(value)?;
        if text.trim_start().starts_with(['{', '[']) && serde_json::from_str::<IgnoredAny>(&text).is_ok() {
            out.extend_from_slice(text.as_bytes());
            return Ok(());
        }
    }
    json::write(out, value)
}

/// What a body asks, where no column says it.
fn url_of(body: Option<&Field>) -> &'static str {
    #[derive(Deserialize)]
    struct Asks {
        #[serde(default)]
        messages: Option<IgnoredAny>,
    }
    let is_chat = match body {
        Some(Field::Group(body)) => {
            body.get_column_iter().any(|(name, value)| name == MESSAGES && !matches!(value, Field::Null))
        }
        Some(body) => json::text(body)
            .is_ok_and(|text| serde_json::from_str::<Asks>(&text).is_ok_and(|asks| asks.messages.is_some())),
        None => false,
    };
    if is_chat { CHAT } else { COMPLETIONS }
}

/// Checks the type of a column. What is wrong in single values is an error of their row.
fn check(column: &Type) -> Result<(), String> {
    let name = column.name();
    let (expected, fits) = match name {
        CUSTOM_ID => ("text or integers", json::is_text(column) || json::is_integer(column)),
        METHOD | URL => ("text", json::is_text(column)),
        BODY => ("text in JSON, or structs", json::is_text(column) || json::is_struct(column)),
        PROMPT => ("text, or lists of token ids", json::is_text(column) || json::is_list(column)),
        MESSAGES => ("lists of structs, or text in JSON", json::is_text(column) || json::is_list(column)),
        _ => ("", true),
    };
    if !fits {
        return Err(format!("the column `{name}` has the type {}; expected {expected}", json::name(column)));
    }
    match json::unsupported(column) {
        Some(part) => Err(format!("the column `{name}` has values that have no form in JSON ({part})")),
        None => Ok(()),
    }
}

fn nothing_asked(schema: &Type) -> String {
    let names: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
    format!(
        "it has no column `{BODY}`, `{PROMPT}` or `{MESSAGES}` and so asks nothing; its columns are {}",
        names.join(", ")
    )
}
