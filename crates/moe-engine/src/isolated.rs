//! Runs work in a separate process, which its input may crash.
//!
//! An input from outside, such as a chat template or a grammar, can need more memory, stack or time than there is.
//! Neither a library nor Rust can recover from a failed allocation or a full stack: both end the process. So another
//! process does the work: this program again, with an argument that names the work. It has limits, and answers one
//! question after the other. If it ends, that question gets an error, and the next question gets a new process.
//!
//! | limit | what ends the process | where |
//! |---|---|---|
//! | the stack | the system | everywhere |
//! | time, [`Task::seconds`] | the process that waits for it | everywhere |
//! | the same time, in case that process has ended | the system | on Linux |
//! | memory, [`Task::memory`] | the system | on Linux; elsewhere there is no limit |

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Context, Result};

/// A kind of work for such a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// The argument with which a program does this work and nothing else.
    pub command: &'static str,
    /// The input of the work for messages, such as "a chat template".
    pub what: &'static str,
    /// Limit of its address space in bytes, on Linux.
    pub memory: u64,
    /// The time limit of one question, and of the start before the first question.
    pub seconds: u32,
}

/// The last byte of an answer that is a result and not an error.
const DONE: u8 = b'+';
const ERROR: u8 = b'-';

/// The answer to a question: a result, or an error of the work itself.
pub(crate) type Answer = Result<Vec<u8>, Vec<u8>>;

/// The working process as its user sees it. It starts when it is first needed.
pub(crate) struct Worker {
    program: PathBuf,
    task: Task,
    /// The data that it reads before the first question.
    first: Vec<u8>,
    patience: Duration,
    process: Mutex<Option<Process>>,
}

impl Worker {
    /// A worker of `program`, which reads `first` when it starts.
    pub fn new(program: PathBuf, task: Task, first: Vec<u8>) -> Self {
        let patience = Duration::from_secs(task.seconds.into());
        Self { program, task, first, patience, process: Mutex::new(None) }
    }

    /// The answer to a question.
    ///
    /// # Errors
    /// Why there is no answer, as a text for the author of the question: the process cannot start, or has ended.
    pub fn ask(&self, question: Vec<u8>) -> Result<Answer, String> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut running) = process.take() {
            let answer = running.ask([&question[..]].into_iter(), self.patience);
            match answer {
                Ok(answer) => {
                    *process = Some(running);
                    return Ok(answer);
                }
                Err(_) if running.ended_after.is_some() => return Err(running.end()),
                // Earlier questions may have left the process too little memory, so a new process tries again.
                Err(_) => drop(running),
            }
        }
        let started = Process::start(&self.program, self.task);
        let mut running = started.map_err(|e| format!("the process for it cannot start: {e}"))?;
        match running.ask([&self.first[..], &question[..]].into_iter(), self.patience) {
            Ok(answer) => {
                *process = Some(running);
                Ok(answer)
            }
            Err(_) => Err(running.end()),
        }
    }
}

/// The path of this program, for running it again. On Linux it stays valid after the file was replaced.
pub fn this_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

struct Process {
    task: Task,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    /// The time limit that ended it, if it was ended.
    ended_after: Option<Duration>,
}

impl Process {
    fn start(program: &Path, task: Task) -> io::Result<Self> {
        let mut command = Command::new(program);
        // It processes untrusted texts and does not need the secret.
        command.env_remove(moe_comm::WORLD_SECRET);
        command.arg(task.command).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C at the terminal must not end it; it ends when its stdin closes.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take();
        Ok(Self { task, child, stdin, stdout, ended_after: None })
    }

    /// Its answer to the last of these frames; an error if it ended instead. It is killed after `patience`.
    fn ask<'a>(&mut self, frames: impl Iterator<Item = &'a [u8]>, patience: Duration) -> io::Result<Answer> {
        let Self { task, child, stdin, stdout, ended_after } = self;
        let (stdin, stdout) = stdin.as_mut().zip(stdout.as_mut()).ok_or(io::ErrorKind::BrokenPipe)?;
        let (answered, waits) = channel::<()>();
        let late = &mut *ended_after;
        let watch = move || {
            if waits.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                // Its end closes the pipes, which ends the exchange.
                *late = child.kill().is_ok().then_some(patience);
            }
        };
        let answer = std::thread::scope(|scope| {
            std::thread::Builder::new().name(task.what.to_string()).spawn_scoped(scope, watch)?;
            let answer = exchange(stdin, stdout, frames);
            drop(answered);
            answer
        });
        // An answer at the last moment is not used, because the process is gone.
        if ended_after.is_some() { Err(io::ErrorKind::TimedOut.into()) } else { answer }
    }

    /// Why it ended, as a text for the author of the question.
    fn end(mut self) -> String {
        self.stdin = None;
        if let Some(time) = self.ended_after {
            return too_long(time);
        }
        let mut words = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            // The beginning of stderr is enough, whatever it contains.
            let _ = stderr.take(1 << 16).read_to_string(&mut words);
        }
        match self.child.wait() {
            _ if words.contains("memory allocation") => {
                format!("it takes more than {} MiB of memory", self.task.memory >> 20)
            }
            _ if words.contains("overflowed its stack") => "it nests too deep: the stack is full".to_string(),
            Ok(status) if is_alarm(status) => too_long(Duration::from_secs(self.task.seconds.into())),
            Ok(status) => format!("the process for it ended ({status}): {}", words.trim()),
            Err(e) => format!("the process for it ended: {e}"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing remains to be sent to it, and an ended process must be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends frames to a worker and reads its answer.
fn exchange<'a>(
    stdin: &mut ChildStdin,
    stdout: &mut ChildStdout,
    mut frames: impl Iterator<Item = &'a [u8]>,
) -> io::Result<Answer> {
    frames.try_for_each(|frame| write_frame(stdin, frame))?;
    let mut answer = read_frame(stdout)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    match answer.pop() {
        Some(DONE) => Ok(Ok(answer)),
        Some(ERROR) => Ok(Err(answer)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn too_long(time: Duration) -> String {
    format!("it takes more than {} s", time.as_secs_f32())
}

/// The side of the working process. `start` turns the first data into the function that answers questions, until stdin
/// ends.
///
/// # Errors
/// The pipes break, or the data is no question.
pub(crate) fn serve<W: FnMut(Vec<u8>) -> Answer>(
    task: Task,
    start: impl FnOnce(Vec<u8>) -> Result<W>,
) -> Result<()> {
    limit_memory(task.memory).context("cannot limit the memory of this process")?;
    // A panic of a library becomes an answer, and nobody reads its message.
    std::panic::set_hook(Box::new(|_| {}));
    let mut input = io::stdin().lock();
    let mut output = io::stdout().lock();
    let Some(first) = read_frame(&mut input)? else { return Ok(()) };
    limit_time(task.seconds);
    let mut work = start(first)?;
    limit_time(0);
    // A library may keep memory after a question. The process ends before too little is left for later questions.
    let most = mapped_bytes().saturating_add(task.memory / 4);
    while let Some(question) = read_frame(&mut input)? {
        limit_time(task.seconds);
        let answer = match work(question) {
            Ok(answer) => [&answer[..], &[DONE]].concat(),
            Err(error) => [&error[..], &[ERROR]].concat(),
        };
        limit_time(0);
        write_frame(&mut output, &answer)?;
        if mapped_bytes() > most {
            break;
        }
    }
    Ok(())
}

/// Writes bytes with their length before them.
fn write_frame(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(&(bytes.len() as u64).to_le_bytes())?;
    out.write_all(bytes)?;
    out.flush()
}

/// The next frame; `None` if the stream has ended.
fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 8];
    match input.read_exact(&mut len) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let len = u64::from_le_bytes(len);
    let mut bytes = Vec::new();
    input.take(len).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 == len).then_some(bytes))
}

/// Makes the system refuse allocations of more than `bytes` beyond what this process has already mapped (with the CUDA
/// libraries that alone is more than a question may use), and write no core files.
#[cfg(target_os = "linux")]
fn limit_memory(bytes: u64) -> io::Result<()> {
    let bytes = bytes.saturating_add(mapped_bytes());
    for (resource, most) in [(libc::RLIMIT_AS, bytes), (libc::RLIMIT_CORE, 0)] {
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

/// Bytes of the address space of this process; 0 if the system does not report them.
#[cfg(target_os = "linux")]
fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|size| size.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Ends this process after `seconds` seconds, unless it is called again; 0 means never. The user of this process has
/// the same limit, but may itself have been killed.
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
fn mapped_bytes() -> u64 {
    0
}

#[cfg(not(target_os = "linux"))]
fn limit_memory(_bytes: u64) -> io::Result<()> {
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

    /// A program that neither reads nor answers and has no limit of its own is killed by its user.
    #[test]
    fn a_worker_that_hangs_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hangs");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 60\n").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let task = Task { command: "work", what: "a test", memory: 1 << 30, seconds: 20 };
        // This is more than a pipe holds, so already the write waits.
        let worker = Worker::new(program, task, vec![b'x'; 1 << 20]);
        let worker = Worker { patience: Duration::from_millis(200), ..worker };
        let start = Instant::now();
        for _ in 0..2 {
            let error = worker.ask(Vec::new()).unwrap_err();
            assert_eq!(error, "it takes more than 0.2 s");
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }
}
