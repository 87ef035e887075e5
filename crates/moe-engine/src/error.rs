//! A wrong call, told apart from a failure: a program exits with another code for it. Also what a panic said, and how a process
//! ends that has failed.

use std::any::Any;
use std::io::Write;

/// A mistake in how a run was asked for: settings that contradict each other, or that this build, this
/// machine or this model cannot meet. Find it in an [`anyhow::Error`] with `downcast_ref`.
#[derive(Debug)]
pub struct UsageError(String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// A [`UsageError`] with this message.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(UsageError(message.into()))
}

/// The text of a panic, where it has one.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Ends this process with `code` after a failure that has been reported, without what libraries registered to be done at
/// its end. Ranks that have lost others leave communicators that cannot be closed, whose threads still run, and what a
/// driver frees at the end of a process is in use by them: it then ended by a segmentation fault (code 139) now and
/// then.
pub fn end_failed(code: u8) -> ! {
    // What cannot be written is nothing that can be reported.
    let _ = std::io::stdout().flush();
    #[cfg(unix)]
    // SAFETY: has no conditions; nothing of this process runs afterwards.
    unsafe {
        libc::_exit(i32::from(code))
    }
    #[cfg(not(unix))]
    std::process::exit(i32::from(code))
}
