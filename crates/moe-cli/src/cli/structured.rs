//! What the text must be: the flags of structured output.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use moe_engine::structured::StructuredOutput;

use crate::error::usage;
use crate::flag_file;

/// What the text must be; one of them, or none.
#[derive(Args, Debug, Clone, Default)]
#[group(id = "structured_output", multiple = false)]
pub struct StructuredArgs {
    /// The text is a JSON object.
    #[arg(long, help_heading = "Structured output")]
    pub json_object: bool,
    /// The text is JSON of this schema: the schema itself, or a file.
    #[arg(
        short = 'j',
        long,
        visible_alias = "guided-json",
        value_name = "SCHEMA|FILE",
        help_heading = "Structured output"
    )]
    pub json_schema: Option<String>,
    /// The whole text matches this regular expression.
    #[arg(long, value_name = "REGEX", help_heading = "Structured output")]
    pub guided_regex: Option<String>,
    /// The text is one of these; repeat the flag for each.
    #[arg(long, value_name = "TEXT", help_heading = "Structured output")]
    pub guided_choice: Vec<String>,
    /// The text follows the grammar in this file, in llguidance's dialect of Lark.
    #[arg(long, visible_alias = "grammar-file", value_name = "FILE", help_heading = "Structured output")]
    pub guided_grammar: Option<String>,
}

impl StructuredArgs {
    /// What is asked for, with files read.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn output(&self) -> Result<Option<StructuredOutput>> {
        if self.json_object {
            return Ok(Some(StructuredOutput::JsonObject));
        }
        if let Some(schema) = &self.json_schema {
            // No file that anybody has begins like a schema.
            let is_schema = schema.trim_start().starts_with('{');
            let text = if is_schema { schema.clone() } else { read("--json-schema", schema)? };
            return Ok(Some(StructuredOutput::JsonSchema(text)));
        }
        if let Some(regex) = &self.guided_regex {
            return Ok(Some(StructuredOutput::Regex(regex.clone())));
        }
        if let Some(file) = &self.guided_grammar {
            let text = read("--guided-grammar", file)?;
            if is_gbnf(&text) {
                return Err(usage(format!(
                    "--guided-grammar {file}: it is GBNF, as llama.cpp reads it; expected llguidance's dialect of Lark, in \
                     which `root ::= \"a\" | \"b\"` is `start: \"a\" | \"b\"`"
                )));
            }
            return Ok(Some(StructuredOutput::Grammar(text)));
        }
        Ok((!self.guided_choice.is_empty()).then(|| StructuredOutput::Choice(self.guided_choice.clone())))
    }

    /// The flags that are given, of which the command line takes one.
    pub fn given(&self) -> Vec<&'static str> {
        let flags = [
            (self.json_object, "--json-object"),
            (self.json_schema.is_some(), "--json-schema"),
            (self.guided_regex.is_some(), "--guided-regex"),
            (self.guided_grammar.is_some(), "--guided-grammar"),
            (!self.guided_choice.is_empty(), "--guided-choice"),
        ];
        flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag).collect()
    }

    /// The flag that is given.
    pub fn flag(&self) -> &'static str {
        self.given().first().copied().unwrap_or("structured output")
    }
}

/// Whether a grammar defines a rule as GBNF does, `name ::= ..`.
fn is_gbnf(text: &str) -> bool {
    let defines = |line: &str| {
        let name = line.split_once("::=").map(|(name, _)| name.trim());
        name.is_some_and(|name| {
            !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c))
        })
    };
    text.lines().any(defines)
}

fn read(flag: &str, file: &str) -> Result<String> {
    let text =
        flag_file::read_text(Path::new(file)).with_context(|| format!("{flag} {file}: cannot read the file"));
    text.map_err(|e| usage(format!("{e:#}")))
}
