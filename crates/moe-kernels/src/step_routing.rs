//! The routing of a step on a CUDA device: arrays into which the launches with a router write their choices, and from
//! which they read forced choices.
//!
//! The arrays keep their addresses from step to step, so that captured graphs may use them. They contain *logical*
//! experts and MoE layers, like [`RoutedExperts`](crate::RoutedExperts) and [`ExpertHeat`](crate::ExpertHeat). Launches
//! read and write them in addition to their computation: recording changes neither the choice of kernels nor a bit of
//! the results.

use std::sync::Arc;

use candle_core::{Result, bail};

use crate::arguments::{expect_matrix, expect_rank3};
use crate::buffer::Buffer;
use crate::view::View;

/// Which experts' scores become the weights of forced experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ForcedWeights {
    /// The scores of the forced experts. This is a replay.
    OfForced,
    /// The scores of the experts that the row would have chosen itself. This is an even spread.
    OfChosen,
}

/// The arrays of a step. By default there are none, and nothing is recorded or forced.
#[derive(Clone, Debug, Default)]
pub struct DeviceRouting {
    /// [L_moe, E] u32: how often each expert was chosen, in this step and all steps before it, modulo 2^32.
    pub heat: Option<Arc<Buffer>>,
    /// [T, L_moe, K] u32 for at least the step's rows: their choices. Padding rows are not written.
    pub routed: Option<Arc<Buffer>>,
    /// [T, L_moe, K] u32 for at least the step's rows: choices to force, [`NO_EXPERT`](crate::NO_EXPERT) for none. A
    /// row without forced choices chooses by itself. Ids are in range and distinct.
    pub forced: Option<(Arc<Buffer>, ForcedWeights)>,
}

/// The arrays of one MoE layer, from one row of the step on.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerRouting<'a> {
    /// \[E\] u32; counts are added to it.
    pub heat: Option<View<'a>>,
    /// u32, written: the K choices of row t begin at t * `stride`.
    pub routed: Option<View<'a>>,
    /// u32, read: the choices to force on row t, at the same indices.
    pub forced: Option<(View<'a>, ForcedWeights)>,
    /// Number of ids from one row to the next.
    pub stride: usize,
}

impl DeviceRouting {
    /// Whether there is any array.
    pub fn is_some(&self) -> bool {
        self.heat.is_some() || self.routed.is_some() || self.forced.is_some()
    }

    /// The part for MoE layer `layer`, from row `first_row` of the step on.
    ///
    /// # Errors
    /// Arrays of other dims than documented, or without such a layer or row.
    pub fn layer(&self, layer: usize, first_row: usize) -> Result<LayerRouting<'_>> {
        let mut part = LayerRouting::default();
        if let Some(heat) = &self.heat {
            let (_, experts) = expect_matrix(OP, "heat", &heat.view())?;
            part.heat = Some(heat.view().narrow(layer, 1)?.reshape(&[experts])?);
        }
        if let Some(ids) = &self.routed {
            let (rows, stride) = rows_of("routed", ids, layer, first_row)?;
            (part.routed, part.stride) = (Some(rows), stride);
        }
        if let Some((ids, weights)) = &self.forced {
            let (rows, stride) = rows_of("forced", ids, layer, first_row)?;
            if part.routed.is_some() && part.stride != stride {
                bail!("{OP}: routed rows hold {} ids, forced ones {stride}", part.stride)
            }
            (part.forced, part.stride) = (Some((rows, *weights)), stride);
        }
        Ok(part)
    }
}

const OP: &str = "step_routing";

/// The ids [T, L_moe, K] from one row and layer on, and the number of ids from row to row.
fn rows_of<'a>(name: &str, ids: &'a Buffer, layer: usize, first_row: usize) -> Result<(View<'a>, usize)> {
    let (rows, layers, top_k) = expect_rank3(OP, name, &ids.view())?;
    if layer >= layers || first_row > rows {
        bail!("{OP}: {name} [{rows}, {layers}, {top_k}] has no row {first_row} of MoE layer {layer}")
    }
    let all = rows * layers * top_k;
    let stride = layers * top_k;
    let start = (first_row * stride + layer * top_k).min(all);
    Ok((ids.view().reshape(&[all])?.narrow(start, all - start)?, stride))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(dims: &[usize]) -> Arc<Buffer> {
        let count = dims.iter().product::<usize>() as u32;
        Arc::new(Buffer::from_vec((0..count).collect::<Vec<u32>>(), dims).unwrap())
    }

    #[test]
    fn a_layer_sees_its_counts_and_rows() {
        let routing = DeviceRouting {
            heat: Some(ids(&[3, 5])),
            routed: Some(ids(&[4, 3, 2])),
            forced: Some((ids(&[6, 3, 2]), ForcedWeights::OfForced)),
        };
        let part = routing.layer(1, 2).unwrap();
        assert_eq!(part.stride, 6);
        assert_eq!(part.heat.unwrap().cpu::<u32>().unwrap(), [5, 6, 7, 8, 9]);
        // This is row 2, layer 1 of [4, 3, 2].
        assert_eq!(part.routed.unwrap().cpu::<u32>().unwrap()[..2], [14, 15]);
        assert_eq!(part.forced.unwrap().0.elem_count(), 36 - 14);
        let text = |result: Result<()>| result.unwrap_err().to_string();
        assert!(text(routing.layer(3, 0).map(drop)).contains("3"));
        let other = DeviceRouting { forced: Some((ids(&[6, 3, 1]), ForcedWeights::OfChosen)), ..routing };
        assert!(text(other.layer(0, 0).map(drop)).contains("routed rows hold 6 ids, forced ones 3"));
        assert_eq!(DeviceRouting::default().layer(7, 9).unwrap().stride, 0);
    }
}
