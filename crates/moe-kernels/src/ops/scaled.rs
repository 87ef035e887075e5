//! Adds scaled rows, and computes the gate that scales them. Zero experts and gated shared experts use these ops.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use crate::arguments::{expect, expect_dtype};
use crate::element::Float;
use crate::exec::Exec;
use crate::view::{View, ViewMut};
use crate::with_float;

/// Elements below which one thread does the work: splitting costs more than it saves.
const PARALLEL_MIN: usize = 1 << 15;

/// `acc[t] = round(acc[t] + scales[t] * x[t])`, in f32 with one rounding.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `x` | [T, H] f32, bf16 or f16 |
/// | `scales` | T elements f32 |
/// | `acc` | [T, H] f32, bf16 or f16 |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn add_scaled_into(x: View, scales: View, mut acc: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "add_scaled";
    if x.dims() != acc.dims() || x.rows() != scales.elem_count() {
        bail!(
            "{op}: expected rows and accumulator of equal dims and one scale per row, got {:?}, {:?} and {}",
            x.dims(),
            acc.dims(),
            scales.elem_count()
        )
    }
    expect_dtype(op, "scales", &scales, DType::F32)?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::add_scaled(ex.cuda(op)?, op, x, scales, acc);
    }
    let scales = scales.cpu::<f32>()?;
    with_float!(x.dtype(), op, T => {
        with_float!(acc.dtype(), op, S => {
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

/// x = 1 / (1 + e^-x) in place, f32 of any dims.
///
/// # Errors
/// A wrong dtype.
pub fn sigmoid_into(mut x: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "sigmoid";
    expect_dtype(op, "x", &x, DType::F32)?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::sigmoid(ex.cuda(op)?, op, x);
    }
    let _ = ex;
    x.cpu_mut::<f32>()?.iter_mut().for_each(|x| *x = 1. / (1. + (-*x).exp()));
    Ok(())
}

/// Writes the groups of a dense product, which is one expert for all N rows: `offsets` \[2\] u32 = 0, N and `rows`
/// \[N\] u32 = 0, 1, .. N - 1.
///
/// # Errors
/// A wrong dtype or wrong dims; more rows than a u32 can number.
pub fn one_group_into(mut offsets: ViewMut, mut rows: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "one_group";
    let count = rows.elem_count();
    expect(op, "offsets", &offsets, DType::U32, &[2])?;
    expect_dtype(op, "rows", &rows, DType::U32)?;
    let Ok(end) = u32::try_from(count) else { bail!("{op}: {count} rows do not fit in u32") };
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        crate::cuda::any::sequence(ex.cuda(op)?, op, end, offsets)?;
        return crate::cuda::any::sequence(ex.cuda(op)?, op, 1, rows);
    }
    let _ = ex;
    offsets.cpu_mut::<u32>()?.copy_from_slice(&[0, end]);
    rows.cpu_mut::<u32>()?.iter_mut().zip(0..).for_each(|(row, number)| *row = number);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_and_one_row_agree() -> Result<()> {
        let rows = 300;
        let width = 129;
        let x: Vec<f32> = (0..rows * width).map(|i| (i % 71) as f32 * 0.37 - 9.).collect();
        let scales: Vec<f32> = (0..rows).map(|t| (t % 13) as f32 * 0.21 - 1.).collect();
        let start: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32).collect();
        let mut whole = start.clone();
        let mut single = start;
        assert!(whole.len() >= PARALLEL_MIN);
        let mut ex = Exec::cpu().with_threads(3)?;
        let mut add = |x: &[f32], scales: &[f32], acc: &mut [f32]| {
            let dims = [scales.len(), width];
            let acc = ViewMut::new(acc, &dims)?;
            add_scaled_into(View::new(x, &dims)?, View::new(scales, &[scales.len()])?, acc, &mut ex)
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
        let x = [0f32; 6];
        let scales = [0f32; 3];
        let mut acc = [0f32; 6];
        let acc = ViewMut::new(&mut acc, &[2, 3])?;
        let e = add_scaled_into(View::new(&x, &[2, 3])?, View::new(&scales, &[3])?, acc, &mut Exec::cpu());
        let e = e.unwrap_err().to_string();
        assert!(e.contains("one scale per row, got [2, 3], [2, 3] and 3"), "{e}");
        Ok(())
    }

    #[test]
    fn gates_and_groups() -> Result<()> {
        let mut x = [0f32, 200., -200.];
        sigmoid_into(ViewMut::new(&mut x, &[3])?, &mut Exec::cpu())?;
        assert_eq!(x, [0.5, 1., 0.]);
        let mut offsets = [9u32; 2];
        let mut rows = [9u32; 3];
        let out = (ViewMut::new(&mut offsets, &[2])?, ViewMut::new(&mut rows, &[3])?);
        one_group_into(out.0, out.1, &mut Exec::cpu())?;
        assert_eq!((offsets, rows), ([0, 3], [0, 1, 2]));
        Ok(())
    }
}
