//! The ops at the shapes of a Qwen3-MoE of 0.9 B parameters, 0.2 B active: H 1024, I 512, 32
//! experts, top-4, 16 query and 4 KV heads of 64, vocabulary 32000, bf16.
//!
//! Weights rotate through 256 MiB and more, so that none is still cached when its turn comes.
//! After each criterion report a line gives GB/s, GFLOP/s and the part of the time that the floor
//! would take: bytes over read bandwidth or FLOP over the multiply-add peak, whichever is longer.

#![allow(missing_docs, clippy::expect_used)] // criterion_group! makes an undocumented function.

#[path = "ops/delta.rs"]
mod delta;
#[path = "ops/shapes.rs"]
mod shapes;

use std::cell::Cell;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use moe_kernels::{CpuIsa, Exec, HugePages, Roof};

#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

/// What one call moves and computes, at least.
#[derive(Clone, Copy)]
pub struct Floor {
    pub bytes: f64,
    pub flop: f64,
}

/// The highest multiply-add peak of the path.
fn peak(roof: &Roof) -> f64 {
    roof.matrix.unwrap_or(0.0).max(roof.fma)
}

/// Runs cases and prints them against the roof.
pub struct Bench<'a> {
    criterion: &'a mut Criterion,
    roof: Roof,
    ex: Exec,
}

impl Bench<'_> {
    /// Times `call`, which gets the number of the call.
    pub fn case(
        &mut self,
        op: &str,
        shape: &str,
        floor: Floor,
        mut call: impl FnMut(usize, &mut Exec) + Send,
    ) {
        let best = Cell::new(f64::INFINITY);
        let count = Cell::new(0);
        let ex = &self.ex;
        let mut group = self.criterion.benchmark_group(op);
        group.bench_function(BenchmarkId::from_parameter(shape), |b| {
            b.iter_custom(|iterations| {
                let first = count.replace(count.get() + iterations as usize);
                let call = &mut call;
                let context = &mut ex.clone();
                // Inside the pool, as a model runs its steps.
                let elapsed = ex.install(move || {
                    let start = Instant::now();
                    (first..first + iterations as usize).for_each(|i| call(i, context));
                    start.elapsed()
                });
                best.set(best.get().min(elapsed.as_secs_f64() / iterations as f64));
                elapsed
            });
        });
        group.finish();
        let time = best.get();
        let roof = &self.roof;
        if time.is_finite() {
            let least = (floor.bytes / roof.read).max(floor.flop / peak(roof));
            println!(
                "{op:<22} {shape:<26} {:>9.1} us {:>7.1} GB/s {:>7.1} GFLOP/s {:>6.1} % of roof",
                time * 1e6,
                floor.bytes / time / 1e9,
                floor.flop / time / 1e9,
                100.0 * least / time
            );
        }
    }
}

fn ops(criterion: &mut Criterion) {
    let isa = std::env::var("CPU_ISA").map(|name| CpuIsa::from_name(&name).expect("CPU_ISA"));
    let ex = Exec::cpu().with_isa(isa.unwrap_or(CpuIsa::detect())).expect("a supported path");
    let roof = Roof::measure(&ex).expect("a buffer of 1 GiB");
    println!(
        "path {}, {} threads: read {:.1} GB/s, multiply-add peak {:.0} GFLOP/s, {roof:?}",
        ex.isa().name(),
        ex.num_threads(),
        roof.read / 1e9,
        peak(&roof) / 1e9
    );
    let bench = &mut Bench { criterion, roof, ex };
    let pool = &shapes::Pool::new();
    shapes::all(bench, pool);
    for rows in [1, 512] {
        delta::layer(bench, pool, rows);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = ops
}
criterion_main!(benches);
