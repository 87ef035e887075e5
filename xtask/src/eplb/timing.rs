//! How long planning takes.

use std::time::Instant;

use anyhow::Result;
use moe_eplb::Plan;

/// Least times of the runs that `timed` made, in milliseconds.
pub struct Timing {
    /// Processor time of the thread if the system reports it, otherwise wall time. On an idle machine they agree; on a
    /// busy one only processor time shows what planning costs.
    pub solve_ms: f64,
    pub wall_ms: f64,
}

/// The plan and how long the fastest of `repeat` runs took.
pub fn timed(repeat: usize, plan: impl Fn() -> moe_eplb::Result<Plan>) -> Result<(Plan, Timing)> {
    let mut timing = Timing { solve_ms: f64::INFINITY, wall_ms: f64::INFINITY };
    let mut last = None;
    for _ in 0..repeat.max(1) {
        let wall = Instant::now();
        let cpu = thread_cpu_ms();
        last = Some(plan()?);
        let cpu = cpu.zip(thread_cpu_ms()).map(|(begin, end)| end - begin);
        let wall = wall.elapsed().as_secs_f64() * 1e3;
        timing.solve_ms = timing.solve_ms.min(cpu.unwrap_or(wall));
        timing.wall_ms = timing.wall_ms.min(wall);
    }
    last.map(|plan| (plan, timing)).ok_or_else(|| anyhow::anyhow!("no run"))
}

/// Processor time of this thread on Linux.
fn thread_cpu_ms() -> Option<f64> {
    // The kernel updates the figure when the thread yields.
    std::thread::yield_now();
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split_whitespace().next()?.parse::<f64>().ok().map(|ns| ns / 1e6)
}
