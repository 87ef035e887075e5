//! Windows over peer memory: bytes that ranks put into each other's memory arrive, and nothing else changes.

use candle_core::{DType, Result};
use moe_comm::{Collectives, Communicator, NcclComm, PeerWindow, Window};
use moe_kernels::{Buffer, Exec};

use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::Rng;

/// A range of bytes that a rank puts: the value of the first byte, the place, and the length.
type Put = (u8, usize, usize);

/// Whole pages of the driver.
const BYTES: usize = 4 << 20;

/// The puts of `from` to `to`. Each rank has its own stripe of the window.
fn puts(seed: u64, from: usize, to: usize, ranks: usize) -> Vec<Put> {
    let mut rng = Rng::seeded(seed ^ (from as u64) << 20 ^ (to as u64) << 40 | 1);
    let stripe = BYTES / ranks;
    let put = |_| {
        let at = rng.below(stripe);
        let most = [2, 300, stripe][rng.below(3)];
        let len = rng.below(most).min(stripe - at);
        (rng.below(200) as u8, from * stripe + at, len)
    };
    (0..6).map(put).collect()
}

fn bytes(first: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| first.wrapping_add(i as u8)).collect()
}

fn rank_of(comm: &NcclComm, ex: &mut Exec) -> Result<()> {
    let rank = comm.rank();
    let ranks = comm.world_size();
    // Ranks that ask for less get as much as the rank that asks for most.
    let window = PeerWindow::new(comm, &mut ex.clone(), BYTES - 100 * rank, ex)?;
    let window = window.unwrap_or_else(|why| panic!("these GPUs cannot share memory: {why}"));
    assert_eq!(window.bytes(), BYTES);
    let mut want = vec![7u8; BYTES];
    let side = window.context().clone();
    for seed in 0..5 {
        window.wait_unused()?;
        comm.barrier(ex)?;
        if seed == 0 {
            let host = Buffer::from_vec(want.clone(), &[BYTES])?;
            window.put(side.lend(host.view())?.view(), rank, 0)?;
            side.synchronize()?;
            comm.barrier(ex)?;
        }
        for to in 0..ranks {
            for (first, at, len) in puts(seed, rank, to, ranks) {
                let host = Buffer::from_vec(bytes(first, len), &[len])?;
                window.put(side.lend(host.view())?.view(), to, at)?;
            }
        }
        side.synchronize()?;
        comm.barrier(ex)?;
        for from in 0..ranks {
            for (first, at, len) in puts(seed, from, rank, ranks) {
                want[at..at + len].copy_from_slice(&bytes(first, len));
            }
        }
        // The stream of the steps reads the bytes, and the next round waits for that.
        let mut copy = ex.zeros(DType::U8, &[BYTES])?;
        ex.copy(window.own(0, BYTES)?, copy.view_mut())?;
        window.used_by(ex)?;
        let got = ex.to_host(copy.view())?;
        assert!(got.view().cpu::<u8>()? == want, "rank {rank}, round {seed}");
    }
    let one = ex.zeros(DType::U8, &[1])?;
    for (to, at) in [(rank, BYTES), (ranks, 0)] {
        let error = window.put(one.view(), to, at).unwrap_err().to_string();
        assert!(error.contains(&format!("of rank {to}")), "{error}");
    }
    comm.barrier(ex)
}

#[test]
fn bytes_arrive_where_they_are_put() {
    for ranks in worlds() {
        run_nccl_ranks(ranks, LIMIT, rank_of).into_iter().for_each(|done| done.unwrap());
    }
}
