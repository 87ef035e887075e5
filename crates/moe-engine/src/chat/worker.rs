//! Rendering in a process of its own, which a template may take down.
//!
//! A template can ask for more memory, stack or time than there is: a text doubled forty times, a
//! list nested a million deep. Neither the template engine nor Rust can take a refused allocation
//! or a full stack back; both end the process. So it is another process, this program again with
//! the argument [`RENDER_COMMAND`], that has limits and renders one conversation after the other.
//! If it ends, that conversation gets an error, and the next one a new process.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

use super::checkpoint::ChatFiles;
use super::error::ChatError;
use super::template::ChatTemplate;
use super::{ChatRequest, engine};

/// The argument with which a program serves as a worker: it then does nothing but call [`serve`].
pub const RENDER_COMMAND: &str = "render-chat-templates";

/// Bytes of address space of a worker: 64 MiB of conversation, some copies of it, and the stack.
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
    process: Mutex<Option<Process>>,
}

impl Worker {
    pub(super) fn new(program: PathBuf, files: ChatFiles) -> Self {
        Self { program, files, process: Mutex::new(None) }
    }

    /// The prompt of a conversation; without one, whether the default template compiles.
    pub(super) fn render(&self, chat: Option<&ChatRequest>) -> Result<String, ChatError> {
        let question = json(&chat)?;
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match process.take() {
            Some(running) => Ok(running),
            None => Process::start(&self.program, &json(&self.files)?),
        };
        let mut running =
            running.map_err(|e| limit(format!("the process that renders it cannot start: {e}")))?;
        match running.ask(&question) {
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
struct Process(Child);

impl Process {
    fn start(program: &Path, files: &[u8]) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(RENDER_COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C at the terminal is not meant for it; it ends when its stdin does.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = Self(command.spawn()?);
        // If it ended already, the first question tells why.
        let _ = process.send(files);
        Ok(process)
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        write_frame(self.0.stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?, bytes)
    }

    /// What it answers; an error if it ended instead.
    fn ask(&mut self, question: &[u8]) -> io::Result<Result<String, ChatError>> {
        self.send(question)?;
        let stdout = self.0.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut answer = read_frame(stdout)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match answer.pop() {
            Some(PROMPT) => Ok(Ok(String::from_utf8(answer).map_err(io::Error::other)?)),
            Some(ERROR) => Ok(Err(serde_json::from_slice(&answer)?)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Why it ended, in words for the template's author.
    fn end(mut self) -> String {
        self.0.stdin = None;
        let mut words = String::new();
        if let Some(stderr) = self.0.stderr.take() {
            // Whatever it is, the beginning tells.
            let _ = stderr.take(1 << 16).read_to_string(&mut words);
        }
        match self.0.wait() {
            _ if words.contains("memory allocation") => {
                format!("it takes more than {} MiB of memory", MEMORY >> 20)
            }
            _ if words.contains("overflowed its stack") => "it nests too deep: the stack is full".to_string(),
            Ok(status) if is_alarm(status) => format!("it takes more than {SECONDS} s"),
            Ok(status) => format!("the process that renders it ended ({status}): {}", words.trim()),
            Err(e) => format!("the process that renders it ended: {e}"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing is left to be said to it, and an ended one is reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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

/// Ends this process after so many seconds, unless it is called again; 0 is never.
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
