//! Puts the command line into the order that clap needs: the subcommand first.
//!
//! Users write `--model X chat` and omit `generate`. clap accepts either flags of the program or a subcommand, so the
//! subcommand is moved to the front, or `generate` is inserted there. A value that begins with a dash is joined to its
//! flag, because clap would otherwise take it for a flag.

use std::ffi::OsString;

use clap::{Arg, Command};

/// The default subcommand.
const DEFAULT: &str = "generate";

/// `args` (the program's name first) with the subcommand as the second argument. The first bare word is the subcommand;
/// if it is none, clap reports that and names the most similar one. Several words in one argument are a prompt.
pub fn arrange(command: &Command, mut args: Vec<OsString>) -> Vec<OsString> {
    subcommand_first(command, &mut args);
    match args.get(1).and_then(|name| command.find_subcommand(&*name.to_string_lossy())) {
        Some(of) => join_values(of, args),
        None => args,
    }
}

fn subcommand_first(command: &Command, args: &mut Vec<OsString>) {
    if let Some(at) = first_word(command, args) {
        let word = args.remove(at);
        args.insert(1, word);
    } else if !args.get(1).is_some_and(|arg| ["-h", "--help", "-V", "--version"].iter().any(|f| arg == f)) {
        args.insert(1.min(args.len()), DEFAULT.into());
    }
}

/// The arguments of a subcommand, with `--flag=- value` for `--flag '- value'`, and llama.cpp's `-hf` as a flag of two
/// dashes.
fn join_values(of: &Command, args: Vec<OsString>) -> Vec<OsString> {
    let mut joined = Vec::with_capacity(args.len());
    let mut rest = args.into_iter().peekable();
    joined.extend(rest.by_ref().take(2));
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy();
        if text == "--" {
            joined.push(arg);
            break;
        }
        let text = if text == "-hf" { "--hf-repo".into() } else { text };
        let named = flag(&text).and_then(|name| of.get_arguments().find(|arg| is_called(arg, name)));
        let value =
            rest.next_if(|next| named.is_some_and(|named| is_value(of, named, &next.to_string_lossy())));
        match (value, named.and_then(Arg::get_long)) {
            (Some(value), Some(long)) => {
                let mut whole = OsString::from(format!("--{long}="));
                whole.push(value);
                joined.push(whole);
            }
            _ if text == "--hf-repo" => joined.push("--hf-repo".into()),
            _ => joined.push(arg),
        }
    }
    joined.extend(rest);
    joined
}

/// Whether the argument after a flag must be joined to it: it begins with a dash, and is not a flag of the subcommand.
fn is_value(of: &Command, named: &Arg, next: &str) -> bool {
    // `--json FILE` of bench and parity, which today write `--json=FILE` like the other commands.
    if named.is_require_equals_set() {
        return named.get_id() == "json"
            && ["bench", "parity"].contains(&of.get_name())
            && !next.starts_with('-');
    }
    let takes_one =
        named.get_action().takes_values() && named.get_num_args().is_none_or(|n| n.min_values() > 0);
    if !takes_one || next.len() < 2 || !next.starts_with('-') {
        return false;
    }
    let is_text = named.get_value_names().into_iter().flatten().any(|name| TEXTS.contains(&name.as_str()));
    let known =
        |name: &str| ["help", "h"].contains(&name) || of.get_arguments().any(|arg| is_called(arg, name));
    match next.strip_prefix("--") {
        Some(long) if long.contains(char::is_whitespace) => true,
        Some(long) => is_text && !known(long.split_once('=').map_or(long, |(name, _)| name)),
        // `-t` and `-t4` are flags, `-time` and `- t` are none.
        None => {
            let letter: String = next.chars().skip(1).take(1).collect();
            !(known(&letter) && next.chars().skip(2).all(|c| c.is_ascii_digit()))
        }
    }
}

/// Names of values that may be any text.
const TEXTS: [&str; 4] = ["TEXT", "REGEX", "SCHEMA|FILE", "JSON"];

/// The index of the first argument that is neither a flag nor a flag's value. After an unknown flag a word may be the
/// flag's value; then only a subcommand counts, and without one clap names the flag.
fn first_word(command: &Command, args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    let mut unknown = false;
    while let Some(arg) = args.get(at).map(|arg| arg.to_string_lossy()) {
        match flag(&arg) {
            _ if arg == "--" => return None,
            None if arg == "-" => at += 1,
            None if arg.contains(char::is_whitespace) => return None,
            None if unknown && command.find_subcommand(&*arg).is_none() => at += 1,
            None => return Some(at),
            Some(name) if takes_next(command, name, args.get(at + 1)) => at += 2,
            Some(_) => {
                unknown |= !is_known(command, &arg);
                at += 1;
            }
        }
    }
    None
}

/// A flag without its dashes.
fn flag(arg: &str) -> Option<&str> {
    arg.strip_prefix("--").or_else(|| arg.strip_prefix('-').filter(|rest| !rest.is_empty()))
}

/// Whether the argument after a flag is its value, according to the subcommands that have a flag of that name.
fn takes_next(command: &Command, name: &str, next: Option<&OsString>) -> bool {
    let Some(next) = next.map(|next| next.to_string_lossy()) else { return false };
    let mut args = command.get_subcommands().flat_map(Command::get_arguments);
    let Some(arg) = args.find(|arg| is_called(arg, name)) else { return false };
    if !arg.get_action().takes_values() || arg.is_require_equals_set() {
        return false;
    }
    // An optional value is present unless a flag or a subcommand follows.
    let optional = arg.get_num_args().is_some_and(|n| n.min_values() == 0);
    !optional || !(next.starts_with('-') || command.find_subcommand(next.as_ref()).is_some())
}

/// Whether some subcommand has the flag, which may be joined with its value (`--model=X`, `-t4`).
fn is_known(command: &Command, arg: &str) -> bool {
    let name = match arg.strip_prefix("--") {
        Some(long) => long.split_once('=').map_or(long, |(name, _)| name),
        None => arg.get(1..2).unwrap_or_default(),
    };
    let mut args = command.get_subcommands().flat_map(Command::get_arguments);
    ["help", "h"].contains(&name) || args.any(|arg| is_called(arg, name))
}

fn is_called(arg: &Arg, name: &str) -> bool {
    let mut letters = name.chars();
    match (letters.next(), letters.next()) {
        (Some(letter), None) => arg.get_short_and_visible_aliases().is_some_and(|s| s.contains(&letter)),
        _ => arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|a| a.contains(&name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    fn arranged(line: &str) -> String {
        let args = std::iter::once("m").chain(line.split_whitespace()).map(OsString::from).collect();
        let args = arrange(&Cli::command(), args);
        args[1..].iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_subcommand_comes_first() {
        assert_eq!(arranged("--model X generate --seed 1"), "generate --model X --seed 1");
        assert_eq!(arranged("--tensor-parallel-size 2 -t 4 chat"), "chat --tensor-parallel-size 2 -t 4");
        assert_eq!(arranged("--stats --model=X batch"), "batch --stats --model=X");
        assert_eq!(arranged("--enable-prefix-caching chat"), "chat --enable-prefix-caching");
        assert_eq!(arranged("--enable-prefix-caching false chat"), "chat --enable-prefix-caching false");
        assert_eq!(arranged("--explain-backends bench"), "bench --explain-backends");
        assert_eq!(arranged("gnerate"), "gnerate");
        assert_eq!(arranged("--seed -1 list"), "list --seed -1");
    }

    /// The flags of vLLM and llama.cpp have other names; clap then says which flag is meant.
    #[test]
    fn behind_an_unknown_flag_a_word_may_be_its_value() {
        assert_eq!(arranged("--top_k 4 --prompt x"), "generate --top_k 4 --prompt x");
        assert_eq!(arranged("--top_k 4 chat"), "chat --top_k 4");
        let parsed = Cli::command_of(["m", "--top_k", "4", "--prompt", "x"]).unwrap_err().to_string();
        assert!(parsed.contains("'--top_k'") && parsed.contains("'--top-k'"), "{parsed}");
    }

    #[test]
    fn values_may_begin_with_a_dash() {
        let arranged = |args: &[&str]| {
            let args = [&["m"], args].concat().into_iter().map(OsString::from).collect();
            let args = arrange(&Cli::command(), args);
            args[1..].iter().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(arranged(&["-p", "- apples"]), ["generate", "--prompt=- apples"]);
        assert_eq!(arranged(&["--stop", "---", "-t", "4"]), ["generate", "--stop=---", "-t", "4"]);
        assert_eq!(arranged(&["--prompt", "--"]), ["generate", "--prompt=--"]);
        assert_eq!(arranged(&["chat", "--system", "--be brief"]), ["chat", "--system=--be brief"]);
        assert_eq!(arranged(&["--guided-regex", "-?[0-9]+"]), ["generate", "--guided-regex=-?[0-9]+"]);
        assert_eq!(arranged(&["--guided-choice", "-1"]), ["generate", "--guided-choice=-1"]);
        assert_eq!(arranged(&["-p", "-time flies"]), ["generate", "--prompt=-time flies"]);
        assert_eq!(
            arranged(&["--prompt", "--stats"]),
            ["generate", "--prompt", "--stats"],
            "it is forgotten"
        );
        assert_eq!(arranged(&["--prompt", "-t4"]), ["generate", "--prompt", "-t4"]);
        assert_eq!(arranged(&["--prompt", "-"]), ["generate", "--prompt", "-"]);
        assert_eq!(arranged(&["-hf", "o/m", "-p", "x"]), ["generate", "--hf-repo", "o/m", "-p", "x"]);
        assert_eq!(arranged(&["--", "- x"]), ["generate", "--", "- x"]);
        assert_eq!(arranged(&["bench", "--json", "f"]), ["bench", "--json=f"]);
        assert_eq!(arranged(&["The sea is"]), ["generate", "The sea is"]);
        assert_eq!(arranged(&["-m", "chat", "The sea"]), ["generate", "-m", "chat", "The sea"]);
    }

    #[test]
    fn without_one_it_is_generate() {
        assert_eq!(arranged(""), "generate");
        assert_eq!(arranged("--prompt chat"), "generate --prompt chat");
        assert_eq!(arranged("-p chat --help"), "generate -p chat --help");
        assert_eq!(arranged("-"), "generate -");
        assert_eq!(arranged("--help"), "--help");
        assert_eq!(arranged("-V"), "-V");
    }
}
