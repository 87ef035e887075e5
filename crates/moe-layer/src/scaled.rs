//! Adding scaled rows: what zero experts and gated shared experts contribute.

use moe_kernels::candle::{Result, bail};
use moe_kernels::{Exec, Float, View, ViewMut, with_float};
use rayon::prelude::*;

/// Elements below which one thread does the work: splitting costs more than it saves.
const PARALLEL_MIN: usize = 1 << 15;

/// `acc[t] = round(acc[t] + scales[t] * x[t])`, in f32 with one rounding.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, H] f32, bf16 or f16 |
/// | `scales` | T elements f32 |
/// | `acc` | [T, H] f32, bf16 or f16 |
pub(crate) fn add_scaled_into(x: View<'_>, scales: View<'_>, mut acc: ViewMut<'_>, ex: &Exec) -> Result<()> {
    if x.dims() != acc.dims() || x.rows() != scales.elem_count() {
        bail!(
            "add_scaled: expected rows and accumulator of equal dims and one scale per row, got {:?}, {:?} and {}",
            x.dims(),
            acc.dims(),
            scales.elem_count()
        )
    }
    let scales = scales.cpu::<f32>()?;
    with_float!(x.dtype(), "add_scaled", T => {
        with_float!(acc.dtype(), "add_scaled", S => {
            add_rows::<T, S>(x.cpu()?, scales, acc.cpu_mut()?, ex);
            Ok(())
        })
    })
}

fn add_rows<T: Float, S: Float>(x: &[T], scales: &[f32], acc: &mut [S], ex: &Exec) {
    let width = x.len().checked_div(scales.len()).unwrap_or(0);
    if width == 0 {
        return;
    }
    let add_row = |((x, acc), &scale): ((&[T], &mut [S]), &f32)| {
        for (a, x) in acc.iter_mut().zip(x) {
            *a = S::narrow(a.widen() + scale * x.widen());
        }
    };
    if x.len() < PARALLEL_MIN {
        x.chunks_exact(width).zip(acc.chunks_exact_mut(width)).zip(scales).for_each(add_row);
    } else {
        let rows = x.par_chunks_exact(width).zip(acc.par_chunks_exact_mut(width)).zip(scales);
        ex.install(|| rows.for_each(add_row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_and_one_row_agree() -> Result<()> {
        let (rows, width) = (300, 129);
        let x: Vec<f32> = (0..rows * width).map(|i| (i % 71) as f32 * 0.37 - 9.).collect();
        let scales: Vec<f32> = (0..rows).map(|t| (t % 13) as f32 * 0.21 - 1.).collect();
        let start: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32).collect();
        let (mut whole, mut single) = (start.clone(), start);
        assert!(whole.len() >= PARALLEL_MIN);
        let ex = Exec::cpu().with_threads(3)?;
        let add = |x: &[f32], scales: &[f32], acc: &mut [f32]| {
            let dims = [scales.len(), width];
            let acc = ViewMut::new(acc, &dims)?;
            add_scaled_into(View::new(x, &dims)?, View::new(scales, &[scales.len()])?, acc, &ex)
        };
        add(&x, &scales, &mut whole)?;
        for t in 0..rows {
            let row = t * width..(t + 1) * width;
            add(&x[row.clone()], &scales[t..=t], &mut single[row])?;
        }
        assert_eq!(whole, single);
        let i = 20 * width + 5;
        assert_eq!(whole[i], (i % 17) as f32 + scales[20] * x[i]);
        Ok(())
    }

    #[test]
    fn sizes_that_do_not_match_are_named() -> Result<()> {
        let (x, scales, mut acc) = ([0f32; 6], [0f32; 3], [0f32; 6]);
        let acc = ViewMut::new(&mut acc, &[2, 3])?;
        let e = add_scaled_into(View::new(&x, &[2, 3])?, View::new(&scales, &[3])?, acc, &Exec::cpu());
        let e = e.unwrap_err().to_string();
        assert!(e.contains("one scale per row, got [2, 3], [2, 3] and 3"), "{e}");
        Ok(())
    }
}
