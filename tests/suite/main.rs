//! Cross-crate tests, one binary.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

mod contradictions;
mod deepseek;
mod doors;
mod engine;
mod explained;
mod geometries;
mod invariance;
mod layouts;
mod moves;
mod parallel;
mod placements;
mod quantised;
mod ranks;
mod replicas;
mod requests;
mod running;
mod saboteur;
mod soak;
mod structured;
