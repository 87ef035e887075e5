//! Row-parallel products over GPUs, compared with the whole product on the CPU.

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_comm::{Communicator, ParallelConfig, RowParallel};
use moe_kernels::{Buffer, Exec, linear_into};

use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{FLOATS, Rng, assert_close, rounding, streams};

/// T, N, K: nothing, sizes that stream weights, odd sizes, sizes that cuBLAS computes.
const SIZES: [(usize, usize, usize); 5] =
    [(0, 64, 512), (1, 64, 512), (4, 256, 1024), (9, 33, 264), (70, 128, 512)];

struct Case {
    x: Buffer,
    w: Buffer,
    bias: Option<Buffer>,
    out: DType,
}

fn cases(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for out in streams(dtype) {
            for (i, (t, n, k)) in SIZES.into_iter().enumerate() {
                let bias = (i % 2 == 1).then(|| rng.floats(dtype, &[n]));
                all.push(Case { x: rng.floats(dtype, &[t, k]), w: rng.floats(dtype, &[n, k]), bias, out });
            }
        }
    }
    all
}

/// Columns of part `rank` of `n`, in host memory.
fn columns(matrix: &Buffer, rank: usize, n: usize) -> Result<Buffer> {
    let rows = matrix.dims()[0];
    let k = matrix.dims()[1];
    let mut part = Buffer::zeros(matrix.dtype(), &[rows, k / n])?;
    for row in 0..rows {
        let from = matrix.view().narrow(row, 1)?.reshape(&[n, k / n])?.narrow(rank, 1)?;
        Exec::cpu().copy_from_host(from, part.view_mut().narrow(row, 1)?)?;
    }
    Ok(part)
}

impl Case {
    fn whole(&self) -> Result<Buffer> {
        let mut out = Buffer::zeros(self.out, &[self.x.dims()[0], self.w.dims()[0]])?;
        let bias = self.bias.as_ref().map(Buffer::view);
        linear_into(self.x.view(), self.w.view(), bias, out.view_mut(), &mut Exec::cpu())?;
        Ok(out)
    }

    fn on_rank(&self, comm: &Arc<dyn Communicator>, ex: &mut Exec) -> Result<Buffer> {
        let rank = comm.rank();
        let n = comm.world_size();
        let k = self.x.dims()[1];
        let geometry = ParallelConfig { tp: n, ..ParallelConfig::default() }.geometry(rank)?;
        let product = RowParallel::new(&geometry.row_shard("K", k)?, comm.clone())?;
        let put = |host: &Buffer| {
            let mut data = ex.zeros(host.dtype(), host.dims())?;
            ex.copy_from_host(host.view(), data.view_mut())?;
            Ok::<_, candle_core::Error>(data)
        };
        let x = put(&columns(&self.x, rank, n)?)?;
        let w = put(&columns(&self.w, rank, n)?)?;
        let bias = self.bias.as_ref().map(put).transpose()?;
        let mut out = ex.zeros(self.out, &[x.dims()[0], w.dims()[0]])?;
        product.linear_into(x.view(), w.view(), bias.as_ref().map(Buffer::view), out.view_mut(), ex)?;
        ex.to_host(out.view())
    }
}

#[test]
fn row_parallel_products_agree() {
    let cases = cases(&mut Rng::new());
    // A rank holds whole segments of K, and there are eight segments.
    for n in worlds().into_iter().filter(|n| 8 % n == 0) {
        let results = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let group = comm.split(0, comm.rank(), ex).unwrap();
            cases.iter().map(|case| case.on_rank(&group, ex).unwrap()).collect::<Vec<_>>()
        });
        for (i, case) in cases.iter().enumerate() {
            let expected = case.whole().unwrap();
            // n products and n - 1 sums are rounded; sums of K such terms stay below 1.5 sqrt(K).
            let k = case.x.dims()[1] as f64;
            let bound = 3.0 * n as f64 * rounding(case.out) * k.sqrt() + 1e-6 * k;
            for rank in &results {
                assert_close(&format!("{n} ranks, K {k}, out {:?}", case.out), &expected, &rank[i], bound);
            }
        }
    }
}
