//! RMS norm of q and of k over all of their heads. Tensor-parallel ranks may share the heads.
//!
//! It has two steps, so that ranks can exchange data between them: the sum of squares of each head, and the norms from
//! the sums of all heads. The sums are added in the order of heads, so that a row's bits do not depend on the number of
//! ranks.

use candle_core::{DType, Result, bail};

use crate::arguments::{expect, expect_rank3};
use crate::cpu::dispatch;
use crate::cpu::norm::SquareSums;
use crate::cpu::parallel::{for_each_item, rows_per_task};
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::{HeadsNorm, QkvHeads};
use crate::view::{View, ViewMut};
use crate::with_float;

/// The sum of squares of each head of q and k.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `qkv` | [T, (Hq + 2 Hkv) · D] f32 |
/// | `out` | [T, Hq + Hkv] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn head_squares_into(qkv: View, heads: QkvHeads, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "head_squares";
    let rows = qkv.rows();
    let normed = heads.normed();
    expect(op, "qkv", &qkv, DType::F32, &[rows, heads.width()])?;
    expect(op, "out", &out, DType::F32, &[rows, normed])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::heads_norm::head_squares(qkv, heads, out, ex);
    }
    let qkv = qkv.cpu::<f32>()?;
    let out = out.cpu_mut::<f32>()?;
    let Some(chunk) = rows_per_task(ex, out.len(), normed) else { return Ok(()) };
    let tasks = out.chunks_mut(chunk).zip(qkv.chunks(chunk / normed * heads.width())).collect();
    for_each_item(ex, tasks, qkv.len(), |(out, qkv): (&mut [f32], &[f32])| {
        for (out, row) in out.chunks_exact_mut(normed).zip(qkv.chunks_exact(heads.width())) {
            dispatch(ex.isa(), SquareSums { x: &row[..normed * heads.dim], out });
        }
    });
    Ok(())
}

/// q = q / sqrt(mean(q²) + eps) · weight, and the same for k. The means are over all heads of all ranks (OLMoE,
/// Muennighoff et al., 2024). Arithmetic is in f32.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`HeadsNorm`] |
/// | `qkv` | [T, (Hq + 2 Hkv) · D] f32; v stays unchanged |
///
/// # Errors
/// A wrong dtype or wrong dims; a number of replicas that does not divide the ranks.
pub fn heads_norm_into(args: &HeadsNorm, heads: QkvHeads, mut qkv: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "heads_norm";
    let rows = qkv.rows();
    expect(op, "qkv", &qkv, DType::F32, &[rows, heads.width()])?;
    let (ranks, _, _) = expect_rank3(op, "squares", &args.squares)?;
    expect(op, "squares", &args.squares, DType::F32, &[ranks, rows, heads.normed()])?;
    if args.kv_replicas == 0 || !ranks.is_multiple_of(args.kv_replicas) {
        bail!("{op}: expected kv_replicas that divides {ranks} ranks, got {}", args.kv_replicas)
    }
    expect(op, "q_norm", &args.q_norm, args.q_norm.dtype(), &[heads.q * heads.dim])?;
    expect(op, "k_norm", &args.k_norm, args.q_norm.dtype(), &[heads.kv * heads.dim])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::heads_norm::heads_norm(args, heads, qkv, ex);
    }
    with_float!(args.q_norm.dtype(), op, T => run::<T>(args, heads, qkv.reborrow(), ex))
}

fn run<T: Lanes>(args: &HeadsNorm, heads: QkvHeads, mut qkv: ViewMut, ex: &mut Exec) -> Result<()> {
    let q_norm = args.q_norm.cpu::<T>()?;
    let k_norm = args.k_norm.cpu::<T>()?;
    let scales = Scales::new(args, heads)?;
    let values = qkv.cpu_mut::<f32>()?;
    let work = values.len();
    let width = heads.width();
    let Some(chunk) = rows_per_task(ex, work, width) else { return Ok(()) };
    let tasks = values.chunks_mut(chunk).enumerate().collect();
    for_each_item(ex, tasks, work, |(task, values): (usize, &mut [f32])| {
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            let [q_scale, k_scale] = scales.row(task * (chunk / width) + row);
            let (q, rest) = values.split_at_mut(q_norm.len());
            scale(q, q_scale, q_norm);
            scale(&mut rest[..k_norm.len()], k_scale, k_norm);
        }
    });
    Ok(())
}

fn scale<T: Lanes>(x: &mut [f32], scale: f32, weight: &[T]) {
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight.widen();
    }
}

/// The factors of each row.
struct Scales<'a> {
    squares: &'a [f32],
    heads: QkvHeads,
    rows: usize,
    ranks: usize,
    kv_replicas: usize,
    eps: f32,
}

impl<'a> Scales<'a> {
    fn new(args: &HeadsNorm<'a>, heads: QkvHeads) -> Result<Self> {
        let ranks = args.squares.dims()[0];
        let rows = args.squares.dims()[1];
        let squares = args.squares.cpu::<f32>()?;
        Ok(Self { squares, heads, rows, ranks, kv_replicas: args.kv_replicas, eps: args.eps })
    }

    /// 1 / rms of q and of k.
    fn row(&self, row: usize) -> [f32; 2] {
        let normed = self.heads.normed();
        let q_heads = self.heads.q;
        let mut q = 0.0;
        let mut k = 0.0;
        for rank in 0..self.ranks {
            let squares = &self.squares[(rank * self.rows + row) * normed..][..normed];
            squares[..q_heads].iter().for_each(|square| q += square);
            if rank.is_multiple_of(self.kv_replicas) {
                squares[q_heads..].iter().for_each(|square| k += square);
            }
        }
        let inverse =
            |sum: f32, heads: usize| 1.0 / (sum / (heads * self.heads.dim) as f32 + self.eps).sqrt();
        let kv_ranks = self.ranks / self.kv_replicas;
        [inverse(q, q_heads * self.ranks), inverse(k, self.heads.kv * kv_ranks)]
    }
}
