//! What mixes the positions of a sequence in a decoder layer: attention of some kind.

use candle_core::{DType, Result};
use moe_kernels::plan::{Fusion, Machine, Reason, Stage};
use moe_kernels::{Exec, ProductRows, RowsView, SublayerIo};
use moe_layer::PlanStep;

use crate::kv_cache::{KvLayer, LayerState};
use crate::rope::RopeRows;
use crate::step::StepViews;

/// What a mixer reads, and where its result goes.
pub type MixerIo<'a> = SublayerIo<'a, RowsView<'a>>;

/// The part of a decoder layer in which the positions of a sequence see each other.
pub trait Mixer: Send + Sync {
    /// What the layer keeps of a sequence between two steps.
    fn state(&self) -> LayerState;

    /// Memory for the rows `dims` [T, H] that [`forward_into`](Self::forward_into) reads in such a step, in the model dtype
    /// `dtype` or as its first product takes them.
    ///
    /// # Errors
    /// No memory left.
    fn input_rows(&self, dims: &[usize], dtype: DType, ex: &Exec) -> Result<ProductRows> {
        ex.scratch(dtype, dims).map(ProductRows::Floats)
    }

    /// Whether such a step is computed with this inside its launches.
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

    /// The kernels of [`forward_into`](Self::forward_into) in such a step, in their order.
    fn stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage>;

    /// Writes what the rows of a step cache to `kv`, then their results [T, H] where `io` says (f32, without fusion the model
    /// dtype, too). Of rows `x` it takes the model dtype, and what [`input_rows`](Self::input_rows) says. `rope` holds the rows'
    /// cosines and sines.
    ///
    /// # Errors
    /// Wrong dims or dtypes; a fusion that does not [fit](Self::fits); another KV layout than this layer's; ranks that
    /// disagree, or died.
    fn forward_into(
        &self,
        io: MixerIo,
        step: &StepViews,
        rope: &RopeRows,
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()>;

    /// On CUDA, leaves the sum over the ranks that share the heads to the caller from now on; whether there is one.
    fn defer_sum(&mut self) -> bool {
        false
    }
}
