//! The settings on which the answers of a run depend, in a file next to the output. A rerun with other settings must
//! not be mistaken for a continuation.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use moe_engine::chat::ChatFiles;
use serde_json::{Map, Value, json};
use tracing::warn;

use super::fields::short;
use super::fingerprint::Fingerprint;
use super::parser::Parser;
use super::replace::{replace, sibling};
use crate::error::usage;

/// Fields of the default request that are not settings: fields that each request sets itself, and the derived seed.
const NOT_SETTINGS: [&str; 6] =
    ["prompt", "sampling", "prompt_logprobs", "timeout", "capture_routing", "replay_routing"];

/// The setting that matters only for answers that the context has cut, or would cut now.
const CONTEXT: &str = "max_model_len";

/// Settings by name, in a fixed order.
#[derive(Debug, Default, PartialEq)]
pub struct Settings(Map<String, Value>);

impl Settings {
    /// The settings of a run with a model of this dtype. Of the chat templates only the fingerprint is stored.
    pub fn new(parser: &Parser, chat: Option<&ChatFiles>, dtype: &str) -> Result<Self> {
        // The conversion goes through text, which keeps 0.7 from becoming 0.699999988.
        let text =
            serde_json::to_string(&parser.defaults).context("cannot describe the sampling defaults")?;
        let mut defaults: Map<String, Value> = serde_json::from_str(&text)?;
        let sampling = defaults.get("sampling").and_then(Value::as_object).cloned().unwrap_or_default();
        defaults.retain(|name, _| !NOT_SETTINGS.contains(&name.as_str()));
        let mut settings = Map::from_iter([
            ("model".to_string(), json!(parser.served.name)),
            ("dtype".to_string(), json!(dtype)),
            (CONTEXT.to_string(), json!(parser.max_model_len)),
            ("skip_tokenizer_init".to_string(), json!(parser.tokenizer.is_none())),
            ("reasoning_parser".to_string(), json!(parser.answer.reasoning.map(|parser| parser.name))),
            ("tool_call_parser".to_string(), json!(parser.answer.calls.map(|parser| parser.name))),
            ("chat_template".to_string(), json!(chat.map(|files| Fingerprint::of(files).to_string()))),
            ("chat_template_kwargs".to_string(), json!(parser.template_kwargs)),
        ]);
        settings.extend(sampling);
        settings.extend(defaults);
        settings.insert("seed".to_string(), json!(parser.seed));
        Ok(Self(settings))
    }

    /// The differences, with old and new values, for answers of at most `longest` tokens including their prompts. A
    /// setting that only one of two versions of this program has is ignored.
    fn differences(&self, old: &Self, longest: usize) -> Vec<String> {
        let both = old.0.iter().filter_map(|(name, old)| Some((name, old, self.0.get(name)?)));
        let fits = |context: &Value| context.as_u64().is_some_and(|context| (longest as u64) < context);
        both.filter(|(_, old, new)| old != new)
            .filter(|(name, old, new)| *name != CONTEXT || !(fits(old) && fits(new)))
            .map(|(name, old, new)| format!("{name} was {} and is {}", short(old), short(new)))
            .collect()
    }

    /// Stores the settings of an output that has no answers yet.
    pub fn write(&self, output: &Path) -> Result<()> {
        let path = file_of(output);
        let text = serde_json::to_string_pretty(&self.0)? + "\n";
        let written = replace(&path, |file| file.write_all(text.as_bytes()));
        written.map(drop).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Compares with the settings of the run that began an output. `longest` is the number of tokens of its longest
    /// answer with prompt. An output of an older version has no file of settings.
    ///
    /// # Errors
    /// They differ, so the output would mix answers of both.
    pub fn check(&self, output: &Path, longest: usize) -> Result<()> {
        let path = file_of(output);
        let name = path.display();
        let output = output.display();
        let Some(old) = Self::read(&path)? else {
            warn!(
                "--output {output}: there is no {name}, so nobody can tell whether its records had these settings"
            );
            return Ok(());
        };
        let differences = self.differences(&old, longest);
        if differences.is_empty() {
            return Ok(());
        }
        Err(usage(format!(
            "--output {output} was begun with other settings: {}; use the old ones, name another file, answer all \
             lines again with --overwrite, or delete {name} to mix answers of both",
            differences.join(", ")
        )))
    }

    fn read(path: &Path) -> Result<Option<Self>> {
        let name = path.display();
        let bytes = match fs::read(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes.with_context(|| format!("cannot read {name}"))?,
        };
        let settings = serde_json::from_slice(&bytes).map_err(|e| {
            usage(format!(
                "{name} does not hold the settings of a batch: {e}; delete it to go on without them, or answer all \
                 lines again with --overwrite"
            ))
        })?;
        Ok(Some(Self(settings)))
    }
}

/// The file with the settings of an output.
pub fn file_of(output: &Path) -> PathBuf {
    sibling(output, ".run.json")
}

#[cfg(test)]
mod tests {
    use super::super::tests::parser;
    use super::*;

    fn settings(change: impl FnOnce(&mut Parser)) -> Settings {
        let mut parser = parser();
        change(&mut parser);
        Settings::new(&parser, None, "bf16").unwrap()
    }

    #[test]
    fn settings_are_compared_by_name() {
        let old = settings(|_| {});
        assert_eq!(old.0["temperature"], json!(0.7), "as it was written");
        let shorter = settings(|p| p.max_model_len = 50);
        assert!(
            shorter.differences(&old, 49).is_empty(),
            "it limits, and changes no answer that is below both"
        );
        assert_eq!(shorter.differences(&old, 50), ["max_model_len was 100 and is 50"]);
        assert_eq!(old.differences(&shorter, 50).len(), 1, "what was cut would go on now");
        let other = Settings::new(&parser(), None, "f32").unwrap();
        assert_eq!(other.differences(&old, 0), ["dtype was \"bf16\" and is \"f32\""]);
        let new = settings(|p| {
            p.served.name = "other".into();
            p.defaults.sampling.temperature = 0.5;
            p.defaults.stop = vec!["x".into()];
            p.seed = 4;
        });
        let want = [
            "model was \"tiny\" and is \"other\"",
            "temperature was 0.7 and is 0.5",
            "seed was 3 and is 4",
            "stop was [] and is [\"x\"]",
        ];
        assert_eq!(new.differences(&old, 0), want);
    }

    #[test]
    fn a_template_is_known_by_its_contents() {
        let files = |text: &str| {
            ChatFiles::from_tokenizer_config(json!({ "chat_template": text }).to_string().as_bytes())
        };
        let of = |text: &str| Settings::new(&parser(), Some(&files(text).unwrap()), "bf16").unwrap();
        assert_eq!(of("a").differences(&of("a"), 0).len(), 0);
        assert!(of("a").differences(&of("b"), 0)[0].starts_with("chat_template was "));
    }

    #[test]
    fn a_file_survives_and_a_broken_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out.jsonl");
        let ours = settings(|_| {});
        assert!(ours.check(&output, 0).is_ok(), "without a file there is only a warning");
        ours.write(&output).unwrap();
        assert_eq!(Settings::read(&file_of(&output)).unwrap(), Some(settings(|_| {})));
        fs::write(dir.path().join("out.jsonl.run.json"), "{").unwrap();
        let error = ours.check(&output, 0).unwrap_err().to_string();
        assert!(error.contains("out.jsonl.run.json") && error.contains("--overwrite"), "{error}");
    }
}
