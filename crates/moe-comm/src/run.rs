//! Runs a function on every rank of a world, each on its own thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use candle_core::{Result, bail};

use crate::error::{CommError, plain};
use crate::supervised::{Supervised, Supervisor};
use crate::thread::ThreadComm;

/// Runs `f(rank, communicator)` on a thread per rank of a new world and returns every rank's
/// result, in rank order.
///
/// A rank that panics returns an error with the message of the panic. A panic or an error of one rank fails the world,
/// so that the other ranks stop waiting and return soon, with an error that names that rank. This function returns when
/// every rank has returned; it cannot stop a rank that computes forever.
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

/// Like [`run_ranks`], but on existing communicators, for example from [`ThreadComm::world_with_timeout`].
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
            let handle = handle.map_err(|e| CommError(format!("rank {rank} could not start: {e}")))?;
            handle.join().unwrap_or_else(|panic| bail!("rank {rank} panicked: {}", message(&*panic)))
        };
        handles.into_iter().map(join).collect()
    })
}

/// Runs one rank and reports its failure to the world. If the thread of a rank cannot start, its communicator is
/// dropped, which the other ranks notice.
fn supervised<C: Supervised, R>(
    comm: C,
    Supervisor { name, fail }: Supervisor,
    f: impl Fn(usize, C) -> Result<R>,
) -> Result<R> {
    let rank = comm.rank();
    // Data that a panic leaves inconsistent is dropped with the rank; the other ranks see only the failed world.
    match catch_unwind(AssertUnwindSafe(|| f(rank, comm))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => {
            fail(format!("{name} failed: {}", plain(&e)));
            Err(e)
        }
        Err(panic) => {
            let cause = format!("{name} panicked: {}", message(&*panic));
            fail(cause.clone());
            Err(CommError(cause).into())
        }
    }
}

/// The message of a panic, if there is one.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
