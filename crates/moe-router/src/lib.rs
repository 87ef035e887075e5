//! Every Mixture-of-Experts routing method for candle: scores to expert ids and weights.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod check;
mod choose;
mod config;
mod custom;
#[cfg(feature = "cuda")]
mod device;
mod error;
mod forward;
mod fused;
mod gate;
pub mod hf;
mod io;
mod math;
mod philox;
mod route;
mod router;
mod row;
mod score;
mod select;
mod simulate;
mod validate;

pub use config::{RouterConfig, Scoring, Selection};
pub use custom::RoutingFunction;
pub use error::RouterError;
pub use forward::Routed;
pub use fused::GateStep;
pub use gate::GateInput;
pub use io::{RouteInput, RouteOutput};
pub use philox::RowRng;
pub use router::{Router, RouterParams};
pub use simulate::{NormalRouting, RoutingStrategy, Strategies, UniformRandom};

pub use candle_core as candle;
pub use candle_nn::VarBuilder;
pub use moe_kernels::{
    ArgumentError, Exec, ExpertHeat, NO_EXPERT, Philox4x32, RoutedExperts, RoutingMethod, StepContext,
    TensorView, View, ViewMut, WeightView, Workspace, cause,
};
