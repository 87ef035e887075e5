//! The Cholesky factor of a symmetric matrix, computed from the last column to the first: H = R Rᵀ, where R is upper
//! triangular.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

/// The number of columns that are factored together.
const BLOCK: usize = 128;
/// The number of independent partial sums of a product.
const LANES: usize = 8;

/// Returns R [k, k], upper triangular, with H = R Rᵀ for the symmetric matrix `h` [k, k]. Returns `None` if `h` is not
/// positive definite.
///
/// # Errors
/// There is no memory left.
pub fn upper(h: &[f64], k: usize) -> Result<Option<Vec<f64>>> {
    // With rows and columns in reverse order, R becomes the usual lower factor.
    let mut l: Vec<f64> = h.iter().rev().copied().collect();
    for first in (0..k).step_by(BLOCK) {
        let last = k.min(first + BLOCK);
        subtract_earlier(&mut l, k, first..last)?;
        if factor(&mut l[first * k..last * k], k, first).is_none() {
            return Ok(None);
        }
        solve_below(&mut l, k, first..last);
    }
    for row in 0..k {
        l[row * k + row + 1..(row + 1) * k].fill(0.0);
    }
    l.reverse();
    Ok(Some(l))
}

/// Subtracts the contribution of the columns before the block from the columns of the block, in the block's rows and
/// all rows below. This is one matrix product and nearly all of the work.
fn subtract_earlier(l: &mut [f64], k: usize, block: Range<usize>) -> Result<()> {
    let first = block.start;
    let width = block.len();
    if first == 0 {
        return Ok(());
    }
    let known: Vec<f64> = l[first * k..].chunks(k).flat_map(|row| row[..first].iter().copied()).collect();
    let known = Tensor::from_vec(known, (k - first, first), &Device::Cpu)?;
    let product = known.matmul(&known.narrow(0, 0, width)?.t()?)?.flatten_all()?.to_vec1::<f64>()?;
    l[first * k..].par_chunks_mut(k).zip(product.par_chunks(width)).for_each(|(row, product)| {
        row[block.clone()].iter_mut().zip(product).for_each(|(value, product)| *value -= product);
    });
    Ok(())
}

/// Factors the square on the diagonal. `rows` are the rows of the block, from its first column on.
fn factor(rows: &mut [f64], k: usize, first: usize) -> Option<()> {
    for row in 0..rows.len() / k {
        for column in 0..=row {
            let sum = dot(&rows[row * k + first..][..column], &rows[column * k + first..][..column]);
            let value = rows[row * k + first + column] - sum;
            rows[row * k + first + column] = match column == row {
                true if value > 0.0 => value.sqrt(),
                true => return None,
                false => value / rows[column * k + first + column],
            };
        }
    }
    Some(())
}

/// Solves for the columns of the block in all rows below it.
fn solve_below(l: &mut [f64], k: usize, block: Range<usize>) {
    let (above, below) = l.split_at_mut(block.end * k);
    let square: Vec<&[f64]> =
        block.clone().map(|row| &above[row * k + block.start..row * k + block.end]).collect();
    below.par_chunks_mut(k).for_each(|row| {
        let row = &mut row[block.clone()];
        for column in 0..row.len() {
            row[column] =
                (row[column] - dot(&row[..column], &square[column][..column])) / square[column][column];
        }
    });
}

/// Returns the sum of products. It uses several partial sums, which the compiler turns into vector code.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_gives_the_matrix_back() {
        for k in [1, 2, 127, 128, 129, 300] {
            let noise = |i: usize| ((i * 7919 % 1009) as f64 / 1009.0) - 0.5;
            let x: Vec<f64> = (0..2 * k * k).map(noise).collect();
            let mut h = vec![0.0; k * k];
            for row in x.chunks(k) {
                for i in 0..k {
                    for j in 0..k {
                        h[i * k + j] += row[i] * row[j] + if i == j { 0.01 } else { 0.0 };
                    }
                }
            }
            let r = upper(&h, k).unwrap().unwrap();
            for i in 0..k {
                assert!((0..i).all(|j| r[i * k + j] == 0.0) && r[i * k + i] > 0.0);
                for j in 0..k {
                    let got: f64 = (0..k).map(|c| r[i * k + c] * r[j * k + c]).sum();
                    assert!((got - h[i * k + j]).abs() < 1e-9 * (1.0 + h[i * k + i]), "{k} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn a_matrix_that_is_not_positive_definite_has_none() {
        assert_eq!(upper(&[1.0, 2.0, 2.0, 1.0], 2).unwrap(), None);
        assert_eq!(upper(&[1.0, f64::NAN, f64::NAN, 1.0], 2).unwrap(), None);
        assert_eq!(upper(&[0.0], 1).unwrap(), None);
    }
}
