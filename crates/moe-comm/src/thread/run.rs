//! Running a function on every rank of a world of threads.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use candle_core::{Error, Result, bail};

use crate::communicator::Communicator;
use crate::thread::comm::{ThreadComm, plain};

/// Runs `f(rank, communicator)` on a thread per rank of a new world and returns every rank's
/// result, in rank order.
///
/// A rank that panics has an error with its message. It, and a rank that returns an error, fails
/// the world, so that ranks that wait for it return soon, with an error that names it. This
/// function returns when every rank has; a rank that computes forever cannot be stopped.
///
/// ```
/// use moe_comm::{Communicator, Exec, ReduceOp, ViewMut, run_ranks};
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

/// Like [`run_ranks`], on communicators made before: those of
/// [`ThreadComm::world_with_timeout`], or any other set of ranks that know each other.
pub fn run_ranks_with<R, F>(comms: Vec<ThreadComm>, f: F) -> Vec<Result<R>>
where
    R: Send,
    F: Fn(usize, ThreadComm) -> Result<R> + Sync,
{
    let f = &f;
    thread::scope(|scope| {
        let start = |comm: ThreadComm| {
            let (rank, world) = (comm.rank(), comm.board.world.clone());
            let thread = thread::Builder::new().name(format!("rank-{rank}"));
            let handle = thread.spawn_scoped(scope, move || supervised(comm, f));
            if let Err(e) = &handle {
                world.fail(format!("rank {rank} could not start: {e}"));
            }
            (rank, handle)
        };
        let handles: Vec<_> = comms.into_iter().map(start).collect();
        let join = |(rank, handle): (usize, std::io::Result<thread::ScopedJoinHandle<Result<R>>>)| {
            let handle = handle.map_err(|e| Error::msg(format!("rank {rank} could not start: {e}")))?;
            handle.join().unwrap_or_else(|panic| bail!("rank {rank} panicked: {}", message(&*panic)))
        };
        handles.into_iter().map(join).collect()
    })
}

/// Runs one rank and tells the world how it failed.
fn supervised<R>(mut comm: ThreadComm, f: impl Fn(usize, ThreadComm) -> Result<R>) -> Result<R> {
    let (rank, name) = (comm.rank(), comm.name());
    let world = comm.supervise();
    // What a panic leaves half-done is dropped with the rank; the others see only the failed world.
    match catch_unwind(AssertUnwindSafe(|| f(rank, comm))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => {
            world.fail(format!("{name} failed: {}", plain(&e)));
            Err(e)
        }
        Err(panic) => {
            let cause = format!("{name} panicked: {}", message(&*panic));
            world.fail(cause.clone());
            Err(Error::msg(cause))
        }
    }
}

/// The text of a panic, where it has one.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
