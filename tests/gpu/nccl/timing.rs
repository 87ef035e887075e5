//! Measures how long collectives take: a table for docs/benchmarks.md, and bounds that only a broken set-up exceeds.

use std::fmt::Write;
use std::time::Instant;

use candle_core::{DType, Result};
use moe_comm::{AddNorm, Collectives, Communicator, FusedCollective, NcclComm, ReduceOp, RowNeeds};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, PreNorm, SlotRouting, SlotRows, add_rms_norm_into};

use super::peers::peers_of;
use super::{LIMIT, run_nccl_ranks, worlds};

const HIDDEN: usize = 2048;
/// Number of collectives in one recorded graph.
const RECORDED: usize = 50;

/// Microseconds of one of `count` runs, after some runs that warm up.
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

/// Microseconds of one of the `RECORDED` calls of a graph.
fn replayed(comm: &NcclComm, ex: &mut Exec, mut call: impl FnMut(&mut Exec) -> Result<()>) -> Result<f64> {
    call(ex)?;
    let mut graph = Graph::capture(ex, |ex| (0..RECORDED).try_for_each(|_| call(ex)))?;
    Ok(time(comm, ex, 20, |_| graph.launch())? / RECORDED as f64)
}

/// Microseconds of an all-reduce, as a direct call and replayed.
fn all_reduce(comm: &NcclComm, data: &mut Buffer, ex: &mut Exec) -> Result<(f64, f64)> {
    let mut call = |ex: &mut Exec| comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex);
    let eager = time(comm, ex, 200, &mut call)?;
    Ok((eager, replayed(comm, ex, call)?))
}

/// Microseconds for f32 rows, first over NCCL and then over peer memory: of the sum, and of `AllReduceAddNorm`. The
/// last figure is `ShareAddNorm`.
fn peer_row(comm: &NcclComm, tokens: usize, ex: &mut Exec) -> Result<[f64; 5]> {
    let mut data = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let mut residual = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let weight = ex.zeros(DType::BF16, &[HIDDEN])?;
    let mut out = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
    // The kernel is loaded here, and not while the collective of another rank waits for this rank.
    add_rms_norm_into(data.view(), weight.view(), 1e-6, residual.view_mut(), out.view_mut(), ex)?;
    ex.synchronize()?;
    let norm = PreNorm { weight: weight.view(), eps: 1e-6 };
    let mut all = [0.0; 5];
    for (over_peers, times) in [false, true].into_iter().zip(all.chunks_mut(2)) {
        comm.use_peers(over_peers);
        times[0] = replayed(comm, ex, |ex| comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex))?;
        times[1] = replayed(comm, ex, |ex| {
            let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
            FusedCollective::AllReduceAddNorm { partial: data.view_mut(), end }.run(comm, ex)
        })?;
    }
    all[4] = replayed(comm, ex, |ex| {
        let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
        FusedCollective::ShareAddNorm { partial: data.view_mut(), end }.run(comm, ex)
    })?;
    Ok(all)
}

#[test]
fn peer_table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            let mut text =
                format!("all_reduce over peer memory, {n} GPUs, f32 rows of {HIDDEN}, us in a graph:\n");
            text += "| tokens | NCCL | NCCL, then add + norm | peers | peers with add + norm | the same of shares |\n|---|---|---|---|---|---|\n";
            for tokens in (0..=8).map(|i| 1 << i) {
                let [nccl, separate, peers, fused, shared] = peer_row(comm, tokens, ex)?;
                writeln!(
                    text,
                    "| {tokens} | {nccl:.1} | {separate:.1} | {peers:.1} | {fused:.1} | {shared:.1} |"
                )
                .unwrap();
                assert!(peers < 1000.0 && fused < 1000.0 && shared < 1000.0, "{text}");
            }
            comm.check()?;
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}

/// The exchange of a sparse layer over NCCL and over peer memory: rows in bf16 with 8 ids and weights to all ranks,
/// sums in f32 back. The last figure is with sums in bf16.
fn exchange_row(comm: &NcclComm, tokens: usize, ex: &mut Exec) -> Result<[f64; 5]> {
    let n = comm.world_size();
    let rows = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
    let mut all_rows = ex.zeros(DType::BF16, &[n * tokens, HIDDEN])?;
    let ids = ex.zeros(DType::U32, &[tokens, 8])?;
    let mut all_ids = ex.zeros(DType::U32, &[n * tokens, 8])?;
    let weights = ex.zeros(DType::F32, &[tokens, 8])?;
    let mut all_weights = ex.zeros(DType::F32, &[n * tokens, 8])?;
    let sums = ex.zeros(DType::F32, &[n * tokens, HIDDEN])?;
    let mut back = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let narrow = ex.zeros(DType::BF16, &[n * tokens, HIDDEN])?;
    let counts = vec![tokens; n];
    let mut all = [0.0; 5];
    for (over_peers, times) in [false, true].into_iter().zip(all.chunks_mut(2)) {
        comm.use_peers(over_peers);
        times[0] = replayed(comm, ex, |ex| {
            let arrays = vec![
                (rows.view(), all_rows.view_mut()),
                (ids.view(), all_ids.view_mut()),
                (weights.view(), all_weights.view_mut()),
            ];
            FusedCollective::Gather { arrays, counts: &counts, needs: None }.run(comm, ex)
        })?;
        times[1] = replayed(comm, ex, |ex| {
            comm.reduce_scatter_v(sums.view(), &counts, back.view_mut(), ReduceOp::Sum, ex)
        })?;
    }
    all[4] = replayed(comm, ex, |ex| {
        let sums = narrow.view();
        let out = back.view_mut();
        FusedCollective::ScatterSums { sums, counts: &counts, needs: None, out }.run(comm, ex)
    })?;
    Ok(all)
}

/// The end of a sub-layer for thousands of rows: all rows on every rank over NCCL, a share on each rank over NCCL, a
/// share on each rank over peer memory.
fn share_row(comm: &NcclComm, tokens: usize, ex: &mut Exec) -> Result<[f64; 3]> {
    let weight = ex.zeros(DType::BF16, &[HIDDEN])?;
    let mut out = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
    let mut data = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let mut residual = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let mut run = |shared: bool, ex: &mut Exec| {
        let norm = PreNorm { weight: weight.view(), eps: 1e-6 };
        let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
        let partial = data.view_mut();
        match shared {
            true => FusedCollective::ShareAddNorm { partial, end }.run(comm, ex),
            false => FusedCollective::AllReduceAddNorm { partial, end }.run(comm, ex),
        }
    };
    comm.use_peers(false);
    let mut all = [0.0; 3];
    for (shared, time_of) in [false, true].into_iter().zip(&mut all) {
        *time_of = time(comm, ex, 30, |ex| run(shared, ex))?;
    }
    comm.use_peers(true);
    all[2] = time(comm, ex, 30, |ex| run(true, ex))?;
    Ok(all)
}

#[test]
fn share_table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            let mut text = format!("sums, addition and norm of rows of {HIDDEN}, {n} GPUs, us:\n");
            text += "| tokens | NCCL, all rows | NCCL, shares | peers, shares |\n|---|---|---|---|\n";
            for tokens in [257, 512, 1024, 2048, 4096, 8192, 32_768] {
                let [whole, nccl, peers] = share_row(comm, tokens, ex)?;
                writeln!(text, "| {tokens} | {whole:.1} | {nccl:.1} | {peers:.1} |").unwrap();
                assert!(peers < 20_000.0, "{text}");
            }
            comm.check()?;
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}

#[test]
fn exchange_table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            let mut text =
                format!("gather of rows, ids, weights and reduce-scatter, {n} GPUs, us in a graph:\n");
            text += "| tokens of a rank | NCCL, gather | NCCL, scatter | peers, gather | peers, scatter | of bf16 |\n|---|---|---|---|---|---|\n";
            for tokens in (0..=8).map(|i| 1 << i).chain([1024, 4096, 8192]) {
                let [gather, scatter, by_peers, back, narrow] = exchange_row(comm, tokens, ex)?;
                writeln!(
                    text,
                    "| {tokens} | {gather:.1} | {scatter:.1} | {by_peers:.1} | {back:.1} | {narrow:.1} |"
                )
                .unwrap();
                assert!(by_peers < 20_000.0 && back < 20_000.0 && narrow < 20_000.0, "{text}");
            }
            comm.check()?;
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}

#[test]
fn table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            comm.use_peers(false);
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
            let reduce = 2e-3 * moved / reduce;
            let exchange = 1e-3 * moved / exchange;
            writeln!(text, "64 MiB: all_reduce {reduce:.0} GB/s, all_to_all {exchange:.0} GB/s per GPU")
                .unwrap();
            assert!(reduce > 1.0 && exchange > 1.0, "{text}");
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}

/// The way to the experts and back for rows in bf16 with 8 ids and weights, of which a part of `needed` percent has an
/// expert on another rank: as a gather of all rows, and as a dispatch; then the sums with addition and norm, of all
/// rows and of the needed ones.
fn dispatch_row(comm: &NcclComm, tokens: usize, needed: usize, ex: &mut Exec) -> Result<[f64; 4]> {
    let n = comm.world_size();
    let rank = comm.rank();
    // Expert r is on rank r. A token chooses its own rank's expert, and some choose all of them.
    let chosen = |row: usize, k: usize| {
        let own = row / tokens;
        if (row % tokens) * 100 < needed * tokens { (own + k) % n } else { own }
    };
    let everything = (0..n * tokens).flat_map(|row| (0..8).map(move |k| chosen(row, k) as u32));
    let host = Buffer::from_vec(everything.collect::<Vec<_>>(), &[n * tokens, 8])?;
    let owners_of = Buffer::from_vec((0..n as u32).collect::<Vec<_>>(), &[n])?;
    let map_of: Vec<i32> = (0..n).map(|expert| if expert == rank { 0 } else { -1 }).collect();
    let map_of = Buffer::from_vec(map_of, &[n])?;
    let mut ids = ex.zeros(DType::U32, &[tokens, 8])?;
    let mut all_ids = ex.zeros(DType::U32, &[n * tokens, 8])?;
    let mut owners = ex.zeros(DType::U32, &[n])?;
    let mut map = ex.zeros(DType::I32, &[n])?;
    ex.copy_from_host(host.view().narrow(rank * tokens, tokens)?, ids.view_mut())?;
    ex.copy_from_host(host.view(), all_ids.view_mut())?;
    ex.copy_from_host(owners_of.view(), owners.view_mut())?;
    ex.copy_from_host(map_of.view(), map.view_mut())?;
    let rows = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
    let mut all_rows = ex.zeros(DType::BF16, &[n * tokens, HIDDEN])?;
    let weights = ex.zeros(DType::F32, &[tokens, 8])?;
    let mut all_weights = ex.zeros(DType::F32, &[n * tokens, 8])?;
    let slots = ex.zeros(DType::F32, &[n * tokens, 8, HIDDEN])?;
    let gain = ex.zeros(DType::BF16, &[HIDDEN])?;
    let mut residual = ex.zeros(DType::F32, &[tokens, HIDDEN])?;
    let mut out = ex.zeros(DType::BF16, &[tokens, HIDDEN])?;
    let counts = vec![tokens; n];
    let gather = replayed(comm, ex, |ex| {
        let arrays = vec![
            (ids.view(), all_ids.view_mut()),
            (rows.view(), all_rows.view_mut()),
            (weights.view(), all_weights.view_mut()),
        ];
        FusedCollective::Gather { arrays, counts: &counts, needs: None }.run(comm, ex)
    })?;
    let dispatch = replayed(comm, ex, |ex| {
        let rows = (rows.view(), all_rows.view_mut());
        let ids = (ids.view(), all_ids.view_mut());
        let weights = (weights.view(), all_weights.view_mut());
        FusedCollective::Dispatch { rows, ids, weights, counts: &counts, owners: owners.view() }.run(comm, ex)
    })?;
    let mut back = [0.0; 2];
    for (part, time) in [false, true].into_iter().zip(&mut back) {
        let routing = SlotRouting {
            topk_ids: all_ids.view(),
            topk_weights: all_weights.view(),
            expert_map: Some(map.view()),
        };
        let slots = SlotRows { rows: slots.view(), routing: Some(routing) };
        let needs = part.then(|| RowNeeds { ids: all_ids.view(), owners: owners.view() });
        *time = replayed(comm, ex, |ex| {
            let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
            let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
            FusedCollective::CombineAddNorm { slots, counts: &counts, needs, end }.run(comm, ex)
        })?;
    }
    Ok([gather, dispatch, back[0], back[1]])
}

#[test]
fn dispatch_table() {
    for n in worlds() {
        let tables = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            let mut text = format!("gather or dispatch, and sums with norm, {n} GPUs, us in a graph:\n");
            text += "| tokens of a rank | needed elsewhere, % | gather | dispatch | sums of all rows | of needed rows |\n|---|---|---|---|---|---|\n";
            for tokens in [1, 8, 32, 64, 256] {
                for needed in [0, 50, 100] {
                    let [gather, dispatch, all, part] = dispatch_row(comm, tokens, needed, ex)?;
                    writeln!(
                        text,
                        "| {tokens} | {needed} | {gather:.1} | {dispatch:.1} | {all:.1} | {part:.1} |"
                    )
                    .unwrap();
                    assert!(dispatch < 1000.0 && part < 1000.0, "{text}");
                }
            }
            comm.check()?;
            Ok::<_, candle_core::Error>(text)
        });
        println!("{}", tables.into_iter().next().unwrap().unwrap());
    }
}
