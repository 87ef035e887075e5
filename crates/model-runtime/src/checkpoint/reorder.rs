//! The elements of a box in the order of a slice: every other column, transposed.

use candle_core::{DType, Device, Result, Tensor, bail};
use moe_kernels::{Element, Float, TensorView, with_float};

use super::slice::{SliceOrder, SliceSource, TensorSlice};

/// Rows and columns that are transposed at once, so that reads and writes of a block stay within a cache.
const BLOCK: usize = 32;

/// A slice of `source`, in its order, on the CPU.
///
/// # Errors
/// The errors of [`SliceSource::slice`]; a transposed vector.
pub(super) fn ordered<S: SliceSource + ?Sized>(
    source: &S,
    slice: &TensorSlice,
    dtype: DType,
) -> Result<Tensor> {
    let stored = source.slice(&slice.stored, &slice.ranges, dtype, &Device::Cpu)?;
    if slice.order == SliceOrder::STORED {
        return Ok(stored);
    }
    let dims = slice.dims();
    let [.., rows, width] = *stored.dims() else {
        bail!("tensor `{}`: expected a matrix or several, got dims {:?}", slice.stored, stored.dims())
    };
    with_float!(dtype, "checkpoint", T => {
        let guard = TensorView::new(&stored)?;
        let from = guard.view()?.cpu::<T>()?;
        let mut to = <T as Element>::zeros(dims.iter().product());
        let kept = width.div_ceil(slice.order.step);
        let matrices = from.chunks_exact((rows * width).max(1)).zip(to.chunks_exact_mut((rows * kept).max(1)));
        matrices.for_each(|(from, to)| reorder(from, [rows, width], slice.order, to));
        Tensor::from_vec(to, dims, &Device::Cpu)
    })
}

/// One matrix [rows, width].
fn reorder<T: Float>(from: &[T], [rows, width]: [usize; 2], order: SliceOrder, to: &mut [T]) {
    let kept = width.div_ceil(order.step);
    for first_row in (0..rows).step_by(BLOCK) {
        for first in (0..kept).step_by(BLOCK) {
            for row in first_row..rows.min(first_row + BLOCK) {
                for column in first..kept.min(first + BLOCK) {
                    let at = if order.transposed { column * rows + row } else { row * kept + column };
                    to[at] = from[row * width + column * order.step];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_column_becomes_a_row() {
        let from: Vec<f32> = (0..2 * 5).map(|i| i as f32).collect();
        let reordered = |order| {
            let mut to = vec![0.0; 6];
            reorder(&from, [2, 5], order, &mut to);
            to
        };
        assert_eq!(reordered(SliceOrder { step: 2, transposed: false }), [0., 2., 4., 5., 7., 9.]);
        assert_eq!(reordered(SliceOrder { step: 2, transposed: true }), [0., 5., 2., 7., 4., 9.]);
    }

    #[test]
    fn blocks_meet_without_a_seam() {
        let rows = BLOCK + 3;
        let width = 2 * BLOCK + 7;
        let from: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
        let mut to = vec![0.0; rows * width];
        reorder(&from, [rows, width], SliceOrder { step: 1, transposed: true }, &mut to);
        for (i, value) in to.iter().enumerate() {
            assert_eq!(*value, from[i % rows * width + i / rows]);
        }
    }
}
