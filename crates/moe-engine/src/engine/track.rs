//! The work of a CUDA device in a step, for a profile.

use std::time::Instant;

use candle_core::Result;
use model_runtime::Exec;
use model_runtime::cuda::{Mark, Timeline};

use crate::device_events;

/// The marks that a step left on the stream.
pub(crate) struct StepMarks {
    timeline: Timeline,
    marks: Vec<Mark>,
    launched: Instant,
    rows: usize,
}

/// A context that marks its stream if a profile needs it; the CPU has no stream.
pub(super) fn tracked(ex: Exec) -> Result<Exec> {
    let is_tracked = ex.is_cuda() && device_events::wanted();
    let timeline = is_tracked.then(|| Timeline::new(device_events::origin(), &ex));
    Ok(ex.with_timeline(timeline.transpose()?))
}

impl StepMarks {
    /// Ends the marks of a step of `rows` rows whose launches began at `launched`; `None` without a profile.
    pub fn end(rows: usize, launched: Instant, ex: &Exec) -> Result<Option<Self>> {
        ex.mark("end", 0)?;
        let of =
            |timeline: &Timeline| Self { timeline: timeline.clone(), marks: timeline.take(), launched, rows };
        Ok(ex.timeline().map(of))
    }

    /// Reports to the profile, once the device has finished the step: the whole step, and each section.
    pub fn report(self) -> Result<()> {
        let sections = self.timeline.sections(self.marks, self.launched)?;
        if let (Some(first), Some(last)) = (sections.first(), sections.last()) {
            let duration = last.start_us + last.duration_us - first.start_us;
            device_events::section("step", self.rows, first.start_us, duration);
        }
        for s in &sections {
            device_events::section(s.what, s.index, s.start_us, s.duration_us);
        }
        Ok(())
    }
}
