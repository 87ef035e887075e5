//! What mixes the positions of a sequence in a decoder layer: attention of some kind, or linear attention.

use candle_core::{DType, Result};
use moe_kernels::plan::{Fusion, Machine, Reason, Stage};
use moe_kernels::{Exec, ProductRows, RowsView, SublayerIo};
use moe_layer::PlanStep;

use crate::kv_cache::{LayerCache, LayerState};
use crate::rope::RopeRows;
use crate::step::StepViews;

/// The inputs of a mixer, and the place of its result.
pub type MixerIo<'a> = SublayerIo<'a, RowsView<'a>>;

/// The part of a decoder layer in which the positions of a sequence see each other.
pub trait Mixer: Send + Sync {
    /// What the layer keeps of a sequence between two steps.
    fn state(&self) -> LayerState;

    /// Memory for the rows `dims` [T, H] that [`forward_into`](Self::forward_into) reads in this step, in the model
    /// dtype `dtype` or in the form that its first product takes.
    ///
    /// # Errors
    /// No memory left.
    fn input_rows(&self, dims: &[usize], dtype: DType, ex: &Exec) -> Result<ProductRows> {
        ex.scratch(dtype, dims).map(ProductRows::Floats)
    }

    /// Whether this step can be computed with `fusion` inside the mixer's launches.
    ///
    /// # Errors
    /// The first reason why not.
    fn fits(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> std::result::Result<(), Reason> {
        let _ = (step, machine);
        match fusion {
            Fusion::Nothing => Ok(()),
            _ => Err(Reason::Part { part: "a mixer that takes nothing around it into its launches" }),
        }
    }

    /// The kernels of [`forward_into`](Self::forward_into) in this step, in their order.
    fn stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage>;

    /// Writes the state that the rows of a step add to `cache`, then their results [T, H] to the place that `io` gives
    /// (f32; without fusion also the model dtype). It takes rows `x` in the model dtype, and in the form of
    /// [`input_rows`](Self::input_rows). `rope` holds the rows' cosines and sines.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a fusion that does not [fit](Self::fits); a cache of another kind or layout than this
    /// layer's; ranks that disagree, or died.
    fn forward_into(
        &self,
        io: MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        cache: &mut LayerCache,
        ex: &mut Exec,
    ) -> Result<()>;

    /// On CUDA, leaves the sum over the ranks that share the heads to the caller from now on. Returns whether there is
    /// such a sum.
    #[must_use = "true means that the caller must add the sum"]
    fn defer_sum(&mut self) -> bool {
        false
    }
}
