//! Ctrl-C and the signals that ask a program to end: the first one asks to stop, the next one ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use moe_engine::parallel::started_by_rank_0;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Leaves Ctrl-C to rank 0, which ends this rank. Of SIGTERM the first is left to it, and the next one ends this process. Where
/// rank 0 is under another terminal, and so may not have been asked, both end this process after 10 s, and at once when they come
/// again.
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

/// Whether Ctrl-C was pressed, or another signal asked to stop, where a program has asked for it.
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    /// Whether nothing runs yet that could stop by itself.
    waits: Arc<AtomicBool>,
}

impl Interrupt {
    /// What a shell calls a program that Ctrl-C ended.
    pub const EXIT_CODE: u8 = 130;

    /// Catches Ctrl-C, SIGTERM and, unless `nohup` set it aside, the end of the terminal from now on. Until the run
    /// [begins](Self::begin_run) the first of them ends the program: ranks may be missing, and weights take long.
    pub fn install() -> Result<Self> {
        let requested = Arc::new(AtomicBool::new(false));
        let waits = Arc::new(AtomicBool::new(true));
        end_at_the_next(&[SIGINT, SIGTERM], &waits)?;
        end_at_the_next(ends_of_terminal(), &waits)?;
        // A shell and the terminal may both tell of the terminal's end, so that two of it are one.
        end_at_the_next(&[SIGINT, SIGTERM], &requested)?;
        catch(&[SIGINT, SIGTERM], &requested)?;
        catch(ends_of_terminal(), &requested)?;
        Ok(Self { requested, waits })
    }

    /// From now on the first signal only asks the run to stop; the program ends by itself if that takes longer than 10 s.
    pub fn begin_run(&self) -> Result<()> {
        end_later()?;
        self.waits.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Catches Ctrl-C from now on, for a program that goes on after it. SIGTERM and the end of the terminal end it, its
    /// terminal as it was before.
    pub fn of_conversation() -> Result<Self> {
        let requested = Arc::new(AtomicBool::new(false));
        end_at_the_next(&[SIGINT], &requested)?;
        catch(&[SIGINT], &requested)?;
        #[cfg(unix)]
        unix::end_with_terminal_restored()?;
        Ok(Self { requested, waits: Arc::default() })
    }

    /// Whether it was asked for.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Whether it was asked for; forgets it.
    pub fn take(&self) -> bool {
        self.requested.swap(false, Ordering::Relaxed)
    }
}

/// Sets the flag at each of the signals.
fn catch(signals: &[i32], flag: &Arc<AtomicBool>) -> Result<()> {
    let catch = |signal: &i32| flag::register(*signal, flag.clone()).map(drop);
    signals.iter().try_for_each(catch).context("cannot catch Ctrl-C")
}

/// Ends the process at each of the signals if the flag is set already.
fn end_at_the_next(signals: &[i32], flag: &Arc<AtomicBool>) -> Result<()> {
    let code = i32::from(Interrupt::EXIT_CODE);
    let end = |signal: &i32| flag::register_conditional_shutdown(*signal, code, flag.clone()).map(drop);
    signals.iter().try_for_each(end).context("cannot catch Ctrl-C")
}

/// Ends the process some time after it was asked to stop, if it has not ended by then: a rank that it waits for may hang.
fn end_later() -> Result<()> {
    #[cfg(unix)]
    unix::end_later()?;
    Ok(())
}

/// The signals that tell that the terminal is gone; none where `nohup` set them aside.
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
        // SAFETY: no action is given, so this only writes the present one into memory of ours, where zeros are one too.
        let present = unsafe {
            libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        present.sa_sigaction == libc::SIG_IGN
    }

    /// How long what runs may take to stop: a step takes seconds at most where no rank hangs.
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

    /// Ends the process at SIGTERM or the end of the terminal, which line editing may have in another mode.
    pub fn end_with_terminal_restored() -> Result<()> {
        let before = tcgetattr(io::stdin()).ok();
        let signals = [&[SIGTERM][..], ends_of_terminal()].concat();
        let mut signals = Signals::new(signals).context("cannot catch SIGTERM")?;
        let end = move || {
            if signals.forever().next().is_some() {
                if let Some(before) = before {
                    // A terminal that is gone needs no mode.
                    let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
                }
                moe_engine::end_failed(Interrupt::EXIT_CODE);
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(end).context("cannot start a thread")?;
        Ok(())
    }
}
