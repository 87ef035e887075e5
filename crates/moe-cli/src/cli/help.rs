//! The texts of `-h` and `--help`: `-h` shows the flags that most users need and examples, `--help` every flag by
//! group.

use super::version;
use crate::Program;
use clap::Command;

/// Flags in the short help of every command that has them.
const COMMON: [&str; 20] = [
    "model",
    "prompt",
    "prompt_file",
    "chat",
    "json",
    "json_schema",
    "max_new_tokens",
    "temperature",
    "seed",
    "stop",
    "device",
    "dtype",
    "num_threads",
    "input",
    "output",
    "system",
    "config",
    "batches",
    "workload",
    "reference",
];

/// The description of a program.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// A model on the hub that it runs, for examples.
    pub model: &'static str,
    /// Whether a checkpoint is part of the program.
    pub embedded: bool,
}

impl About {
    /// The description of this program.
    pub fn of(program: &Program) -> Self {
        let first = program.families.run_here().next();
        let model = first.map_or(Self::default().model, |family| family.example);
        Self { model, embedded: program.embedded.is_some() }
    }

    /// An example of a command for this program.
    fn example(self, program: &str, line: &str) -> String {
        let model = if self.embedded { String::new() } else { format!(" --model {}", self.model) };
        let brings_model = line.contains("MODEL") || line.contains("--config");
        let program = if brings_model { program.to_string() } else { format!("{program}{model}") };
        line.replace("{}", &program).replace("MODEL", self.model)
    }
}

impl Default for About {
    fn default() -> Self {
        Self { model: "ORG/NAME", embedded: true }
    }
}

/// Examples at the end of a command's help, one a line; `{}` is the program, MODEL a model on the hub that it runs.
const EXAMPLES: [(&str, &[&str]); 6] = [
    (
        "generate",
        &[
            "{} --prompt 'First Citizen:'",
            "{} --prompt-file story.txt --max-new-tokens 500",
            "echo 'ROMEO:' | {} --temperature 0.8 --seed 7",
            "{} --model MODEL --device cuda --prompt 'The sea'",
            "{} --prompt 'Q: 1+1 A:' --stop '\\n' --dtype f32 --num-threads 4",
        ],
    ),
    ("chat", &["{} chat --model MODEL --device cuda --system 'Be brief.'"]),
    ("batch", &["{} batch --model MODEL --input requests.jsonl --output answers.jsonl"]),
    (
        "bench",
        &[
            "{} bench --config config.json --dummy-weights --batches 1,8,64 --device cuda",
            "{} bench --model MODEL --device cuda --workload requests.json",
        ],
    ),
    ("download", &["{} download MODEL@main"]),
    ("inspect", &["{} inspect MODEL"]),
];

/// clap's definition of the program under a name, with examples and two lengths of help.
pub fn definition(command: Command, name: &str, about: About) -> Command {
    let is_shown = |name: &str| command.find_subcommand(name).is_some_and(|command| !command.is_hide_set());
    let shown = EXAMPLES.iter().filter(|(name, _)| is_shown(name));
    let all: Vec<&str> = shown.flat_map(|(_, lines)| lines.iter().copied()).collect();
    let after = format!(
        "{}\n\n`{name} generate -h` shows the flags that most people need, \
        `{name} COMMAND --help` all of a command.\n\nFor developers: `{name} bench --help`, `{name} parity --help`",
        examples(name, &all, about)
    );
    command
        .override_usage(format!("{name} [COMMAND] [OPTIONS]"))
        .name(name.to_string())
        .version(version::short())
        .long_version(version::long())
        .after_help(after)
        .mut_subcommands(|command| {
            let own = EXAMPLES.iter().find(|(of, _)| *of == command.get_name());
            let text = own.map(|(_, lines)| examples(name, lines, about)).unwrap_or_default();
            command.after_help(text).mut_args(|arg| {
                let common = COMMON.contains(&arg.get_id().as_str());
                // A negative number after a flag is its value, so that the flag's error says what it expects.
                let has_value = arg.get_action().takes_values()
                    && arg.get_num_args().is_none_or(|n| n.min_values() > 0)
                    && !arg.is_positional();
                let arg = if has_value { arg.allow_negative_numbers(true) } else { arg };
                arg.hide_short_help(!common)
            })
        })
}

fn examples(program: &str, lines: &[&str], about: About) -> String {
    let lines: Vec<_> = lines.iter().map(|line| format!("\n  {}", about.example(program, line))).collect();
    format!("Examples:{}", lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::error::ErrorKind;

    fn help(args: &[&str]) -> String {
        let e = Cli::command_of([&["m"], args].concat()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::DisplayHelp, "{e}");
        e.to_string()
    }

    #[test]
    fn the_short_help_fits_a_screen_and_the_long_one_has_every_flag() {
        let short = help(&["generate", "-h"]);
        let long = help(&["generate", "--help"]);
        let flags = |text: &str| {
            text.lines().filter(|line| line.trim_start().starts_with('-') && line.contains("--")).count()
        };
        assert!(flags(&short) <= 17 && short.lines().count() <= 56, "{short}");
        assert!(flags(&long) > 40, "{long}");
        assert!(long.contains("[possible values: ") && short.contains("--temperature"), "{long}");
        assert!(help(&["--help"]).contains("chat") && help(&["-h"]).contains("Examples:"));
        let commands = help(&["--help"]);
        let is_listed = |name: &str| commands.lines().any(|line| line.trim_start().starts_with(name));
        assert!(is_listed("batch ") && !is_listed("bench ") && !is_listed("parity "), "{commands}");
        assert!(commands.contains("bench --help") && help(&["bench", "--help"]).contains("--workload"));
    }

    #[test]
    fn every_example_is_understood() {
        for line in EXAMPLES.iter().flat_map(|(_, lines)| lines.iter()) {
            let words = line.split(" | ").last().unwrap().replace("\\n", "");
            let mut quoted = words.split('\'');
            let mut args = Vec::new();
            while let Some(plain) = quoted.next() {
                args.extend(plain.split_whitespace().map(String::from));
                args.extend(quoted.next().map(String::from));
            }
            assert!(Cli::command_of(&args).is_ok(), "{args:?}");
        }
    }

    #[test]
    fn examples_are_of_the_programs_own_models() {
        let about = About { model: "deepseek-ai/DeepSeek-V2-Lite", embedded: false };
        let short = |command: &str| Cli::command_about(["m", command, "-h"], about).unwrap_err().to_string();
        for command in ["generate", "chat", "batch", "bench", "download", "inspect"] {
            let text = short(command);
            assert!(text.contains("deepseek-ai/DeepSeek-V2-Lite") && !text.contains("Qwen"), "{text}");
        }
        assert!(
            short("generate").contains("m --model deepseek-ai/DeepSeek-V2-Lite --prompt 'First Citizen:'")
        );
        for flag in ["--chat", "--json", "--json-schema"] {
            assert!(short("generate").contains(flag), "{flag}");
        }
    }

    #[test]
    fn the_version_says_what_was_built() {
        let text = Cli::command_of(["m", "--version"]).unwrap_err().to_string();
        assert!(text.starts_with(concat!("m ", env!("CARGO_PKG_VERSION"))), "{text}");
        assert!(text.contains("features: ") && text.contains("runs by default: "), "{text}");
    }
}
