//! Several GPUs over NCCL, one thread of this process for each. The machine needs at least two GPUs.

mod chunks;
mod collectives;
mod explained;
mod faults;
mod faulty;
mod graphs;
mod killed;
mod moves;
mod offload;
mod peer_combine;
mod peer_dispatch;
mod peer_gather;
mod peer_needs;
mod peer_runs;
mod peer_share;
mod peers;
mod processes;
mod products;
mod rebalance;
mod rounds;
mod timing;
mod window;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Result};
use moe_comm::NcclComm;
use moe_kernels::Exec;

/// This is long enough for making connections.
pub const LIMIT: Duration = Duration::from_secs(20);

/// The numbers of ranks to test: two, and all GPUs of the machine.
pub fn worlds() -> Vec<usize> {
    let devices = CudaContext::device_count().unwrap() as usize;
    assert!(devices >= 2, "the NCCL tests need at least 2 GPUs, found {devices}");
    if devices == 2 { vec![2] } else { vec![2, devices] }
}

/// A context on a GPU, with its own workspace.
fn context(ordinal: usize) -> Result<Exec> {
    static DEVICES: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let std::collections::btree_map::Entry::Vacant(entry) = devices.entry(ordinal) {
        entry.insert(moe_kernels::cuda::device(ordinal)?);
    }
    Exec::on(&devices[&ordinal])
}

/// The results of `f(communicator, context)` on each rank of a new world of `n`, in rank order. Rank r runs on GPU r,
/// and no call takes longer than `limit`.
pub fn run_nccl_ranks<R: Send>(
    n: usize,
    limit: Duration,
    f: impl Fn(&NcclComm, &mut Exec) -> R + Sync,
) -> Vec<R> {
    let id = NcclComm::unique_id().unwrap();
    // A rank that fails on purpose must not do so while another rank is still joining.
    let f = &f;
    let joined = &std::sync::Barrier::new(n);
    std::thread::scope(|scope| {
        let rank = |rank| {
            move || {
                let mut ex = context(rank).unwrap();
                let comm = NcclComm::with_timeout(id, rank, n, &ex, limit).unwrap();
                joined.wait();
                f(&comm, &mut ex)
            }
        };
        let threads: Vec<_> = (0..n).map(|r| scope.spawn(rank(r))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<R>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}
