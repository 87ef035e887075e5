//! The tools of a body, and which of them its answer must call.

use moe_engine::chat::{AnswerForm, CallParser, Schemas};
use moe_engine::structured::{Function, StructuredOutput};
use serde_json::{Value, json};

use super::api::Api;
use super::fields::{ApiError, Fields, short};
use super::structured::RequestedOutput;

/// The name of the field.
const FIELD: &str = "tool_choice";

/// The tools of a body.
#[derive(Debug, Default, PartialEq)]
pub struct Tools {
    functions: Vec<Function>,
    /// Whether there are tools, of whatever form.
    given: bool,
    choice: Choice,
    /// Whether at most one call is wanted.
    single: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Choice {
    /// No call is looked for.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// At least one call.
    Required,
    /// One call of the function with this number.
    Named(usize),
}

impl Tools {
    /// The tools of a body; a completion has none.
    pub fn of(api: Api, body: &Fields) -> Result<Self, ApiError> {
        if api == Api::Completions {
            return Ok(Self::default());
        }
        let single = body.bool("parallel_tool_calls")? == Some(false);
        let tools = body.objects("tools")?.unwrap_or_default();
        let given = !tools.is_empty();
        let functions =
            tools.iter().map(|tool| &tool["function"]).filter(|function| function["name"].is_string());
        let functions = functions.map(function).collect();
        let mut tools = Self { functions, given, choice: Choice::Auto, single };
        tools.choice = tools.chosen(body)?;
        Ok(tools)
    }

    fn chosen(&self, body: &Fields) -> Result<Choice, ApiError> {
        let Some(choice) = body.value(FIELD) else { return Ok(Choice::Auto) };
        let wrong = || {
            let expected = "expected \"none\", \"auto\", \"required\" or a function of the tools, as in {\"type\": \
                            \"function\", \"function\": {\"name\": \"f\"}}";
            ApiError::field(FIELD, format!("{expected}, got {}", short(choice)))
        };
        let chosen = match choice {
            Value::String(word) if word == "none" => Choice::None,
            Value::String(word) if word == "auto" => Choice::Auto,
            Value::String(word) if word == "required" => Choice::Required,
            Value::Object(_) if choice["type"] == "function" => {
                let name = choice["function"]["name"].as_str().ok_or_else(wrong)?;
                let at = self.functions.iter().position(|function| function.name == name);
                let names = || self.functions.iter().map(|f| f.name.as_str()).collect::<Vec<_>>().join(", ");
                let unknown = || {
                    let names = if self.functions.is_empty() { "no functions".into() } else { names() };
                    ApiError::field(
                        FIELD,
                        format!("there is no function {name:?} in tools, which has {names}"),
                    )
                };
                Choice::Named(at.ok_or_else(unknown)?)
            }
            _ => return Err(wrong()),
        };
        match chosen {
            Choice::Required if self.functions.is_empty() => {
                Err(ApiError::field(FIELD, "it needs tools, and the body has no functions in them"))
            }
            chosen => Ok(chosen),
        }
    }

    /// The structured output of the answer: calls in this form if calls are required, otherwise the requested one.
    ///
    /// # Errors
    /// Both calls and another text are required.
    pub fn with_calls(
        &self,
        asked: Option<RequestedOutput>,
        parser: &'static CallParser,
    ) -> Result<Option<RequestedOutput>, ApiError> {
        let (functions, parallel) = match self.choice {
            Choice::None | Choice::Auto => return Ok(asked),
            Choice::Required => (self.functions.clone(), !self.single),
            Choice::Named(at) => (vec![self.functions[at].clone()], false),
        };
        match asked {
            Some(RequestedOutput { field, output: Some(_) }) => Err(ApiError::field(
                FIELD,
                format!("it requires calls, and {field} asks for another text: leave one of them out"),
            )),
            _ => {
                let output = Some(StructuredOutput::ToolCalls { parser, functions, parallel });
                Ok(Some(RequestedOutput { field: FIELD, output }))
            }
        }
    }

    /// The form of the calls that are looked for in the answer; `form` is the one for free text.
    pub fn called(&self, form: AnswerForm) -> Option<&'static CallParser> {
        match self.choice {
            Choice::None => None,
            Choice::Auto => form.calls.filter(|_| self.given),
            Choice::Required | Choice::Named(_) => Some(form.required_calls()),
        }
    }

    /// The schemas of the functions, from which the types of arguments are read.
    pub fn schemas(&self) -> Schemas {
        Schemas::new(self.functions.iter().map(|function| (&function.name[..], &function.parameters[..])))
    }

    /// The largest number of calls in an answer; as in vLLM, further calls are dropped.
    pub fn most_calls(&self) -> usize {
        if self.single { 1 } else { usize::MAX }
    }

    /// Whether the function is given by name.
    pub fn is_named(&self) -> bool {
        matches!(self.choice, Choice::Named(_))
    }
}

fn function(function: &Value) -> Function {
    let parameters = match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}}),
        parameters => parameters.clone(),
    };
    let name = function["name"].as_str().unwrap_or_default().to_string();
    Function { name, parameters: parameters.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(body: Value) -> Result<Tools, String> {
        Tools::of(Api::Chat, &Fields(body.as_object().unwrap())).map_err(|e| e.message)
    }

    fn hermes() -> &'static CallParser {
        CallParser::named("hermes").unwrap()
    }

    /// Whether calls are looked for, with a parser or without.
    fn called(tools: &Tools, parser: bool) -> bool {
        tools.called(AnswerForm { reasoning: None, calls: parser.then(hermes) }).is_some()
    }

    fn body(choice: Value) -> Value {
        let function = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        json!({"tools": [function("f"), function("g")], "tool_choice": choice})
    }

    #[test]
    fn a_choice_says_which_calls_the_answer_has() {
        let output = |tools: &Tools| tools.with_calls(None, hermes()).unwrap().and_then(|asked| asked.output);
        for choice in [json!(null), json!("auto"), json!("none")] {
            let tools = tools(body(choice.clone())).unwrap();
            assert_eq!(output(&tools), None, "{choice}");
            assert_eq!((called(&tools, true), called(&tools, false)), (choice != "none", false), "{choice}");
        }
        let required = tools(body(json!("required"))).unwrap();
        let Some(StructuredOutput::ToolCalls { functions, parallel, .. }) = output(&required) else {
            panic!()
        };
        assert_eq!((functions.len(), parallel, called(&required, false)), (2, true, true));
        let named = tools(body(json!({"type": "function", "function": {"name": "g"}}))).unwrap();
        let Some(StructuredOutput::ToolCalls { functions, parallel, .. }) = output(&named) else { panic!() };
        assert_eq!((functions[0].name.as_str(), functions.len(), parallel), ("g", 1, false));
        assert!(named.is_named() && !required.is_named());
        let mut single = body(json!("required"));
        single["parallel_tool_calls"] = false.into();
        let single = tools(single).unwrap();
        let Some(StructuredOutput::ToolCalls { parallel, .. }) = output(&single) else { panic!() };
        assert_eq!((parallel, single.most_calls()), (false, 1));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let error = |body: Value| tools(body).unwrap_err();
        assert!(error(body(json!("any"))).contains("expected \"none\", \"auto\", \"required\""));
        assert!(error(body(json!({"type": "allowed_tools"}))).contains("expected \"none\""));
        let unknown = json!({"type": "function", "function": {"name": "h"}});
        assert!(error(body(unknown.clone())).contains("there is no function \"h\" in tools, which has f, g"));
        assert!(error(json!({"tool_choice": unknown})).contains("which has no functions"));
        assert!(error(json!({"tool_choice": "required"})).contains("it needs tools"));
        let asked = RequestedOutput { field: "guided_regex", output: Some(StructuredOutput::JsonObject) };
        let both = tools(body(json!("required"))).unwrap().with_calls(Some(asked), hermes()).err().unwrap();
        assert!(both.message.contains("guided_regex asks for another text"), "{}", both.message);
    }
}
