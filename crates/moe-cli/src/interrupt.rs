//! Ctrl-C and the signals that end a program: the first one requests a stop, the next one ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use moe_engine::parallel::started_by_rank_0;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Ignores Ctrl-C on this rank, because rank 0 handles it and ends this rank. The first SIGTERM is also left to rank 0,
/// and the next one ends this process. If rank 0 is at another terminal, and so may not have received the signal, both
/// signals end this process after 10 s, and at once when they come again.
pub fn leave_to_rank_0() -> Result<()> {
    let asked = Arc::new(AtomicBool::new(false));
    if !started_by_rank_0() {
        end_at_the_next(&[SIGINT, SIGTERM], &asked)?;
        catch(&[SIGINT, SIGTERM], &asked)?;
        catch(ends_of_terminal(), &asked)?;
        return end_later();
    }
    end_at_the_next(&[SIGTERM], &asked)?;
    catch(&[SIGTERM], &asked)?;
    let left_to_another = Arc::new(AtomicBool::new(false));
    catch(&[SIGINT], &left_to_another)?;
    catch(ends_of_terminal(), &left_to_another)
}

/// Whether Ctrl-C was pressed, or another signal requested a stop, for a program that has installed this.
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    /// Whether there is no run yet that could stop by itself.
    waits: Arc<AtomicBool>,
}

impl Interrupt {
    /// The exit code that a shell uses for a program that Ctrl-C ended.
    pub const EXIT_CODE: u8 = 130;

    /// Catches Ctrl-C, SIGTERM and (unless `nohup` disabled it) SIGHUP from now on. Until the run
    /// [begins](Self::begin_run) the first of them ends the program, because ranks may be missing and loading weights
    /// takes long.
    pub fn install() -> Result<Self> {
        let requested = Arc::new(AtomicBool::new(false));
        let waits = Arc::new(AtomicBool::new(true));
        end_at_the_next(&[SIGINT, SIGTERM], &waits)?;
        end_at_the_next(ends_of_terminal(), &waits)?;
        // A shell and the terminal may both send SIGHUP when the terminal closes, so two of it count as one.
        end_at_the_next(&[SIGINT, SIGTERM], &requested)?;
        catch(&[SIGINT, SIGTERM], &requested)?;
        catch(ends_of_terminal(), &requested)?;
        Ok(Self { requested, waits })
    }

    /// From now on the first signal only requests that the run stops. If that takes longer than 10 s, the program ends.
    pub fn begin_run(&self) -> Result<()> {
        end_later()?;
        self.waits.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Catches Ctrl-C from now on, for a program that continues after it. SIGTERM and SIGHUP end the program after the
    /// terminal's mode was restored.
    pub fn of_conversation() -> Result<Self> {
        let requested = Arc::new(AtomicBool::new(false));
        end_at_the_next(&[SIGINT], &requested)?;
        catch(&[SIGINT], &requested)?;
        #[cfg(unix)]
        unix::end_with_terminal_restored()?;
        Ok(Self { requested, waits: Arc::default() })
    }

    /// Whether a stop was requested.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Whether a stop was requested; also resets it.
    pub fn take(&self) -> bool {
        self.requested.swap(false, Ordering::Relaxed)
    }
}

/// Sets the flag when one of the signals arrives.
fn catch(signals: &[i32], flag: &Arc<AtomicBool>) -> Result<()> {
    let catch = |signal: &i32| flag::register(*signal, flag.clone()).map(drop);
    signals.iter().try_for_each(catch).context("cannot catch Ctrl-C")
}

/// Ends the process when one of the signals arrives and the flag is already set.
fn end_at_the_next(signals: &[i32], flag: &Arc<AtomicBool>) -> Result<()> {
    let code = i32::from(Interrupt::EXIT_CODE);
    let end = |signal: &i32| flag::register_conditional_shutdown(*signal, code, flag.clone()).map(drop);
    signals.iter().try_for_each(end).context("cannot catch Ctrl-C")
}

/// Ends the process some time after a stop was requested, if it has not ended by then, because a rank for which it
/// waits may hang.
fn end_later() -> Result<()> {
    #[cfg(unix)]
    unix::end_later()?;
    Ok(())
}

/// The signals for a closed terminal; none if `nohup` disabled them.
fn ends_of_terminal() -> &'static [i32] {
    #[cfg(unix)]
    return unix::ends_of_terminal();
    #[cfg(not(unix))]
    &[]
}

#[cfg(unix)]
mod unix {
    use std::io;
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::time::Duration;

    use anyhow::{Context, Result};
    use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    use super::Interrupt;

    pub fn ends_of_terminal() -> &'static [i32] {
        if is_ignored(SIGHUP) { &[] } else { &[SIGHUP] }
    }

    fn is_ignored(signal: i32) -> bool {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: no new action is set, so the call only writes the current one into our memory, for which zeros are
        // valid.
        let present = unsafe {
            libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        present.sa_sigaction == libc::SIG_IGN
    }

    /// The time limit for a run to stop. A step takes seconds at most, unless a rank hangs.
    const PATIENCE: Duration = Duration::from_secs(10);

    pub fn end_later() -> Result<()> {
        let signals = [&[SIGINT, SIGTERM][..], ends_of_terminal()].concat();
        let mut signals = Signals::new(signals).context("cannot catch Ctrl-C")?;
        let end = move || {
            if signals.forever().next().is_some() {
                std::thread::sleep(PATIENCE);
                moe_engine::end_failed(Interrupt::EXIT_CODE);
            }
        };
        std::thread::Builder::new().name("interrupt".into()).spawn(end).context("cannot start a thread")?;
        Ok(())
    }

    /// Ends the process at SIGTERM or SIGHUP, and restores the mode of the terminal, which line editing may have
    /// changed.
    pub fn end_with_terminal_restored() -> Result<()> {
        let before = tcgetattr(io::stdin()).ok();
        let signals = [&[SIGTERM][..], ends_of_terminal()].concat();
        let mut signals = Signals::new(signals).context("cannot catch SIGTERM")?;
        let end = move || {
            if signals.forever().next().is_some() {
                if let Some(before) = before {
                    // If the terminal is gone, its mode does not matter.
                    let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
                }
                moe_engine::end_failed(Interrupt::EXIT_CODE);
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(end).context("cannot start a thread")?;
        Ok(())
    }
}
