//! Running a function on every rank of a world, each on a thread of its own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use candle_core::{Error, Result, bail};

use crate::error::plain;
use crate::supervised::{Supervised, Supervisor};
use crate::thread::ThreadComm;

/// Runs `f(rank, communicator)` on a thread per rank of a new world and returns every rank's
/// result, in rank order.
///
/// A rank that panics has an error with its message. It, and a rank that returns an error, fails
/// the world, so that ranks that wait for it return soon, with an error that names it. This
/// function returns when every rank has; a rank that computes forever cannot be stopped.
///
/// ```
/// use moe_comm::{Collectives, Communicator, Exec, ReduceOp, ViewMut, run_ranks};
/// let sums = run_ranks(4, |rank, comm| {
///     let mut x = [rank as f32, 1.];
///     comm.all_reduce(ViewMut::new(&mut x, &[2])?, ReduceOp::Sum, &mut Exec::cpu())?;
///     Ok(x)
/// });
/// assert!(sums.into_iter().all(|x| x.is_ok_and(|x| x == [6., 4.])));
/// ```
pub fn run_ranks<R, F>(n: usize, f: F) -> Vec<Result<R>>
where
    R: Send,
    F: Fn(usize, ThreadComm) -> Result<R> + Sync,
{
    run_ranks_with(ThreadComm::world(n), f)
}

/// Like [`run_ranks`], on communicators made before, as by
/// [`ThreadComm::world_with_timeout`], or any other set of ranks that know each other.
pub fn run_ranks_with<C, R, F>(comms: Vec<C>, f: F) -> Vec<Result<R>>
where
    C: Supervised,
    R: Send,
    F: Fn(usize, C) -> Result<R> + Sync,
{
    let f = &f;
    thread::scope(|scope| {
        let start = |mut comm: C| {
            let rank = comm.rank();
            let supervisor = comm.supervise();
            let thread = thread::Builder::new().name(format!("rank-{rank}"));
            (rank, thread.spawn_scoped(scope, move || supervised(comm, supervisor, f)))
        };
        let handles: Vec<_> = comms.into_iter().map(start).collect();
        let join = |(rank, handle): (usize, std::io::Result<thread::ScopedJoinHandle<Result<R>>>)| {
            let handle = handle.map_err(|e| Error::msg(format!("rank {rank} could not start: {e}")))?;
            handle.join().unwrap_or_else(|panic| bail!("rank {rank} panicked: {}", message(&*panic)))
        };
        handles.into_iter().map(join).collect()
    })
}

/// Runs one rank and tells the world how it failed. A rank whose thread cannot start drops its
/// communicator, which the others notice.
fn supervised<C: Supervised, R>(
    comm: C,
    Supervisor { name, fail }: Supervisor,
    f: impl Fn(usize, C) -> Result<R>,
) -> Result<R> {
    let rank = comm.rank();
    // What a panic leaves half-done is dropped with the rank; the others see only the failed world.
    match catch_unwind(AssertUnwindSafe(|| f(rank, comm))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => {
            fail(format!("{name} failed: {}", plain(&e)));
            Err(e)
        }
        Err(panic) => {
            let cause = format!("{name} panicked: {}", message(&*panic));
            fail(cause.clone());
            Err(Error::msg(cause))
        }
    }
}

/// The text of a panic, where it has one.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
