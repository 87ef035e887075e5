//! Row-parallel products over ranks have the bits of one rank.

use std::sync::Arc;

use half::bf16;
use moe_comm::candle::Result;
use moe_comm::{
    Communicator, Exec, ParallelConfig, RowParallel, ThreadComm, View, ViewMut, reduce_segments_into,
    run_ranks, run_ranks_with,
};
use moe_kernels::linear_row_parallel_into;
use proptest::prelude::*;

use crate::support::{Value, bits, text};

/// The product on one rank and the product on `tp` ranks, as bits.
fn products<T: Value, O: Value>(
    (t, n, k): (usize, usize, usize),
    tp: usize,
    with_bias: bool,
    seed: u64,
) -> Vec<Vec<u64>> {
    let x = T::randoms(seed, t * k);
    let w = T::randoms(!seed, n * k);
    let bias = T::randoms(seed ^ 7, n);
    let bias = || with_bias.then(|| View::new(&bias, &[n]).unwrap());
    let mut whole = O::randoms(1, t * n);
    let vx = View::new(&x, &[t, k]).unwrap();
    let vw = View::new(&w, &[n, k]).unwrap();
    let out = ViewMut::new(&mut whole, &[t, n]).unwrap();
    linear_row_parallel_into(vx, vw, bias(), out, &mut Exec::cpu()).unwrap();
    let part = |m: &[T], rank: usize| -> Vec<T> {
        m.chunks(k).flat_map(|row| row[rank * k / tp..(rank + 1) * k / tp].to_vec()).collect()
    };
    let ranks = run_ranks(tp, |rank, comm| {
        let geometry = ParallelConfig { tp, ..Default::default() }.geometry(rank)?;
        let product = RowParallel::new(&geometry.row_shard("K", k)?, Arc::new(comm))?;
        let x = part(&x, rank);
        let w = part(&w, rank);
        let mut out = O::randoms(2, t * n);
        let x = View::new(&x, &[t, k / tp])?;
        let w = View::new(&w, &[n, k / tp])?;
        product.linear_into(x, w, bias(), ViewMut::new(&mut out, &[t, n])?, &mut Exec::cpu())?;
        Ok(bits(&out))
    });
    std::iter::once(bits(&whole)).chain(ranks.into_iter().map(Result::unwrap)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_rank_has_the_bits_of_one(
        t in 0usize..9, n in 1usize..20, part in 1usize..20, tp in prop::sample::select(vec![1usize, 2, 4, 8]),
        bias: bool, dtype in 0usize..3, seed: u64,
    ) {
        let sizes = (t, n, 8 * part);
        let all = match dtype {
            0 => products::<f32, f32>(sizes, tp, bias, seed),
            1 => products::<bf16, f32>(sizes, tp, bias, seed),
            _ => products::<bf16, bf16>(sizes, tp, bias, seed),
        };
        for rank in &all[1..] {
            prop_assert_eq!(rank, &all[0]);
        }
    }
}

#[test]
fn a_wrong_shard_or_share_is_refused() {
    let geometry = |tp, rank| ParallelConfig { tp, ..Default::default() }.geometry(rank).unwrap();
    let comm: Arc<dyn Communicator> = Arc::new(ThreadComm::world(2).remove(0));
    for (tp, rank) in [(4, 0), (2, 1), (1, 0)] {
        let shard = geometry(tp, rank).row_shard("K", 16).unwrap();
        let e = text(RowParallel::new(&shard, comm.clone()).unwrap_err());
        assert!(e.contains("are not the part of rank 0 of 2"), "{e}");
    }
    let partials = [0f32; 12];
    let partials = View::new(&partials, &[2, 3, 2]).unwrap();
    let mut out = [0f32; 4];
    let e = text(
        reduce_segments_into(
            comm.as_ref(),
            partials,
            &[],
            ViewMut::new(&mut out, &[2, 2]).unwrap(),
            &mut Exec::cpu(),
        )
        .unwrap_err(),
    );
    assert!(e.contains("expected a share for each of 2 ranks, got []"), "{e}");
}

/// If ranks pass different numbers of rows, all get an error, from the collective that notices it.
#[test]
fn ranks_with_different_rows_all_fail() {
    let world = ThreadComm::world_with_timeout(4, std::time::Duration::from_secs(20));
    let results = run_ranks_with(world, |rank, comm| {
        let geometry = ParallelConfig { tp: 4, ..Default::default() }.geometry(rank)?;
        let product = RowParallel::new(&geometry.row_shard("K", 32)?, Arc::new(comm))?;
        let t = if rank == 2 { 3 } else { 4 };
        let x = vec![1f32; t * 8];
        let w = vec![1f32; 5 * 8];
        let mut out = vec![0f32; t * 5];
        let x = View::new(&x, &[t, 8])?;
        let w = View::new(&w, &[5, 8])?;
        product.linear_into(x, w, None, ViewMut::new(&mut out, &[t, 5])?, &mut Exec::cpu())
    });
    for result in results {
        let e = text(result.unwrap_err());
        assert!(e.contains("disagree") || e.contains("failed"), "{e}");
    }
}
