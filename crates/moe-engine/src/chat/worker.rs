//! Rendering in a process of its own, which a template may take down.
//!
//! A template can ask for more memory, stack or time than there is: a text doubled forty times, a
//! list nested a million deep. Neither the template engine nor Rust can take a refused allocation
//! or a full stack back; both end the process. So it is another process, this program again with
//! the argument [`RENDER_COMMAND`], that has limits and renders one conversation after the other.
//! If it ends, that conversation gets an error, and the next one a new process.
//!
//! | limit | who ends the process | where |
//! |---|---|---|
//! | the stack | the system | everywhere |
//! | time, `SECONDS` | the process that waits for it | everywhere |
//! | the same, should that one have ended | the system | on Linux |
//! | memory, `MEMORY` | the system | on Linux; elsewhere there is no limit |

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

use super::checkpoint::ChatFiles;
use super::error::ChatError;
use super::template::ChatTemplate;
use super::{ChatRequest, engine};

/// The argument with which a program serves as a worker: it then does nothing but call [`serve`].
pub const RENDER_COMMAND: &str = "render-chat-templates";

/// Bytes of address space of a worker on Linux: 64 MiB of conversation, some copies of it, and the stack.
const MEMORY: u64 = 1 << 30;

/// The time of one rendering.
const SECONDS: u32 = 20;

/// What the last byte of an answer says of the others.
const PROMPT: u8 = b'+';
const ERROR: u8 = b'-';

/// Templates that a process of their own renders. It starts when it is first needed.
pub(super) struct Worker {
    program: PathBuf,
    files: ChatFiles,
    /// The time of one conversation, and of the start before the first one.
    patience: Duration,
    process: Mutex<Option<Process>>,
}

impl Worker {
    pub(super) fn new(program: PathBuf, files: ChatFiles) -> Self {
        Self { program, files, patience: Duration::from_secs(SECONDS.into()), process: Mutex::new(None) }
    }

    /// The prompt of a conversation; without one, whether the default template compiles.
    pub(super) fn render(&self, chat: Option<&ChatRequest>) -> Result<String, ChatError> {
        let mut frames = vec![json(&chat)?];
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = match process.take() {
            Some(running) => running,
            None => {
                frames.insert(0, json(&self.files)?);
                let started = Process::start(&self.program);
                started.map_err(|e| limit(format!("the process that renders it cannot start: {e}")))?
            }
        };
        match running.ask(&frames, self.patience) {
            Ok(answer) => {
                *process = Some(running);
                answer
            }
            Err(_) => Err(limit(running.end())),
        }
    }
}

/// This program, as [`ChatTemplate::isolated`] runs it again. On Linux also after its file was replaced.
pub fn this_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// A worker, as its user sees it.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    /// The time after which it was ended, if it was.
    ended_after: Option<Duration>,
}

impl Process {
    fn start(program: &Path) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(RENDER_COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C at the terminal is not meant for it; it ends when its stdin does.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        Ok(Self { child, stdin, stdout, ended_after: None })
    }

    /// What it answers to the last of these frames; an error if it ended instead. It is ended after `patience`.
    fn ask(&mut self, frames: &[Vec<u8>], patience: Duration) -> io::Result<Result<String, ChatError>> {
        let Self { child, stdin, stdout, ended_after } = self;
        let (stdin, stdout) = stdin.as_mut().zip(stdout.as_mut()).ok_or(io::ErrorKind::BrokenPipe)?;
        let (answered, waits) = channel::<()>();
        let late = &mut *ended_after;
        let watch = move || {
            if waits.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                // Its end closes the pipes, and so ends the exchange.
                *late = child.kill().is_ok().then_some(patience);
            }
        };
        let answer = std::thread::scope(|scope| {
            std::thread::Builder::new().name("chat template".to_string()).spawn_scoped(scope, watch)?;
            let answer = exchange(stdin, stdout, frames);
            drop(answered);
            answer
        });
        // An answer in the last moment is of no use: the process is gone.
        if ended_after.is_some() { Err(io::ErrorKind::TimedOut.into()) } else { answer }
    }

    /// Why it ended, in words for the template's author.
    fn end(mut self) -> String {
        self.stdin = None;
        if let Some(time) = self.ended_after {
            return too_long(time);
        }
        let mut words = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            // Whatever it is, the beginning tells.
            let _ = stderr.take(1 << 16).read_to_string(&mut words);
        }
        match self.child.wait() {
            _ if words.contains("memory allocation") => {
                format!("it takes more than {} MiB of memory", MEMORY >> 20)
            }
            _ if words.contains("overflowed its stack") => "it nests too deep: the stack is full".to_string(),
            Ok(status) if is_alarm(status) => too_long(Duration::from_secs(SECONDS.into())),
            Ok(status) => format!("the process that renders it ended ({status}): {}", words.trim()),
            Err(e) => format!("the process that renders it ended: {e}"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing is left to be said to it, and an ended one is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends frames to a worker and reads its answer.
fn exchange(
    stdin: &mut ChildStdin,
    stdout: &mut ChildStdout,
    frames: &[Vec<u8>],
) -> io::Result<Result<String, ChatError>> {
    frames.iter().try_for_each(|frame| write_frame(stdin, frame))?;
    let mut answer = read_frame(stdout)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    match answer.pop() {
        Some(PROMPT) => Ok(Ok(String::from_utf8(answer).map_err(io::Error::other)?)),
        Some(ERROR) => Ok(Err(serde_json::from_slice(&answer)?)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn too_long(time: Duration) -> String {
    format!("it takes more than {} s", time.as_secs_f32())
}

/// The worker's side: reads the files, then answers questions until stdin ends.
///
/// # Errors
/// The pipes break, or what comes is no question.
pub fn serve() -> Result<()> {
    limit_memory().context("cannot limit the memory of the process that renders chat templates")?;
    // A panic of the template engine is an answer; nobody reads its message.
    std::panic::set_hook(Box::new(|_| {}));
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let Some(files) = read_frame(&mut input)? else { return Ok(()) };
    limit_time(SECONDS);
    let template = ChatTemplate::new(serde_json::from_slice(&files)?, engine::local_time)?;
    let template = template.context("there is no template")?;
    limit_time(0);
    while let Some(question) = read_frame(&mut input)? {
        limit_time(SECONDS);
        let answer = match answer(&template, question) {
            Ok(prompt) => [prompt.as_bytes(), &[PROMPT]].concat(),
            Err(e) => [&json(&e)?[..], &[ERROR]].concat(),
        };
        limit_time(0);
        write_frame(&mut output, &answer)?;
    }
    Ok(())
}

fn answer(template: &ChatTemplate, question: Vec<u8>) -> Result<String, ChatError> {
    let chat: Option<ChatRequest> = serde_json::from_slice(&question)
        .map_err(|e| ChatError::Request(format!("the conversation: {e}")))?;
    drop(question);
    match chat {
        Some(chat) => template.render(&chat),
        None => template.check().map(|()| String::new()),
    }
}

fn limit(message: String) -> ChatError {
    ChatError::Limit { template: "default".to_string(), message }
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, ChatError> {
    serde_json::to_vec(value).map_err(|e| ChatError::Request(e.to_string()))
}

/// Bytes with their number in front.
fn write_frame(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(&(bytes.len() as u64).to_le_bytes())?;
    out.write_all(bytes)?;
    out.flush()
}

/// The next frame; `None` where the stream ends.
fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 8];
    match input.read_exact(&mut len) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let (len, mut bytes) = (u64::from_le_bytes(len), Vec::new());
    input.take(len).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 == len).then_some(bytes))
}

/// Makes the system refuse more memory than [`MEMORY`], and leave no core files.
#[cfg(target_os = "linux")]
fn limit_memory() -> io::Result<()> {
    for (resource, most) in [(libc::RLIMIT_AS, MEMORY), (libc::RLIMIT_CORE, 0)] {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: both calls use the struct while they run.
        let done = unsafe {
            libc::getrlimit(resource, &mut limit) == 0 && {
                limit.rlim_cur = most.min(limit.rlim_max);
                libc::setrlimit(resource, &limit) == 0
            }
        };
        if !done {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Ends this process after so many seconds, unless it is called again; 0 is never. The user of this process does the same, but
/// may itself have been killed.
#[cfg(target_os = "linux")]
fn limit_time(seconds: u32) {
    // SAFETY: sets a timer of this process and touches no memory.
    unsafe { libc::alarm(seconds) };
}

#[cfg(target_os = "linux")]
fn is_alarm(status: ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGALRM)
}

#[cfg(not(target_os = "linux"))]
fn limit_memory() -> io::Result<()> {
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn limit_time(_seconds: u32) {}

#[cfg(not(target_os = "linux"))]
fn is_alarm(_status: ExitStatus) -> bool {
    false
}

#[cfg(all(test, unix))]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A program that neither reads nor answers and has no limit of its own is ended by its user.
    #[test]
    fn a_worker_that_hangs_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hangs");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 60\n").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        // More than a pipe holds: already writing it waits.
        let config = serde_json::json!({"chat_template": "x".repeat(1 << 20)}).to_string();
        let files = ChatFiles::from_tokenizer_config(config.as_bytes()).unwrap();
        let worker = Worker { patience: Duration::from_millis(200), ..Worker::new(program, files) };
        let start = Instant::now();
        for _ in 0..2 {
            let error = worker.render(None).unwrap_err();
            assert!(error.to_string().ends_with("it takes more than 0.2 s"), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }
}
