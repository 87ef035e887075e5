//! A residual stream of which each rank keeps some rows gives the same norms as one that all ranks keep completely.

use half::bf16;
use moe_comm::candle::Result;
use moe_comm::{
    AddNorm, Communicator, Exec, FusedCollective, PreNorm, RowNeeds, View, ViewMut, partition, run_ranks,
};
use proptest::prelude::*;

use crate::support::{Value, bits};

const LAYERS: u64 = 3;

/// The norms after some sub-layers on one rank, and its residual stream.
fn layers(
    comm: &dyn Communicator,
    (t, h): (usize, usize),
    shared: bool,
    seed: u64,
) -> Result<(Vec<u64>, Vec<f32>)> {
    let mut residual = f32::randoms(seed, t * h);
    let weight = bf16::randoms(!seed, h);
    let mut out = vec![bf16::ZERO; t * h];
    let ex = &mut Exec::cpu();
    for layer in 0..LAYERS {
        let mut partial = f32::randoms(seed ^ (100 * (layer + 1) + comm.rank() as u64), t * h);
        let norm = PreNorm { weight: View::new(&weight, &[h])?, eps: 1e-6 };
        let residual = ViewMut::new(&mut residual, &[t, h])?;
        let end = AddNorm { residual, norm, out: ViewMut::new(&mut out, &[t, h])? };
        let partial = ViewMut::new(&mut partial, &[t, h])?;
        match shared {
            true => FusedCollective::ShareAddNorm { partial, end }.run(comm, ex)?,
            false => FusedCollective::AllReduceAddNorm { partial, end }.run(comm, ex)?,
        }
    }
    Ok((bits(&out), residual))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn norms_are_those_of_whole_streams(t in 0usize..9, h in 1usize..20, n in 1usize..5, seed: u64) {
        let run = |shared| {
            let ranks = run_ranks(n, |_, comm| layers(&comm, (t, h), shared, seed));
            ranks.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        for (rank, (whole, shared)) in run(false).into_iter().zip(run(true)).enumerate() {
            prop_assert_eq!(&whole.0, &shared.0, "norm on rank {}", rank);
            let kept = partition(t, n, rank);
            let begin = f32::randoms(seed, t * h);
            for row in 0..t {
                let range = row * h..(row + 1) * h;
                let want = if kept.contains(&row) { &whole.1 } else { &begin };
                prop_assert_eq!(bits(&want[range.clone()]), bits(&shared.1[range]), "row {} on rank {}", row, rank);
            }
        }
    }
}

/// Ranks without fused collectives send all rows, not only the needed ones.
#[test]
fn needed_rows_and_their_sums_travel() {
    let counts = [2, 0, 1];
    let got = run_ranks(3, |rank, comm| {
        let ids = [0u32, 2, u32::MAX];
        let owners = [2u32, 1, 0];
        let ex = &mut Exec::cpu();
        let needs = Some(RowNeeds { ids: View::new(&ids, &[3, 1])?, owners: View::new(&owners, &[3])? });
        let counts = &counts[..];
        let rows = vec![10.0 + rank as f32; counts[rank]];
        let mut all = [0f32; 3];
        let arrays = vec![(View::new(&rows, &[counts[rank], 1])?, ViewMut::new(&mut all, &[3, 1])?)];
        FusedCollective::Gather { arrays, counts, needs }.run(&comm, ex)?;
        // Rank 2 owns the expert of row 0, rank 0 owns the expert of row 1, and no rank needs row 2.
        let sums = [[0.0, 5.0, 0.0], [0.0; 3], [7.0, 0.0, 0.0]][rank];
        let mut own = vec![1f32; counts[rank]];
        let out = ViewMut::new(&mut own, &[counts[rank], 1])?;
        let sums = View::new(&sums, &[3, 1])?;
        FusedCollective::ScatterSums { sums, counts, needs, out }.run(&comm, ex)?;
        Ok((all, own))
    });
    let got: Vec<_> = got.into_iter().map(Result::unwrap).collect();
    assert!(got.iter().all(|(all, _)| *all == [10.0, 10.0, 12.0]));
    assert_eq!(got.into_iter().map(|(_, own)| own).collect::<Vec<_>>(), [vec![7.0, 5.0], vec![], vec![0.0]]);
}

/// Ranks without fused collectives add rounded parts in f32 and round the sum to the same dtype.
#[test]
fn rounded_parts_are_summed() {
    let counts = [1, 2];
    let got = run_ranks(2, |rank, comm| {
        let parts = [[1.0, 256.0, -3.0], [0.5, 1.0, 3.0]][rank].map(bf16::from_f32);
        let mut own = vec![0f32; counts[rank]];
        let ex = &mut Exec::cpu();
        let out = ViewMut::new(&mut own, &[counts[rank], 1])?;
        let sums = View::new(&parts, &[3, 1])?;
        FusedCollective::ScatterSums { sums, counts: &counts, needs: None, out }.run(&comm, ex)?;
        Ok(own)
    });
    let got: Vec<_> = got.into_iter().map(Result::unwrap).collect();
    // 257 is halfway between two bf16 numbers, and the lower one is even.
    assert_eq!(got, [vec![1.5], vec![256.0, 0.0]]);
}
