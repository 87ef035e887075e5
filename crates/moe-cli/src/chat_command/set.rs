//! `/set`: the sampling values of a conversation, with the names and the syntax of the flags.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use clap::{ArgAction, Args, Command, FromArgMatches};
use moe_engine::engine::Request;

use super::commands::nearest;
use crate::cli::SamplingArgs;

/// The sampling values of the command line, and the values that were set later.
pub struct Values {
    start: SamplingArgs,
    set: BTreeMap<String, String>,
}

impl Values {
    /// The values of the command line.
    pub fn new(start: &SamplingArgs) -> Self {
        Self { start: start.clone(), set: BTreeMap::new() }
    }

    /// All values as flags.
    pub fn args(&self) -> Result<SamplingArgs> {
        let mut args = self.start.clone();
        self.set.iter().try_for_each(|(name, value)| apply(&mut args, name, value))?;
        Ok(args)
    }

    /// The values with one more, `NAME VALUE`; the value `default` is the one of the command line.
    ///
    /// # Errors
    /// An unknown name or an invalid value; the error lists the possible ones.
    pub fn with(&self, text: &str) -> Result<Self> {
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let name = find(name)?;
        let mut set = self.set.clone();
        match value.trim() {
            "" => return Err(anyhow!("/set {name} needs a value, or default")),
            "default" => drop(set.remove(&name)),
            value => drop(set.insert(name, value.to_string())),
        }
        let values = Self { start: self.start.clone(), set };
        let given = values.args()?.structured.given();
        if given.len() > 1 {
            return Err(anyhow!("only one of {} can hold: set the others to default", given.join(", ")));
        }
        Ok(values)
    }
}

/// The sampling flags, each with a value and without a default: a missing flag stays unset.
fn definition() -> Command {
    let command = Command::new("set").no_binary_name(true).disable_help_flag(true);
    SamplingArgs::augment_args_for_update(command).mut_args(|arg| {
        let arg = arg.default_value(None::<&'static str>);
        match arg.get_action() {
            ArgAction::SetTrue => arg.action(ArgAction::Set),
            _ => arg,
        }
    })
}

/// The flag that a name refers to.
fn find(name: &str) -> Result<String> {
    let definition = definition();
    let wanted = name.trim_start_matches('-').replace('_', "-");
    let longs = || definition.get_arguments().filter_map(|arg| arg.get_long());
    let of_alias = definition.get_arguments().find(|arg| {
        arg.get_long() == Some(&wanted) || arg.get_all_aliases().is_some_and(|all| all.contains(&&*wanted))
    });
    if let Some(long) = of_alias.and_then(|arg| arg.get_long()) {
        return Ok(long.to_string());
    }
    let guess = nearest(&wanted, longs()).map(|name| format!(" (did you mean {name}?)")).unwrap_or_default();
    Err(anyhow!("there is no {name}{guess}; there are {}", longs().collect::<Vec<_>>().join(", ")))
}

/// Sets a flag in the same way as the command line.
fn apply(args: &mut SamplingArgs, name: &str, value: &str) -> Result<()> {
    let read = definition().try_get_matches_from([format!("--{name}={value}")]);
    let mut matches = read.map_err(|e| anyhow!(first_words(&e.to_string())))?;
    args.update_from_arg_matches_mut(&mut matches).map_err(|e| anyhow!(first_words(&e.to_string())))
}

/// clap's message without its advice about the command line.
fn first_words(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let first = message.split("\n\n").next().unwrap_or(message);
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The resulting values, one per line. `request` includes the values of generation_config.json.
pub fn list(args: &SamplingArgs, request: &Request) -> String {
    let definition = definition();
    let names = definition.get_arguments().filter_map(|arg| arg.get_long());
    let line = |name| format!("{name:<28} {}\n", effective(name, args, request).unwrap_or_default());
    names.map(line).collect()
}

fn effective(name: &str, args: &SamplingArgs, request: &Request) -> Option<String> {
    let sampling = &request.sampling;
    Some(match name {
        "max-new-tokens" => request.max_tokens.map_or("no limit".into(), |max| max.to_string()),
        "temperature" => sampling.temperature.to_string(),
        "top-k" => sampling.top_k.to_string(),
        "top-p" => sampling.top_p.to_string(),
        "min-p" => sampling.min_p.to_string(),
        "repetition-penalty" => sampling.repetition_penalty.to_string(),
        "presence-penalty" => sampling.presence_penalty.to_string(),
        "frequency-penalty" => sampling.frequency_penalty.to_string(),
        "logit-bias" => {
            let biases = sampling.logit_bias.iter().map(|(id, bias)| format!("{id}={bias}"));
            biases.collect::<Vec<_>>().join(",")
        }
        "seed" => args.seed.to_string(),
        "stop" => request.stop.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(" "),
        "no-escape" => args.no_escape.to_string(),
        "stop-token-ids" => request.stop_token_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        "include-stop-str-in-output" => request.include_stop_str_in_output.to_string(),
        "ignore-eos" => request.ignore_eos.to_string(),
        "min-tokens" => request.min_tokens.to_string(),
        "skip-special-tokens" => request.skip_special_tokens.to_string(),
        "json-object" => args.structured.json_object.to_string(),
        "json-schema" => args.structured.json_schema.clone().unwrap_or_default(),
        "guided-regex" => args.structured.guided_regex.clone().unwrap_or_default(),
        "guided-choice" => args.structured.guided_choice.join(" | "),
        "guided-grammar" => args.structured.guided_grammar.clone().unwrap_or_default(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> Values {
        let start = SamplingArgs {
            seed: 7,
            temperature: Some(0.5),
            include_stop_str_in_output: true,
            ..SamplingArgs::default()
        };
        Values::new(&start)
    }

    fn error(text: &str) -> String {
        values().with(text).err().unwrap_or_else(|| panic!("{text} is taken")).to_string()
    }

    #[test]
    fn values_are_set_by_the_names_of_flags_and_taken_back() {
        let mut values = values();
        for text in [
            "temperature 0.7",
            "--top_k -1",
            "max-tokens 9",
            "stop \\n\\n",
            "ignore-eos true",
            "logit-bias 5=-1,6=2",
            "skip-special-tokens false",
            "stop-token-ids 1,2",
            "min-tokens 3",
        ] {
            values = values.with(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        }
        let args = values.args().unwrap();
        assert_eq!((args.temperature, args.top_k, args.max_new_tokens), (Some(0.7), Some(-1), Some(9)));
        assert_eq!((args.stops(), args.ignore_eos, args.min_tokens), (vec!["\n\n".to_string()], true, 3));
        assert_eq!((&args.logit_bias[..], args.skip_special_tokens), (&[(5, -1.0), (6, 2.0)][..], false));
        assert_eq!((&args.stop_token_ids[..], args.seed), (&[1, 2][..], 7), "what was not set is as it was");
        assert!(args.include_stop_str_in_output, "a flag without a value too");
        let args =
            values.with("temperature default").unwrap().with("ignore-eos false").unwrap().args().unwrap();
        assert_eq!((args.temperature, args.ignore_eos, args.top_k), (Some(0.5), false, Some(-1)));
    }

    #[test]
    fn what_is_possible_is_said() {
        let e = error("temprature 0.7");
        assert!(e.contains("did you mean temperature?") && e.contains("top-p"), "{e}");
        assert!(!error("xyzzy 1").contains("mean"));
        let e = error("temperature hot");
        assert!(e.contains("'hot'") && e.contains("temperature") && !e.contains("--help"), "{e}");
        assert!(error("skip-special-tokens maybe").contains("possible values: true, false"));
        assert!(error("ignore-eos maybe").contains("possible values: true, false"));
        assert!(error("top-k").contains("needs a value"));
        let json = values().with("json-object true").unwrap();
        let both = json.with("guided-regex a+").err().unwrap().to_string();
        assert!(both.contains("only one of --json-object, --guided-regex can hold"), "{both}");
        assert!(json.with("json-object default").unwrap().with("guided-regex a+").is_ok());
        assert!(error("seed -5").contains("-1"));
    }

    #[test]
    fn every_value_is_listed() {
        let args = values().args().unwrap();
        let request = Request { max_tokens: None, ..Request::new(Vec::new()) };
        for arg in definition().get_arguments() {
            let name = arg.get_long().unwrap();
            assert!(effective(name, &args, &request).is_some(), "{name}");
        }
        assert!(list(&args, &request).contains("max-new-tokens               no limit\n"));
    }
}
