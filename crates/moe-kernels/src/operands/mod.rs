//! What ops take besides views, as plain data: the ops check it, and the kernels of each device read it.

mod attention;
mod delta;
mod experts;
mod heads_norm;
mod mla;

pub use attention::{AttentionMeta, QkNormRope, StepRows};
pub use delta::{CausalConv, DeltaHeads, GatedDelta, GatedRmsNorm, StateArrays, StateRows};
pub use experts::ExpertGroups;
pub use heads_norm::{HeadsNorm, QkvHeads};
pub use mla::{MlaLatent, MlaPrompt, MlaQuery, MlaRows};
