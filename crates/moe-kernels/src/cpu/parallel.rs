//! Splitting work over the threads of an execution context.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::exec::Exec;

/// Work below this many multiply-adds (or values moved) runs on the calling thread: waking a
/// worker costs a few microseconds, in which one core does about this much.
pub(crate) const INLINE_WORK: usize = 1 << 15;

/// Calls `f` for 0..tasks, on the context's threads if `work` is worth it.
///
/// A thread has neighbouring tasks of its own, because the weights of neighbours follow each other in memory, where a
/// task asks for what the next one reads. It takes half of its remaining tasks at a time. A thread that is done takes
/// from the ends of other shares, so that all end within a task of each other: a product of a decode step takes 10 to
/// 40 us.
pub(crate) fn for_each(ex: &Exec, tasks: usize, work: usize, f: impl Fn(usize) + Sync + Send) {
    let threads = ex.num_threads().min(tasks);
    let Some(count) = u32::try_from(tasks).ok().filter(|_| threads > 1 && work >= INLINE_WORK) else {
        return (0..tasks).for_each(f);
    };
    let shares: Vec<Share> = (0..threads).map(|i| Share::new(count, i as u32, threads as u32)).collect();
    let arrived = AtomicUsize::new(0);
    let take_all = || {
        let own = arrived.fetch_add(1, Ordering::Relaxed);
        for i in 0..threads {
            while let Some(range) = shares[(own + i) % threads].take(i == 0) {
                range.for_each(|task| f(task as usize));
            }
        }
    };
    ex.install(|| on_all(threads, &take_all));
}

/// The remaining tasks of a thread's share: first << 32 | end. Each share has its own pair of cache lines, because
/// processors fetch two lines together.
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    /// Share `i` of `of`.
    fn new(tasks: u32, i: u32, of: u32) -> Self {
        let bound = |i: u32| u64::from(tasks) * u64::from(i) / u64::from(of);
        Self(AtomicU64::new(bound(i) << 32 | bound(i + 1)))
    }

    /// Half of what is left, from its front for the owner, from its end for others.
    fn take(&self, is_owner: bool) -> Option<Range<u32>> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let first = (now >> 32) as u32;
            let end = now as u32;
            if first >= end {
                return None;
            }
            let half = ((end - first) / 2).max(1);
            let (taken, left) = match is_owner {
                true => (first..first + half, first + half..end),
                false => (end - half..end, first..end - half),
            };
            let left = u64::from(left.start) << 32 | u64::from(left.end);
            match self.0.compare_exchange_weak(now, left, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken),
                Err(other) => now = other,
            }
        }
    }
}

/// Calls `f` `threads` times, on as many threads of the pool as are free.
fn on_all(threads: usize, f: &(impl Fn() + Sync)) {
    match threads {
        0 | 1 => f(),
        _ => {
            rayon::join(|| on_all(threads / 2, f), || on_all(threads - threads / 2, f));
        }
    }
}

/// Calls `f` for each item, on the context's threads if `work` is worth it.
pub(crate) fn for_each_item<I: Send>(ex: &Exec, items: Vec<I>, work: usize, f: impl Fn(I) + Sync + Send) {
    if items.len() <= 1 || work < INLINE_WORK || ex.num_threads() == 1 {
        items.into_iter().for_each(f);
    } else {
        ex.install(|| items.into_par_iter().for_each(f));
    }
}

/// Values per task of a row-wise op, a multiple of `width`: a few tasks per thread; `None` if
/// there is nothing to do.
pub(crate) fn rows_per_task(ex: &Exec, values: usize, width: usize) -> Option<usize> {
    let rows = values.checked_div(width)?;
    (values > 0).then(|| (rows / (4 * ex.num_threads())).max(1) * width)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Each task runs once for any number of tasks and threads.
    #[test]
    fn each_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let ex = Exec::cpu().with_threads(threads).unwrap();
            for tasks in [0, 1, 2, 7, 48, 1000] {
                let runs: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                for_each(&ex, tasks, INLINE_WORK, |task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1), "{tasks} on {threads}");
            }
        }
    }

    /// Half at a time from both ends, and single tasks at the last.
    #[test]
    fn parts_get_smaller() {
        let share = Share::new(20, 1, 2);
        let taken: Vec<_> = [true, false, true, false, true, true].map(|own| share.take(own)).into();
        assert_eq!(taken, [Some(10..15), Some(18..20), Some(15..16), Some(17..18), Some(16..17), None]);
        assert_eq!(
            (0..3).map(|i| Share::new(10, i, 3).take(true)).collect::<Vec<_>>(),
            [Some(0..1), Some(3..4), Some(6..8)]
        );
    }
}
