//! Offline generation with Mixture-of-Experts models: the engine and its scheduler, ranks, tokenizer
//! and chat templates.
#![doc = include_str!("../README.md")]

pub mod chat;
mod dequantised;
mod device;
pub mod device_events;
pub mod engine;
pub mod eplb;
mod error;
pub mod explain;
pub mod family;
mod footprint;
mod going_on;
pub mod heat;
mod isolated;
mod loss;
mod memory_plan;
pub mod parallel;
mod placements;
mod run;
mod run_config;
mod session;
pub mod structured;
pub mod terminal;
#[cfg(test)]
mod testing;
pub mod tokenizer;

pub use device::DeviceChoice;
pub use error::{Error, Result, UsageError, end_failed, panic_text, usage};
pub use family::{
    AttentionSpec, Embedded, EmbeddedChat, Families, LoadOptions, LoadedModel, ModelFamily, ModelSpec,
};
pub use footprint::mtp_bytes;
pub use loss::Loss;
pub use memory_plan::{MemoryPlan, WeightForms};
pub use placements::PlacementConfig;
pub use run::{Run, Weights};
pub use run_config::{ExecutorBackend, RunConfig};
pub use session::Session;

pub use model_runtime;
