//! Splitting work over the threads of an execution context.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::exec::Exec;

/// Work below this many multiply-adds (or values moved) runs on the calling thread: waking a
/// worker costs a few microseconds, in which one core does about this much.
pub(crate) const INLINE_WORK: usize = 1 << 15;

/// Calls `f` for 0..tasks, on the context's threads if `work` is worth it.
///
/// A thread takes half of its share of what is left at a time, so that neighbours mostly stay together and all threads end
/// within a task of each other: a product of a decode step takes 10 to 40 us, of which halves that are split in advance
/// leave a tenth to one thread alone.
pub(crate) fn for_each(ex: &Exec, tasks: usize, work: usize, f: impl Fn(usize) + Sync + Send) {
    let threads = ex.num_threads();
    if tasks <= 1 || work < INLINE_WORK || threads == 1 {
        (0..tasks).for_each(f);
    } else {
        let next = AtomicUsize::new(0);
        let take_all = || {
            while let Some(range) = take(&next, tasks, threads) {
                range.for_each(&f);
            }
        };
        ex.install(|| on_all(threads.min(tasks), &take_all));
    }
}

/// The next tasks of `tasks`, if some are left.
fn take(next: &AtomicUsize, tasks: usize, threads: usize) -> Option<Range<usize>> {
    let mut first = next.load(Ordering::Relaxed);
    while first < tasks {
        let end = first + ((tasks - first) / (2 * threads)).max(1);
        match next.compare_exchange_weak(first, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some(first..end),
            Err(now) => first = now,
        }
    }
    None
}

/// Calls `f` so many times, on as many threads of the pool as are free.
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

    /// Whatever the number of tasks and threads.
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

    /// Half of a thread's share at a time, and single tasks at the end.
    #[test]
    fn parts_get_smaller() {
        let next = AtomicUsize::new(0);
        let parts: Vec<usize> = std::iter::from_fn(|| take(&next, 20, 2)).map(|part| part.len()).collect();
        assert_eq!(parts, [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]);
    }
}
