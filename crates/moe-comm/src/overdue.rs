//! Finds out whether work on a stream ends in time, with two events.
//!
//! One mark is not enough: work that is put on the stream while the mark waits would have no mark if no call followed.
//! With two marks, the older one waits while the newer one moves along with every call, so that the last work always
//! has a mark. Work that takes longer than the limit is noticed within twice the limit.

use std::time::{Duration, Instant};

use crate::call::Op;

/// The collective that was marked, and when.
type Waiting = (Op, Instant);

/// Two marks on one stream. `E` is an event: it can be put on the stream, and it tells whether the stream has reached
/// it.
pub(crate) struct Marks<E> {
    older: (E, Option<Waiting>),
    newer: (E, Option<Waiting>),
}

impl<E> Marks<E> {
    pub(crate) fn new(a: E, b: E) -> Self {
        Self { older: (a, None), newer: (b, None) }
    }

    /// Marks the work up to now. `put` puts the event on the stream.
    pub(crate) fn add<R>(
        &mut self,
        op: Op,
        now: Instant,
        put: impl FnOnce(&E) -> Result<(), R>,
    ) -> Result<(), R> {
        let mark = if self.older.1.is_none() { &mut self.older } else { &mut self.newer };
        put(&mark.0)?;
        mark.1 = Some((op, now));
        Ok(())
    }

    /// The work that has been on the stream for longer than `limit`, if any. `done` tells whether the stream has
    /// reached an event.
    pub(crate) fn overdue<R>(
        &mut self,
        now: Instant,
        limit: Duration,
        mut done: impl FnMut(&E) -> Result<bool, R>,
    ) -> Result<Option<Op>, R> {
        while let Some((op, since)) = self.older.1 {
            if !done(&self.older.0)? {
                return Ok((now.saturating_duration_since(since) > limit).then_some(op));
            }
            self.older.1 = None;
            std::mem::swap(&mut self.older, &mut self.newer);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// A stream that has finished the first `reached` works that were put on it.
    #[derive(Default)]
    struct Stream {
        put: Cell<usize>,
        reached: Cell<usize>,
    }

    impl Stream {
        fn call(&self, marks: &mut Marks<Cell<usize>>, op: Op, now: Instant) {
            self.put.set(self.put.get() + 1);
            let put = |event: &Cell<usize>| {
                event.set(self.put.get());
                Ok::<_, Infallible>(())
            };
            assert_eq!(marks.add(op, now, put), Ok(()));
        }

        fn overdue(&self, marks: &mut Marks<Cell<usize>>, now: Instant) -> Option<Op> {
            let done = |event: &Cell<usize>| Ok::<_, Infallible>(event.get() <= self.reached.get());
            marks.overdue(now, Duration::from_secs(10), done).unwrap()
        }
    }

    fn setup() -> (Stream, Marks<Cell<usize>>, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |seconds| start + Duration::from_secs(seconds);
        (Stream::default(), Marks::new(Cell::new(0), Cell::new(0)), at)
    }

    #[test]
    fn work_is_late_only_after_the_limit() {
        let (stream, mut marks, at) = setup();
        assert_eq!(stream.overdue(&mut marks, at(100)), None);
        stream.call(&mut marks, Op::Broadcast, at(0));
        assert_eq!(stream.overdue(&mut marks, at(10)), None);
        assert_eq!(stream.overdue(&mut marks, at(11)), Some(Op::Broadcast));
        stream.reached.set(1);
        assert_eq!(stream.overdue(&mut marks, at(99)), None);
    }

    /// The last of many calls has a mark although no call in between asked for one.
    #[test]
    fn the_last_call_is_never_without_a_mark() {
        let (stream, mut marks, at) = setup();
        stream.call(&mut marks, Op::AllReduce, at(0));
        for second in 1..5 {
            stream.call(&mut marks, Op::AllGather, at(second));
        }
        stream.call(&mut marks, Op::Barrier, at(5));
        stream.reached.set(5);
        assert_eq!(stream.overdue(&mut marks, at(12)), None);
        assert_eq!(stream.overdue(&mut marks, at(16)), Some(Op::Barrier));
        stream.reached.set(6);
        assert_eq!(stream.overdue(&mut marks, at(30)), None);
        stream.call(&mut marks, Op::Broadcast, at(30));
        assert_eq!(stream.overdue(&mut marks, at(41)), Some(Op::Broadcast));
    }

    /// A stream that makes progress is never late, however long it is in use.
    #[test]
    fn steady_progress_is_not_late() {
        let (stream, mut marks, at) = setup();
        for second in 0..1000 {
            stream.call(&mut marks, Op::AllReduce, at(second));
            stream.reached.set((second as usize).saturating_sub(3));
            assert_eq!(stream.overdue(&mut marks, at(second)), None, "second {second}");
        }
    }
}
