//! A pool whose threads stay awake while a caller runs one op after the other.
//!
//! A decode step on a CPU is a hundred parallel ops of 10 to 100 us with a little serial work between them. A rayon
//! thread that finds no work goes to sleep within that time, and waking it takes about as long as the op. So each of
//! the other threads gets a job that looks for work until the caller has finished or no work has come for a while.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Exec;

/// After this time without work a thread sleeps anyway. The serial work between two ops of a step is shorter.
const PATIENCE: Duration = Duration::from_millis(1);

impl Exec {
    /// [`install`](Self::install) for a call that runs many short ops. The pool's other threads do not sleep during the
    /// call, but yield their processor to any other thread that needs it.
    pub fn install_awake<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        if self.num_threads() == 1 {
            return self.install(f);
        }
        self.install(|| {
            let is_done = &AtomicBool::new(false);
            let caller = rayon::current_thread_index();
            rayon::scope(|scope| {
                // This is also set on unwinding, because the scope waits for its jobs.
                let _done = SetOnDrop(is_done);
                scope.spawn_broadcast(move |_, context| {
                    if Some(context.index()) != caller {
                        stay_awake(is_done);
                    }
                });
                f()
            })
        })
    }
}

/// How often a thread looks for work before it yields its processor to others, which takes as long as a short op.
const LOOKS: u32 = 64;

/// Runs the pool's jobs as they come.
///
/// A thread may start this job while it waits inside a part of an op that it has stolen. The call cannot end before
/// that part has ended, so the job must end by itself when no work comes.
fn stay_awake(is_done: &AtomicBool) {
    let mut last_work = Instant::now();
    let mut looks = 0;
    while !is_done.load(Ordering::Acquire) {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            (last_work, looks) = (Instant::now(), 0);
        } else if looks < LOOKS {
            looks += 1;
            std::hint::spin_loop();
        } else if last_work.elapsed() < PATIENCE {
            std::thread::yield_now();
        } else {
            return;
        }
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Result;
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn ops_run_on_all_threads_and_the_call_ends() -> Result<()> {
        let ex = Exec::cpu().with_threads(3)?;
        for _ in 0..100 {
            let sums: Vec<usize> = ex.install_awake(|| {
                (0..20).map(|i| (0..200).into_par_iter().map(|j| i * j).sum::<usize>()).collect()
            });
            assert_eq!(sums, (0..20).map(|i| i * 199 * 100).collect::<Vec<_>>());
        }
        Ok(())
    }

    /// In this case the call waits for work that this thread has begun before.
    #[test]
    fn a_thread_does_not_wait_for_the_end_of_the_call() -> Result<()> {
        let ex = Exec::cpu().with_threads(2)?;
        let never = AtomicBool::new(false);
        ex.install(|| rayon::join(|| stay_awake(&never), || stay_awake(&never)));
        Ok(())
    }

    #[test]
    fn a_panic_comes_through() -> Result<()> {
        let ex = Exec::cpu().with_threads(2)?;
        let call = || ex.install_awake(|| -> u32 { panic!("a fault") });
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        assert!(caught.is_err());
        assert_eq!(ex.install_awake(|| 7), 7);
        Ok(())
    }

    /// Several callers run steps on one pool, one inside the other, and each call ends.
    #[test]
    fn callers_may_share_a_pool() -> Result<()> {
        let ex = Exec::cpu().with_threads(2)?;
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..50 {
                        let sum: usize = ex.install_awake(|| (0..1000usize).into_par_iter().sum());
                        assert_eq!(sum, 499_500);
                    }
                });
            }
        });
        Ok(())
    }
}
