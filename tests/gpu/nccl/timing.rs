//! How long collectives take: a table for docs/benchmarks.md, and bounds that only a broken set-up misses.

use std::fmt::Write;
use std::time::Instant;

use candle_core::{DType, Result};
use moe_comm::{Communicator, NcclComm, ReduceOp};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec};

use super::{LIMIT, run_nccl_ranks, worlds};

const HIDDEN: usize = 2048;
/// Collectives of one recorded graph.
const RECORDED: usize = 50;

/// Microseconds of one of `count` runs, after some that warm up.
fn time(
    comm: &NcclComm,
    ex: &mut Exec,
    count: usize,
    mut run: impl FnMut(&mut Exec) -> Result<()>,
) -> Result<f64> {
    for _ in 0..count.div_ceil(10) {
        run(ex)?;
    }
    comm.barrier(ex)?;
    let start = Instant::now();
    for _ in 0..count {
        run(ex)?;
    }
    ex.synchronize()?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / count as f64)
}

/// Microseconds of an all-reduce, called and replayed.
fn all_reduce(comm: &NcclComm, data: &mut Buffer, ex: &mut Exec) -> Result<(f64, f64)> {
    let mut call = |ex: &mut Exec| comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex);
    let eager = time(comm, ex, 200, &mut call)?;
    let mut graph = Graph::capture(ex, |ex| (0..RECORDED).try_for_each(|_| call(ex)))?;
    let replay = time(comm, ex, 10, |_| graph.launch())? / RECORDED as f64;
    Ok((eager, replay))
}

#[test]
fn table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let mut text = String::new();
            writeln!(text, "all_reduce, {n} GPUs, NCCL {}, bf16 rows of {HIDDEN}:", NcclComm::version()?)
                .unwrap();
            writeln!(text, "| tokens | called, us | in a graph, us |\n|---|---|---|").unwrap();
            for tokens in (0..=10).map(|i| 1 << i) {
                let mut data = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
                let (eager, replay) = all_reduce(comm, &mut data, ex)?;
                writeln!(text, "| {tokens} | {eager:.1} | {replay:.1} |").unwrap();
                assert!(replay < 2000.0, "an all-reduce of {tokens} tokens takes {replay} us");
            }
            let bytes = 64 << 20;
            let mut data = ex.zeros(DType::U8, &[n, bytes / n])?;
            let mut out = ex.zeros(DType::U8, &[n, bytes / n])?;
            let moved = (n - 1) as f64 / n as f64 * bytes as f64;
            let reduce = time(comm, ex, 20, |ex| comm.all_reduce(data.view_mut(), ReduceOp::Max, ex))?;
            let exchange = time(comm, ex, 20, |ex| comm.all_to_all(data.view(), out.view_mut(), ex))?;
            let (reduce, exchange) = (2e-3 * moved / reduce, 1e-3 * moved / exchange);
            writeln!(text, "64 MiB: all_reduce {reduce:.0} GB/s, all_to_all {exchange:.0} GB/s per GPU")
                .unwrap();
            assert!(reduce > 1.0 && exchange > 1.0, "{text}");
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}
