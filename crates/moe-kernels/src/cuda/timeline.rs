//! Measures when a device did its work, on the host's clock.
//!
//! [`Exec::mark`](crate::Exec::mark) puts an event on the stream and costs about a microsecond; nothing waits. The
//! times of marks are read much later, when they are known to have been reached. A mark names the work that follows it,
//! so consecutive marks delimit sections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::cudarc::driver::sys::{CUevent_flags, CUstreamCaptureStatus};

use super::CudaExec;

/// A point on the device's stream.
pub struct Mark {
    /// The work that begins here.
    pub what: &'static str,
    /// Its number among several of the same name.
    pub index: usize,
    event: CudaEvent,
}

/// What the device did between two marks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Section {
    /// The name of the first mark.
    pub what: &'static str,
    /// The index of the first mark.
    pub index: usize,
    /// Microseconds since the timeline's origin.
    pub start_us: f64,
    /// Microseconds.
    pub duration_us: f64,
}

/// Marks of one stream. Cloning shares them.
#[derive(Clone)]
pub struct Timeline(Arc<Mutex<State>>);

struct State {
    cuda: CudaExec,
    origin: Instant,
    /// An event that was reached, and its time. Times are measured from one such event to the next, because the driver
    /// returns them in single precision.
    anchor: (CudaEvent, f64),
    marks: Vec<Mark>,
    /// Events for reuse.
    free: Vec<CudaEvent>,
}

impl Timeline {
    /// Marks on the stream of `cuda`, with times since `origin`. Waits for the stream once.
    pub(crate) fn on(origin: Instant, cuda: CudaExec) -> Result<Self> {
        let event = event(&cuda)?;
        cuda.synchronize()?;
        event.record(&cuda.stream).w()?;
        event.synchronize().w()?;
        let anchor = (event, micros(origin, Instant::now()));
        Ok(Self(Arc::new(Mutex::new(State { cuda, origin, anchor, marks: Vec::new(), free: Vec::new() }))))
    }

    /// Marks the stream, unless its launches are being recorded into a graph.
    pub(crate) fn mark(&self, what: &'static str, index: usize) -> Result<()> {
        let mut state = self.lock();
        let stream = state.cuda.stream.clone();
        if stream.capture_status().w()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        let event = match state.free.pop() {
            Some(event) => event,
            None => event(&state.cuda)?,
        };
        event.record(&stream).w()?;
        state.marks.push(Mark { what, index, event });
        Ok(())
    }

    /// The marks since the last call.
    pub fn take(&self) -> Vec<Mark> {
        std::mem::take(&mut self.lock().marks)
    }

    /// The sections between marks from [`take`](Self::take), in their order; the last mark only ends a section. The
    /// marks were put on the stream after `launched`, and have been reached now. If the device's clock has drifted
    /// beyond one of these limits, it is corrected.
    ///
    /// # Errors
    /// The device fails.
    pub fn sections(&self, marks: Vec<Mark>, launched: Instant) -> Result<Vec<Section>> {
        let (Some(first), Some(last)) = (marks.first(), marks.last()) else { return Ok(Vec::new()) };
        let mut state = self.lock();
        last.event.synchronize().w()?;
        let now = micros(state.origin, Instant::now());
        let start = state.anchor.1 + elapsed(&state.anchor.0, &first.event)?;
        let end = start + elapsed(&first.event, &last.event)?;
        let start = start.max(micros(state.origin, launched)).min(start + now - end);
        let mut sections = Vec::with_capacity(marks.len());
        let mut at = start;
        for pair in marks.windows(2) {
            let duration_us = elapsed(&pair[0].event, &pair[1].event)?;
            sections.push(Section { what: pair[0].what, index: pair[0].index, start_us: at, duration_us });
            at += duration_us;
        }
        let mut events = marks.into_iter().map(|mark| mark.event);
        if let Some(first) = events.next() {
            let old = std::mem::replace(&mut state.anchor, (first, start));
            state.free.push(old.0);
        }
        state.free.extend(events);
        Ok(sections)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the lists inconsistent: every update is one push, pop or swap.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event that records its time.
fn event(cuda: &CudaExec) -> Result<CudaEvent> {
    cuda.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()
}

/// Microseconds from one event, that was reached, to another.
fn elapsed(from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
    Ok(f64::from(from.elapsed_ms(to).w()?) * 1e3)
}

fn micros(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e6
}
