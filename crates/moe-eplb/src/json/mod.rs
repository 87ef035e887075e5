//! JSON formats: heat traces, expert maps (feature `serde`).

mod expert_map;
mod trace;

pub use expert_map::{read_expert_map, read_expert_rows, write_expert_map};
pub use trace::{HeatRecord, TraceReader, TraceWriter, trace_loads};
