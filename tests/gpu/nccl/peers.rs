//! Sums over peer memory have the same bits as the sums of in-process CPU ranks, for any size, alignment and value.

use candle_core::{DType, Result};
use moe_comm::{
    AddNorm, Collectives, Communicator, FusedCollective, NcclComm, PeerAllReduce, ReduceOp, run_ranks,
};
use moe_kernels::half::bf16;
use moe_kernels::{Buffer, Exec, PreNorm};

use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, assert_close, assert_error};

/// The peers of a communicator, which these tests require.
pub fn peers_of(comm: &NcclComm) -> &PeerAllReduce {
    comm.peers().unwrap_or_else(|why| panic!("these GPUs cannot share memory: {why}"))
}

/// A copy of host data on the device, `offset` elements after an aligned address.
fn put(host: &Buffer, offset: usize, ex: &Exec) -> Result<Buffer> {
    let mut data = ex.zeros(host.dtype(), &[offset + host.view().elem_count()])?;
    ex.copy_from_host(host.view(), data.view_mut().narrow(offset, host.view().elem_count())?)?;
    Ok(data)
}

/// An array whose contents differ on every rank.
#[derive(Debug)]
struct Case {
    dtype: DType,
    count: usize,
    /// Distance in elements from an aligned address. It is used on odd ranks only, because ranks need not agree.
    offset: usize,
    seed: u64,
}

impl Case {
    fn data(&self, rank: usize) -> Buffer {
        Rng::seeded(self.seed + rank as u64).floats(self.dtype, &[self.count])
    }

    fn on_gpu(&self, comm: &dyn Communicator, ex: &mut Exec) -> Result<Buffer> {
        let offset = self.offset * (comm.rank() % 2);
        let mut data = put(&self.data(comm.rank()), offset, ex)?;
        comm.all_reduce(data.view_mut().narrow(offset, self.count)?, ReduceOp::Sum, ex)?;
        ex.to_host(data.view().narrow(offset, self.count)?)
    }

    fn on_cpu(&self, comm: &dyn Communicator) -> Result<Buffer> {
        let mut data = self.data(comm.rank());
        comm.all_reduce(data.view_mut(), ReduceOp::Sum, &mut Exec::cpu())?;
        Ok(data)
    }
}

/// The sizes are near units, blocks, the limit of one shot on 4 GPUs (87,381 of f32) and the capacity.
fn cases(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let most = PeerAllReduce::CAPACITY / dtype.size_in_bytes();
        let fixed = [0, 1, 3, 4, 7, 8, 9, 511, 2048, 2049, 87_381, 87_384, 87_385, 174_765, most - 1, most];
        let random: Vec<usize> = (0..24).map(|i| rng.below([100, 10_000, most][i % 3])).collect();
        for count in fixed.into_iter().chain(random) {
            all.push(Case { dtype, count, offset: [0, 1, 0, 5][all.len() % 4], seed: rng.bits() });
        }
    }
    all
}

#[test]
fn sums_have_the_bits_of_cpu_ranks() {
    let cases = cases(&mut Rng::new());
    for n in worlds() {
        let expected =
            run_ranks(n, |_, comm| cases.iter().map(|case| case.on_cpu(&comm)).collect::<Result<Vec<_>>>());
        let expected = expected.into_iter().next().unwrap().unwrap();
        let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            cases.iter().map(|case| case.on_gpu(comm, ex).unwrap()).collect::<Vec<_>>()
        });
        for (i, case) in cases.iter().enumerate() {
            for (rank, got) in got.iter().enumerate() {
                assert_eq!(bits(&got[i]), bits(&expected[i]), "rank {rank} of {n}: {case:?}");
            }
        }
    }
}

/// A word of all ones marks data that has not arrived. Data of that pattern is a NaN, and must arrive as one.
#[test]
fn words_that_look_empty_arrive() {
    let empty = f32::from_bits(u32::MAX);
    let one = bf16::from_f32(1.0);
    let wide: Vec<f32> = (0..2050).map(|i| if i % 3 == 0 { empty } else { 1.0 }).collect();
    let narrow: Vec<bf16> =
        (0..2051).map(|i| if i % 3 == 0 { bf16::from_bits(u16::MAX) } else { one }).collect();
    for n in worlds() {
        let results = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let wide = Buffer::from_vec(wide.clone(), &[wide.len()]).unwrap();
            let narrow = Buffer::from_vec(narrow.clone(), &[narrow.len()]).unwrap();
            let sum = |host: &Buffer, ex: &mut Exec| {
                let mut data = put(host, 0, ex).unwrap();
                peers.all_reduce_into(data.view_mut(), ex).unwrap();
                ex.to_host(data.view()).unwrap()
            };
            let sums = [sum(&wide, ex), sum(&narrow, ex)];
            comm.check().unwrap();
            sums
        });
        for rank in &results {
            for (sum, first) in rank.iter().zip(&results[0]) {
                assert_eq!(bits(sum), bits(first));
                for (i, x) in sum.view().to_f32_vec().unwrap().into_iter().enumerate() {
                    assert!(if i % 3 == 0 { x.is_nan() } else { x == n as f32 }, "element {i}: {x}");
                }
            }
        }
    }
}

/// Pairs of T and H: no elements; one unit per thread, fewer and more; clusters with blocks without units; sums in one
/// shot and in two; the largest size that has room.
const ROWS: [(usize, usize); 11] = [
    (0, 2048),
    (1, 2048),
    (1, 8),
    (2, 16_384),
    (3, 1000),
    (5, 5120),
    (33, 2048),
    (64, 2048),
    (100, 4096),
    (250, 520),
    (256, 2048),
];

/// The end of a layer on one rank, on the CPU or a GPU: the residual stream and its norm, or only the stream.
fn add_norm(
    comm: &dyn Communicator,
    (t, h): (usize, usize),
    seed: u64,
    ex: &mut Exec,
) -> Result<[Buffer; 2]> {
    let mut rng = Rng::seeded(seed);
    let residual = rng.floats(DType::F32, &[t, h]);
    let weight = rng.floats(DType::BF16, &[h]);
    let partial = Rng::seeded(seed + 1 + comm.rank() as u64).floats(DType::F32, &[t, h]);
    let put = |host: Buffer| {
        let mut data = ex.zeros(host.dtype(), host.dims())?;
        ex.copy_from_host(host.view(), data.view_mut())?;
        Ok::<_, candle_core::Error>(data)
    };
    let mut residual = put(residual)?;
    let weight = put(weight)?;
    let mut partial = put(partial)?;
    let mut out = ex.zeros(DType::BF16, &[t, h])?;
    let norm = PreNorm { weight: weight.view(), eps: 1e-6 };
    let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
    FusedCollective::AllReduceAddNorm { partial: partial.view_mut(), end }.run(comm, ex)?;
    Ok([ex.to_host(residual.view())?, ex.to_host(out.view())?])
}

#[test]
fn additions_and_norms_agree() {
    let seed = Rng::new().bits();
    for n in worlds() {
        for (i, shape) in ROWS.into_iter().enumerate() {
            let seed = seed + 100 * i as u64;
            let expected = run_ranks(n, |_, comm| add_norm(&comm, shape, seed, &mut Exec::cpu()));
            let [residual, out] = expected.into_iter().next().unwrap().unwrap();
            let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
                let peers = peers_of(comm);
                assert!(peers.fits_norm(shape.0, shape.1));
                add_norm(comm, shape, seed, ex).unwrap()
            });
            for (rank, got) in got.iter().enumerate() {
                assert_eq!(bits(&got[0]), bits(&residual), "rank {rank} of {n}, {shape:?}");
                assert_close(&format!("norm on rank {rank} of {n}, {shape:?}"), &out, &got[1], 1e-6);
            }
            let first = bits(&got[0][1]);
            assert!(got.iter().all(|rank| bits(&rank[1]) == first), "{n} ranks differ, {shape:?}");
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let peers = peers_of(comm);
        let mut large = ex.zeros(DType::F32, &[PeerAllReduce::CAPACITY / 4 + 1]).unwrap();
        assert_error(
            peers.all_reduce_into(large.view_mut(), ex),
            &["at most 2097152 bytes", "524289 elements"],
        );
        let mut half = ex.zeros(DType::F16, &[8]).unwrap();
        assert_error(peers.all_reduce_into(half.view_mut(), ex), &["expected f32 or bf16", "f16"]);
        let partial = ex.zeros(DType::F32, &[2, 12]).unwrap();
        let mut odd = ex.zeros(DType::F32, &[2, 12]).unwrap();
        let result = peers.all_reduce_add_norm_into(partial.view(), odd.view_mut(), None, ex);
        assert_error(result, &["a multiple of 8", "[2, 12]"]);
        let mut narrow = ex.zeros(DType::F32, &[2, 8]).unwrap();
        let result = peers.all_reduce_add_norm_into(partial.view(), narrow.view_mut(), None, ex);
        assert_error(result, &["residual", "[2, 12]", "[2, 8]"]);
        // None of these attempts counted as a call, so the ranks still agree.
        let mut one = ex.zeros(DType::F32, &[1]).unwrap();
        peers.all_reduce_into(one.view_mut(), ex).unwrap();
        ex.synchronize().unwrap();
        peers.check().unwrap();
    });
}
