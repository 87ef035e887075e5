//! The log on stderr or in a file, and the profile.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;

use anyhow::Result;
use moe_engine::terminal::{Stderr, note};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, FilterFn, LevelFilter, filter_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::cli::RunArgs;
use crate::error::usage;
use crate::profile::{self, Profile};
use crate::setting_names::InFlags;

/// The log filter if neither `--log` nor `RUST_LOG` is given.
const DEFAULT: &str = "info";

/// Starts the log and, if `profile` is given, the profile. `default` is the filter if none is given.
pub fn start(args: &RunArgs, default: &str) -> Result<Option<Profile>> {
    let filter = filter(args.log.as_deref(), std::env::var("RUST_LOG").ok().as_deref(), default)?;
    let profile = args.profile.as_deref().map(Profile::create).transpose()?;
    let (writer, colours) = match &args.log_file {
        Some(path) => {
            let file = File::create(path)
                .map_err(|e| usage(format!("--log-file {}: cannot write it: {e}", path.display())))?;
            let file = LogFile { name: path.display().to_string(), file, failed: false };
            (BoxMakeWriter::new(Mutex::new(InFlags(file))), false)
        }
        None => (BoxMakeWriter::new(|| InFlags(Stderr)), std::io::stderr().is_terminal() && colours()),
    };
    let log = fmt::layer().without_time().with_target(false).with_ansi(colours).with_writer(writer);
    // The log's level does not apply to the profile, which needs every span and no message.
    let spans = profile.as_ref().map(|p| p.layer().with_filter(filter_fn(profile::wants)));
    // A second call in one process (in tests) keeps the first log.
    let log = log.with_filter(filter.and(without_secrets()));
    let _ = tracing_subscriber::registry().with(log).with(spans).try_init();
    Ok(profile)
}

/// A log in a file or another place that its path names. Messages that cannot be written are lost, which is reported
/// once.
struct LogFile<W> {
    name: String,
    file: W,
    failed: bool,
}

impl<W: Write> Write for LogFile<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(e) = self.file.write_all(bytes)
            && !std::mem::replace(&mut self.failed, true)
        {
            note(format_args!("warning: cannot write the log {}: {e}; lines of it are lost", self.name));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Like `start`, on a rank that is not the driver. It logs little, because the driver reports for all ranks, unless a
/// filter is given; and it writes neither file.
pub fn start_follower(args: &RunArgs) -> Result<()> {
    let log = args.log.clone().filter(|log| log != DEFAULT);
    start(&RunArgs { profile: None, log_file: None, log, ..args.clone() }, "error").map(drop)
}

/// Like `start`, on the process that the user started.
pub fn start_driver(args: &RunArgs) -> Result<Option<Profile>> {
    start(args, if args.quiet { "error" } else { DEFAULT })
}

/// The log of a command that runs no model: messages on stderr, by `RUST_LOG`.
pub fn start_plain() -> Result<()> {
    let filter = filter(None, std::env::var("RUST_LOG").ok().as_deref(), DEFAULT)?;
    let is_coloured = std::io::stderr().is_terminal() && colours();
    let log = fmt::layer().without_time().with_target(false).with_ansi(is_coloured);
    let log = log.with_writer(|| InFlags(Stderr)).with_filter(filter.and(without_secrets()));
    // A second call in one process (in tests) keeps the first log.
    let _ = tracing_subscriber::registry().with(log).try_init();
    Ok(())
}

/// A second filter keeps the level of the first one only if it states the highest level that it lets through.
fn without_secrets() -> FilterFn {
    filter_fn(holds_no_secret as fn(&Metadata<'_>) -> bool).with_max_level_hint(LevelFilter::TRACE)
}

/// At the level trace the HTTP client logs everything that it sends, byte by byte, including the hub's token and signed
/// addresses. So its messages are left out at any level but warnings, which contain none of it.
fn holds_no_secret(message: &Metadata<'_>) -> bool {
    let of = |program: &str| message.target().split("::").next() == Some(program);
    *message.level() <= Level::WARN || !["ureq", "ureq_proto", "rustls", "rustls_webpki"].into_iter().any(of)
}

/// Whether to use colours: not if the user or the terminal wants none (no-color.org).
pub fn colours() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !no_color && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The filter of `--log`, else of `RUST_LOG`, else `default`.
fn filter(flag: Option<&str>, variable: Option<&str>, default: &str) -> Result<EnvFilter> {
    let (source, text) = match (flag, variable) {
        (Some(text), _) => ("--log", text),
        (None, Some(text)) if !text.is_empty() => ("RUST_LOG", text),
        (None, _) => ("--log", default),
    };
    let wrong = |why: String| {
        usage(format!(
            "{source} {text}: {why}; expected a level (error, warn, info, debug, trace, off), or target=level"
        ))
    };
    // clap would accept a misspelt level as a target, and everything else would be silent.
    if let Some(word) = text.split(',').map(str::trim).find(|word| !is_directive(word)) {
        return Err(wrong(format!("{word:?} is no level")));
    }
    EnvFilter::try_new(text).map_err(|e| wrong(e.to_string()))
}

fn is_directive(word: &str) -> bool {
    !word.is_empty() && (word.contains(['=', '[']) || word.parse::<LevelFilter>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_written_ends_nothing() {
        let mut nowhere: [u8; 0] = [];
        let mut log = LogFile { name: "log".into(), file: &mut nowhere[..], failed: false };
        assert_eq!((log.write(b"line").unwrap(), log.failed), (4, true));
        let mut log = LogFile { name: "log".into(), file: Vec::new(), failed: false };
        log.write_all(b"line").unwrap();
        assert_eq!((log.file.as_slice(), log.failed), (&b"line"[..], false));
    }

    #[test]
    fn the_flag_wins_over_the_variable() {
        assert_eq!(filter(Some("warn"), Some("debug"), "info").unwrap().to_string(), "warn");
        assert_eq!(filter(None, Some("debug"), "info").unwrap().to_string(), "debug");
        assert_eq!(filter(None, Some(""), "info").unwrap().to_string(), "info");
        assert_eq!(filter(None, None, "error").unwrap().to_string(), "error");
    }

    #[test]
    fn a_word_that_is_no_level_is_refused() {
        for bad in ["bla", "info,bla", "", "moe_engine=loud"] {
            assert!(filter(Some(bad), None, "info").is_err(), "{bad:?}");
        }
        let e = filter(None, Some("bla"), "info").unwrap_err().to_string();
        assert!(e.contains("RUST_LOG bla") && e.contains("expected a level"), "{e}");
        for good in ["debug", "off", "info,moe_engine=trace", "TRACE"] {
            assert!(filter(Some(good), None, "info").is_ok(), "{good}");
        }
    }
}
