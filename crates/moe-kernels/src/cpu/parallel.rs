//! Splitting work over the threads of an execution context.

use rayon::prelude::*;

use crate::exec::Exec;

/// Work below this many multiply-adds (or values moved) runs on the calling thread: waking a
/// worker costs a few microseconds, in which one core does about this much.
pub(crate) const INLINE_WORK: usize = 1 << 15;

/// Calls `f` for 0..tasks, on the context's threads if `work` is worth it.
pub(crate) fn for_each(ex: &Exec, tasks: usize, work: usize, f: impl Fn(usize) + Sync + Send) {
    if tasks <= 1 || work < INLINE_WORK || ex.num_threads() == 1 {
        (0..tasks).for_each(f);
    } else {
        ex.install(|| (0..tasks).into_par_iter().for_each(f));
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
