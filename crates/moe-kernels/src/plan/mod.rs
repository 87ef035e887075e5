//! Which kernel runs an op, and why not another: pure functions of sizes and a machine.
//!
//! Each op that has several kernels has an enum of [`Form`]s here. The op itself and the code that explains it ask the
//! same function. Nothing here touches a device: the choice for any machine can be computed, printed and tested on any
//! other.

mod attention;
mod checks;
mod columns;
mod copies;
mod delta;
mod dequantise;
mod experts;
mod experts_call;
mod features;
mod form;
mod fp8;
mod fp8_activations;
mod fusion;
mod gpu;
mod images;
mod linear;
mod linear_call;
mod machine;
mod mixed;
mod monolithic;
mod one_launch;
mod per_head;
#[cfg(test)]
mod pins;
mod prompt;
mod quant;
mod reason;
mod router;
mod stage;

#[cfg(feature = "cuda")]
pub(crate) use attention::MAX_ROWS;
pub use attention::{AttentionCall, AttentionForm};
pub use columns::ColumnOrder;
pub use copies::{CopiesCall, CopiesForm};
pub use delta::{DeltaCall, DeltaForm};
pub use dequantise::{DequantiseCall, DequantiseForm};
pub use experts::{EXPERTS_FROM_HOST, ExpertsForm};
pub use experts_call::{EpilogueCall, ExpertsCall};
pub use features::{BULK_COPIES, Feature, Features, TENSOR_CORES, WARPGROUPS};
pub use form::Form;
pub use fp8_activations::Fp8Activations;
pub use fusion::Fusion;
pub use gpu::{Gpu, Rates};
pub use images::{check_kernel_image, is_portable_only};
#[cfg(feature = "cuda")]
pub(crate) use linear::BLAS_FP8_ROWS;
pub use linear::{FusedLinearForm, LinearForm};
pub use linear_call::LinearCall;
pub use machine::Machine;
pub use mixed::{MixedCall, MixedForm};
pub use monolithic::{MonolithicCall, MonolithicForm};
pub use per_head::{PerHeadCall, PerHeadForm, QUERY_WITH_PRODUCT};
pub use prompt::{PromptCall, PromptForm};
pub use quant::{QuantWeights, expect_codec};
pub use reason::{Reason, Target};
pub use router::{RouterCall, RouterForm};
pub use stage::{Rejected, Stage, in_parts, launches};

pub use crate::tags::{activation_kind, activation_name};
