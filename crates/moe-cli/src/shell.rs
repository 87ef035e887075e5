//! What shells and manuals know of the program: scripts that complete its flags, and its man pages. Both are made of
//! clap's definition, so they cannot say anything else than the program does.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;

use crate::cli::{Cli, CompletionsArgs, ManArgs};
use crate::output::print;

/// Prints the script of a shell.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let script = script(args.shell, &program())?;
    print(&script).map(drop)
}

/// Writes a page for the program and for each of its commands.
pub fn man(args: &ManArgs) -> Result<()> {
    write_pages(&program(), &args.dir).with_context(|| format!("cannot write to {}", args.dir.display()))
}

/// The name of this program, which its pages and scripts are about.
pub fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    Path::new(&path).file_stem().map_or_else(|| "moe".into(), |name| name.to_string_lossy().into_owned())
}

fn script(shell: Shell, program: &str) -> Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut as_typed(&Cli::definition(program)), program, &mut script);
    String::from_utf8(script).context("the script is not UTF-8")
}

/// What people type: the commands that are not hidden, and the flags of `generate` without a command too.
fn as_typed(command: &Command) -> Command {
    let flags = command.find_subcommand("generate").into_iter().flat_map(Command::get_arguments);
    Command::new(command.get_name().to_string())
        .version(command.get_version().unwrap_or_default().to_string())
        .args(command.get_arguments().cloned())
        .args(flags.filter(|arg| !arg.is_positional()).cloned())
        .subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

fn write_pages(program: &str, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::definition(program), dir)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_has_a_script_with_commands_and_flags() {
        for shell in Shell::value_variants() {
            let script = script(*shell, "moe").unwrap();
            for word in ["generate", "chat", "batch", "temperature", "completions"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
            assert!(!script.contains("render-chat-templates") && !script.contains("\u{1b}"), "{shell}");
        }
    }

    /// What bash offers for a word behind others.
    fn offered(script: &Path, words: &[&str]) -> String {
        let words = words.join(" ");
        let ask = format!(
            "source {}; COMP_WORDS=({words} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _moe moe '' \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; echo \"${{COMPREPLY[@]}}\"",
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
        fs::write(&file, script(Shell::Bash, "moe").unwrap()).unwrap();
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
        write_pages("moe", &pages).unwrap();
        let page = |name: &str| fs::read_to_string(pages.join(name)).unwrap();
        for section in [".SH NAME", ".SH SYNOPSIS", ".SH SUBCOMMANDS", ".SH EXTRA"] {
            assert!(page("moe.1").contains(section), "{section}");
        }
        for command in ["generate", "chat", "batch", "bench", "parity", "inspect", "download", "completions"]
        {
            let page = page(&format!("moe-{command}.1"));
            assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{command}: {page}");
        }
        assert!(page("moe-chat.1").contains("\\-\\-temperature"));
        assert!(!pages.join("moe-man.1").exists(), "hidden commands have none");
    }
}
