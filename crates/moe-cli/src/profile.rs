//! `--profile F`: the steps of the engine and the layers within them, as a Chrome trace (open it in
//! Perfetto or chrome://tracing).
//!
//! The model and the engine open `tracing` spans, and this layer writes each span as one complete event when it closes.
//! Without this layer no subscriber wants spans, and each costs one load and one comparison. The work of a CUDA device
//! comes as events with their own times (`moe_engine::device_events`), and gets a separate track. The file ends as
//! valid JSON even if the run ends in an error, and an error of the file itself is reported.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result};
use moe_engine::device_events;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// The row of the picture for a device's events, far below the rows of spans.
const DEVICE_ROW: usize = 1000;

/// Whether a profile needs this event: every span, and the events of devices.
pub(crate) fn wants(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() || metadata.target() == device_events::TARGET
}

/// A trace that is being written. Dropping it ends the file.
pub struct Profile {
    path: PathBuf,
    trace: Arc<Trace>,
}

impl Profile {
    /// Creates the file, or empties it.
    pub fn create(path: &Path) -> Result<Self> {
        let file =
            File::create(path).with_context(|| format!("cannot write the profile {}", path.display()))?;
        let state = State { out: Some(BufWriter::new(file)), ..State::default() };
        let trace = Trace { start: device_events::origin(), state: Mutex::new(state) };
        Ok(Self { path: path.to_path_buf(), trace: Arc::new(trace) })
    }

    /// What a subscriber needs to write to it.
    pub fn layer(&self) -> ProfileLayer {
        ProfileLayer(Arc::clone(&self.trace))
    }

    /// Ends the file. Spans that close later are not in it.
    ///
    /// # Errors
    /// If anything could not be written since [`Profile::create`].
    pub fn finish(self) -> Result<()> {
        let ended = self.trace.state().end();
        ended.with_context(|| format!("cannot write the profile {}", self.path.display()))
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        // After `finish` this does nothing. Without `finish` the run has failed, and that error counts.
        let _ = self.trace.state().end();
    }
}

/// Writes spans to a [`Profile`].
pub struct ProfileLayer(Arc<Trace>);

struct Trace {
    start: Instant,
    state: Mutex<State>,
}

impl Trace {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct State {
    /// `None` once the file is ended.
    out: Option<BufWriter<File>>,
    /// Events in the file.
    events: usize,
    /// The first error; nothing is written after it.
    error: Option<io::Error>,
    /// Which rows of the picture are in use by an outermost span.
    busy: Vec<bool>,
    /// Whether the device's row has got its name.
    has_device: bool,
}

impl State {
    fn write(&mut self, event: &Value) {
        let Some(out) = self.out.as_mut().filter(|_| self.error.is_none()) else { return };
        let before = if self.events == 0 { "[\n" } else { ",\n" };
        let written = out.write_all(before.as_bytes());
        match written.and_then(|()| serde_json::to_writer(out, event).map_err(io::Error::from)) {
            Ok(()) => self.events += 1,
            Err(e) => self.error = Some(e),
        }
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(mut out) = self.out.take() else { return Ok(()) };
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        out.write_all(if self.events == 0 { b"[]\n" } else { b"\n]\n" })?;
        out.flush()
    }

    /// The lowest row that is free.
    fn take_row(&mut self) -> usize {
        let row = self.busy.iter().position(|busy| !busy).unwrap_or(self.busy.len());
        self.busy.resize(self.busy.len().max(row + 1), false);
        self.busy[row] = true;
        row
    }
}

/// A span that has not closed.
struct Open {
    start: Instant,
    /// The row of the picture, the same as that of the surrounding span. Outermost spans that follow each other share
    /// one row, whatever thread of the pool they ran on.
    row: usize,
    is_outermost: bool,
    args: Map<String, Value>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for ProfileLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let outer = span.parent().and_then(|outer| outer.extensions().get::<Open>().map(|open| open.row));
        let mut open = Open {
            start: Instant::now(),
            row: outer.unwrap_or_else(|| self.0.state().take_row()),
            is_outermost: outer.is_none(),
            args: Map::new(),
        };
        attributes.record(&mut Args(&mut open.args));
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut Args(&mut open.args));
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() != device_events::TARGET {
            return;
        }
        let mut args = Map::new();
        event.record(&mut Args(&mut args));
        let mut field = |name| args.remove(name).unwrap_or_default();
        let section = json!({
            "name": field("what"),
            "ph": "X",
            "ts": field("start_us"),
            "dur": field("duration_us"),
            "pid": 1,
            "tid": DEVICE_ROW,
            "args": {"index": field("index")},
        });
        let mut state = self.0.state();
        if !std::mem::replace(&mut state.has_device, true) {
            let args = json!({"name": "CUDA device"});
            state
                .write(&json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": DEVICE_ROW, "args": args}));
        }
        state.write(&section);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(open) = span.extensions_mut().remove::<Open>() else { return };
        let micros = |from: Instant, to: Instant| to.duration_since(from).as_nanos() as f64 / 1e3;
        let event = json!({
            "name": span.name(),
            "ph": "X",
            "ts": micros(self.0.start, open.start),
            "dur": micros(open.start, Instant::now()),
            "pid": 1,
            "tid": open.row,
            "args": open.args,
        });
        let mut state = self.0.state();
        state.write(&event);
        if open.is_outermost
            && let Some(busy) = state.busy.get_mut(open.row)
        {
            *busy = false;
        }
    }
}

/// The fields of a span as JSON.
struct Args<'a>(&'a mut Map<String, Value>);

impl Visit for Args<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    /// Numbers and booleans keep their type in JSON; everything else is text.
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = format!("{value:?}");
        let value = serde_json::from_str(&text).unwrap_or_else(|_| text.into());
        self.0.insert(field.name().into(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::trace_span;
    use tracing_subscriber::layer::SubscriberExt;

    /// The events that `run` writes to a profile.
    fn events(run: impl FnOnce(Profile)) -> Vec<Value> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let profile = Profile::create(file.path()).unwrap();
        let subscriber = tracing_subscriber::registry().with(profile.layer());
        tracing::subscriber::with_default(subscriber, || run(profile));
        let text = std::fs::read_to_string(file.path()).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
    }

    #[test]
    fn spans_nest_in_time_and_share_a_row() {
        let events = events(|profile| {
            for tokens in [5u64, 1] {
                let _step = trace_span!("step", tokens, kind = "a \"quoted\" text").entered();
                let _layer = trace_span!("layer", layer = 3i64).entered();
            }
            profile.finish().unwrap();
        });
        let names: Vec<&str> = events.iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["layer", "step", "layer", "step"]);
        for pair in events.chunks(2) {
            let (begin, end) = (
                |e: &Value| e["ts"].as_f64().unwrap(),
                |e: &Value| e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap(),
            );
            assert!(begin(&pair[1]) <= begin(&pair[0]) && end(&pair[0]) <= end(&pair[1]));
            assert_eq!((&pair[0]["tid"], &pair[0]["ph"]), (&json!(0), &json!("X")));
            assert_eq!(pair[0]["args"], json!({"layer": 3}));
        }
        assert_eq!(events[1]["args"], json!({"tokens": 5, "kind": "a \"quoted\" text"}));
        assert_eq!(events[3]["tid"], 0, "steps that follow each other share a row");
    }

    #[test]
    fn outermost_spans_at_the_same_time_have_their_own_rows() {
        let events = events(|profile| {
            let a = trace_span!(parent: None, "a");
            let b = trace_span!(parent: None, "b");
            let inner = trace_span!(parent: &b, "inner");
            drop((a, inner, b));
            profile.finish().unwrap();
        });
        let rows: Vec<_> =
            events.iter().map(|e| (e["name"].as_str().unwrap(), e["tid"].as_u64().unwrap())).collect();
        assert_eq!(rows, [("a", 0), ("inner", 1), ("b", 1)]);
    }

    #[test]
    fn a_device_has_a_row_of_its_own_with_its_own_times() {
        let events = events(|profile| {
            let _step = trace_span!("step").entered();
            device_events::section("graph", 64, 10.5, 2.25);
            tracing::trace!("another event");
            device_events::section("layer", 3, 13., 1.);
            profile.finish().unwrap();
        });
        assert_eq!(events[0]["args"], json!({"name": "CUDA device"}));
        let rows =
            events.iter().skip(1).map(|e| (&e["name"], &e["ts"], &e["dur"], &e["args"])).collect::<Vec<_>>();
        let want = [
            (&json!("graph"), &json!(10.5), &json!(2.25), &json!({"index": 64})),
            (&json!("layer"), &json!(13.), &json!(1.), &json!({"index": 3})),
        ];
        assert_eq!(rows, want);
        assert!(events.iter().all(|e| e["tid"] == json!(DEVICE_ROW)));
    }

    #[test]
    fn a_run_that_fails_leaves_valid_json() {
        let fails = |profile: Profile| -> Result<()> {
            let _profile = profile;
            let _step = trace_span!("step").entered();
            trace_span!("layer").in_scope(|| ());
            anyhow::bail!("no memory")
        };
        let left = events(|profile| assert!(fails(profile).is_err()));
        let names: Vec<&str> = left.iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["layer", "step"]);
        assert_eq!(events(drop), Vec::<Value>::new());
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        let error = Profile::create(Path::new("/no/such/folder/p.json")).err().unwrap().to_string();
        assert!(error.contains("cannot write the profile /no/such/folder/p.json"), "{error}");
        if cfg!(target_os = "linux") {
            let profile = Profile::create(Path::new("/dev/full")).unwrap();
            assert!(format!("{:#}", profile.finish().unwrap_err()).contains("No space left"));
        }
    }
}
