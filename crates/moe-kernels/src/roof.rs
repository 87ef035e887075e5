//! The limits of this machine with the threads and instruction set of a context: read bandwidth and multiply-add peaks.
//! Benchmarks compare their figures with these.

use std::hint::black_box;
use std::time::Instant;

use candle_core::Result;

use crate::buffer::Buffer;
use crate::cpu::roof::{Fma, Read};
use crate::cpu::{dispatch, parallel::for_each};
#[cfg(target_arch = "x86_64")]
use crate::exec::CpuIsa;
use crate::exec::Exec;

/// Measured limits, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roof {
    /// Bytes per second of reading a buffer of 1 GiB.
    pub read: f64,
    /// FLOP per second of f32 multiply-adds in vector registers.
    pub fma: f64,
    /// FLOP per second of BF16 products in matrix registers; `None` if the instruction set has none.
    pub matrix: Option<f64>,
}

/// Number of f32 values to read: many times the size of a cache.
const VALUES: usize = 1 << 28;

/// Values of a task: a few milliseconds of reading at most.
const TASK: usize = 1 << 21;

/// Instructions of a task: some milliseconds.
const ROUNDS: usize = 1_000_000;

impl Roof {
    /// Measures for a second or so, with a buffer of 1 GiB.
    ///
    /// # Errors
    /// The system refuses the buffer.
    pub fn measure(ex: &Exec) -> Result<Self> {
        let buffer = Buffer::from_vec(vec![1f32; VALUES], &[VALUES])?;
        let values = buffer.view();
        let isa = ex.isa();
        let values = values.cpu::<f32>()?;
        let read = best(ex, VALUES / TASK, |i| {
            black_box(dispatch(isa, Read(&values[i * TASK..(i + 1) * TASK])));
        });
        let threads = ex.num_threads();
        let flops = |flop: usize, kernel: &(dyn Fn() -> f32 + Sync)| {
            (flop * threads) as f64
                / best(ex, threads, |_| {
                    black_box(kernel());
                })
        };
        let fma = flops(Fma::FLOP * ROUNDS, &|| dispatch(isa, Fma { rounds: ROUNDS }));
        #[cfg(target_arch = "x86_64")]
        let matrix = (isa == CpuIsa::AmxBf16).then(|| {
            use crate::cpu::amx::{PEAK_FLOP, peak};
            flops(PEAK_FLOP * ROUNDS, &|| {
                peak(ROUNDS);
                0.0
            })
        });
        #[cfg(not(target_arch = "x86_64"))]
        let matrix = None;
        Ok(Self { read: (VALUES * size_of::<f32>()) as f64 / read, fma, matrix })
    }
}

/// The shortest time in seconds among a few runs of the tasks on all threads.
fn best(ex: &Exec, tasks: usize, task: impl Fn(usize) + Sync + Send) -> f64 {
    let run = |_| {
        let start = Instant::now();
        for_each(ex, tasks, usize::MAX, &task);
        start.elapsed().as_secs_f64()
    };
    (0..6).map(run).fold(f64::INFINITY, f64::min)
}
