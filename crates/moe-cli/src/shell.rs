//! Scripts that complete the flags of the program in shells, and its man pages. Both are generated from clap's
//! definition, so they always agree with the program.

use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;

use crate::cli::{About, Cli, CompletionsArgs, ManArgs};
use crate::error::usage;
use crate::output::print;

/// Prints the script for a shell.
pub fn completions(args: &CompletionsArgs, about: About) -> Result<()> {
    let script = script(args.shell, &program(), about)?;
    print(&script)?;
    Ok(())
}

/// Writes a page for the program and one for each of its commands.
pub fn man(args: &ManArgs, about: About) -> Result<()> {
    let cannot = |e: io::Error| usage(format!("cannot write to {}: {e}", args.dir.display()));
    write_pages(&program(), &args.dir, about).map_err(cannot)
}

/// The name of this program, for its pages and scripts.
pub fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    Path::new(&path).file_stem().map_or_else(|| "moe".into(), |name| name.to_string_lossy().into_owned())
}

fn script(shell: Shell, program: &str, about: About) -> Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut as_typed(&Cli::definition(program, about)), program, &mut script);
    let script = String::from_utf8(script).context("the script is not UTF-8")?;
    Ok(match shell {
        // clap_complete writes a program's name with a hyphen in two ways, and then completes nothing after a command.
        // This corrects the script.
        Shell::Bash => {
            let [looked_up, set] =
                ["__subcmd__", "__"].map(|joint| program.replace('-', joint) + "__subcmd__");
            script.replace(&looked_up, &set)
        }
        _ => script,
    })
}

/// Returns the definition of what people type: the commands that are not hidden, and also the flags of `generate`
/// without a command.
fn as_typed(command: &Command) -> Command {
    let flags = command.find_subcommand("generate").into_iter().flat_map(Command::get_arguments);
    Command::new(command.get_name().to_string())
        .version(command.get_version().unwrap_or_default().to_string())
        .args(command.get_arguments().cloned())
        .args(flags.filter(|arg| !arg.is_positional()).cloned())
        .subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

fn write_pages(program: &str, dir: &Path, about: About) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    // clap_mangen writes flags that the short help leaves out without their description, so none is left out here.
    let described = |command: Command| command.mut_args(|arg| arg.hide_short_help(false));
    clap_mangen::generate_to(Cli::definition(program, about).mut_subcommands(described), dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_has_a_script_with_commands_and_flags() {
        for shell in Shell::value_variants() {
            let script = script(*shell, "moe", About::default()).unwrap();
            for word in ["generate", "chat", "batch", "temperature", "completions"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
            assert!(!script.contains("render-chat-templates") && !script.contains("\u{1b}"), "{shell}");
        }
    }

    /// Returns the completions of bash for the last of these words.
    fn offered(script: &Path, words: &[&str]) -> String {
        let program = words[0];
        let words = words.join(" ");
        let function = program.replace('-', "__");
        let ask = format!(
            "source {}; COMP_WORDS=({words} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _{function} {program} '' \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; echo \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let output = std::process::Command::new("bash").args(["-c", &ask]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        format!(" {} ", String::from_utf8(output.stdout).unwrap().trim())
    }

    #[cfg(unix)]
    #[test]
    fn bash_reads_its_script_and_offers_what_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("moe.bash");
        for program in ["moe", "model-qwen3moe"] {
            fs::write(&file, script(Shell::Bash, program, About::default()).unwrap()).unwrap();
            assert!(offered(&file, &[program, "batch"]).contains(" --retry-errors "), "{program}");
            assert!(offered(&file, &[program, "chat", "--dtype"]).contains(" bf16 "), "{program}");
        }
        fs::write(&file, script(Shell::Bash, "moe", About::default()).unwrap()).unwrap();
        assert!(std::process::Command::new("bash").arg("-n").arg(&file).status().unwrap().success());
        let top = offered(&file, &["moe"]);
        for word in ["generate", "chat", "batch", "inspect", "--prompt"] {
            assert!(top.contains(&format!(" {word} ")), "{word}: {top}");
        }
        let batch = offered(&file, &["moe", "batch"]);
        assert!(batch.contains(" --retry-errors ") && !batch.contains(" --prompt-file "), "{batch}");
        assert!(offered(&file, &["moe", "chat", "--dtype"]).contains(" bf16 "));
    }

    #[test]
    fn man_pages_have_their_sections() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("new").join("man");
        write_pages("moe", &pages, About::default()).unwrap();
        let page = |name: &str| fs::read_to_string(pages.join(name)).unwrap();
        for section in [".SH NAME", ".SH SYNOPSIS", ".SH SUBCOMMANDS", ".SH EXTRA"] {
            assert!(page("moe.1").contains(section), "{section}");
        }
        for command in ["generate", "chat", "batch", "inspect", "download", "completions"] {
            let page = page(&format!("moe-{command}.1"));
            assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{command}: {page}");
        }
        assert!(page("moe-chat.1").contains("\\-\\-temperature"));
        let batch = page("moe-batch.1");
        for said in ["Keep the k likeliest", "Exit with code 3", "Tokens per KV"] {
            assert!(batch.contains(said), "{said}");
        }
        assert!(!pages.join("moe-man.1").exists(), "hidden commands have none");
    }
}
