//! Translates collectives into the calls that NCCL's library has: which rank passes which rows to which rank.
//!
//! A collective with counts is a group of calls that NCCL runs as one: a broadcast per rank for gathering, a reduction
//! per rank for scattering, a send and a receive per pair of ranks. Only the host uses the counts. If all counts are
//! equal, the library's own collective is used, which is faster.
#![cfg_attr(not(feature = "nccl"), allow(dead_code))] // without NCCL only its tests use it

use candle_core::Result;
use moe_kernels::{View, ViewMut};

use crate::check::Place;
use crate::collective::{ReduceOp, RowNeeds};

/// A call that the library makes with the views of a [`Part`].
#[derive(Clone, Copy)]
pub(crate) enum Verb {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast { root: usize },
    Reduce { op: ReduceOp, root: usize },
    Send { to: usize },
    Recv { from: usize },
}

/// One call of the library. Without `input`, the data in the output is the input. Ranks that receive nothing have no
/// output. The argument checks have compared all sizes before.
pub(crate) struct Part<'a> {
    pub verb: Verb,
    pub input: Option<View<'a>>,
    pub out: Option<ViewMut<'a>>,
}

/// A collective on views of the device, before it is decided whether NCCL or peer memory carries it.
pub(crate) enum Request<'v, 'c> {
    /// Sends each rank's rows of several arrays, given as inputs and outputs, to all ranks.
    Gather { arrays: Vec<(View<'v>, ViewMut<'v>)>, counts: &'c [usize], needs: Option<&'c RowNeeds<'c>> },
    /// Sends sums of rows to the ranks that own the rows.
    Scatter {
        input: View<'v>,
        counts: &'c [usize],
        out: ViewMut<'v>,
        op: ReduceOp,
        needs: Option<&'c RowNeeds<'c>>,
    },
    /// Reduces an array in place.
    Reduce { data: ViewMut<'v>, op: ReduceOp },
    /// Calls that only the library can make.
    Parts(Vec<Part<'v>>),
}

impl<'v> Request<'v, '_> {
    /// Translates the request into calls of the library, which sends all rows.
    pub fn parts(self, place: Place) -> Result<Vec<Part<'v>>> {
        match self {
            Self::Gather { arrays, counts, .. } => {
                let mut all = Vec::new();
                for (input, out) in arrays {
                    all.extend(gather_parts(place, input, out, counts)?);
                }
                Ok(all)
            }
            Self::Scatter { input, counts, out, op, .. } => scatter_parts(place, input, out, counts, op),
            Self::Reduce { data, op } => Ok(vec![one(Verb::AllReduce(op), None, data)]),
            Self::Parts(parts) => Ok(parts),
        }
    }
}

/// Splits a view into consecutive views of `counts` rows.
fn runs<'a>(view: View<'a>, counts: &[usize]) -> Result<Vec<View<'a>>> {
    let mut start = 0;
    let run = |&count: &usize| {
        let run = view.narrow(start, count);
        start += count;
        run
    };
    counts.iter().map(run).collect()
}

/// Like [`runs`], for a writable view.
fn runs_mut<'a>(view: ViewMut<'a>, counts: &[usize]) -> Result<Vec<ViewMut<'a>>> {
    let mut rest = view;
    let mut all = Vec::with_capacity(counts.len());
    for &count in counts {
        let (run, after) = rest.split_at(count)?;
        all.push(run);
        rest = after;
    }
    Ok(all)
}

fn all_equal(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

/// A broadcast of each rank's rows to their place in the output.
fn gather_parts<'v>(
    place: Place,
    input: View<'v>,
    out: ViewMut<'v>,
    counts: &[usize],
) -> Result<Vec<Part<'v>>> {
    if all_equal(counts) {
        return Ok(vec![one(Verb::AllGather, Some(input), out)]);
    }
    let part = |(root, out)| Part {
        verb: Verb::Broadcast { root },
        input: (root == place.rank).then_some(input),
        out: Some(out),
    };
    Ok(runs_mut(out, counts)?.into_iter().enumerate().map(part).collect())
}

/// A reduction of each rank's rows, with that rank as the root.
fn scatter_parts<'v>(
    place: Place,
    input: View<'v>,
    out: ViewMut<'v>,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Vec<Part<'v>>> {
    if all_equal(counts) {
        return Ok(vec![one(Verb::ReduceScatter(op), Some(input), out)]);
    }
    let mut out = Some(out);
    let part = |(root, rows)| Part {
        verb: Verb::Reduce { op, root },
        input: Some(rows),
        out: if root == place.rank { out.take() } else { None },
    };
    Ok(runs(input, counts)?.into_iter().enumerate().map(part).collect())
}

/// A send to and a receive from each rank.
pub(crate) fn exchange_parts<'v>(
    input: View<'v>,
    send: &[usize],
    out: ViewMut<'v>,
    recv: &[usize],
) -> Result<Vec<Part<'v>>> {
    let sends = runs(input, send)?.into_iter().enumerate();
    let sends = sends.map(|(to, rows)| Part { verb: Verb::Send { to }, input: Some(rows), out: None });
    let recvs = runs_mut(out, recv)?.into_iter().enumerate();
    let recvs = recvs.map(|(from, rows)| Part { verb: Verb::Recv { from }, input: None, out: Some(rows) });
    Ok(sends.chain(recvs).collect())
}

/// A list of one call.
pub(crate) fn one<'v>(verb: Verb, input: Option<View<'v>>, out: ViewMut<'v>) -> Part<'v> {
    Part { verb, input, out: Some(out) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(data: &[u32], width: usize) -> View<'_> {
        View::new(data, &[data.len() / width, width]).unwrap()
    }

    #[test]
    fn runs_cover_the_rows_in_order() {
        let mut data: Vec<u32> = (0..12).collect();
        let counts = [1, 0, 3, 2];
        let firsts = |lens: Vec<Option<u32>>| assert_eq!(lens, [Some(0), None, Some(2), Some(8)]);
        let all = runs(view(&data, 2), &counts).unwrap();
        firsts(all.iter().map(|run| run.cpu::<u32>().unwrap().first().copied()).collect());
        assert_eq!(all.iter().map(View::rows).collect::<Vec<_>>(), counts);
        let out = ViewMut::new(&mut data, &[6, 2]).unwrap();
        let all = runs_mut(out, &counts).unwrap();
        firsts(all.iter().map(|run| run.as_view().cpu::<u32>().unwrap().first().copied()).collect());
        assert!(runs(view(&[1, 2], 1), &[1, 2]).is_err());
    }

    /// In a group of calls every rank names the same roots in the same order, and what one rank sends the other
    /// receives.
    #[test]
    fn each_rank_is_root_once_and_owns_its_part() {
        let input = [1u32, 2];
        let mut out = [0u32; 6];
        let counts = [1, 2, 3];
        let place = Place { rank: 1, size: 3 };
        let out = ViewMut::new(&mut out, &[6, 1]).unwrap();
        let parts = gather_parts(place, view(&input, 1), out, &counts).unwrap();
        let roots = |part: &Part| match part.verb {
            Verb::Broadcast { root } | Verb::Reduce { root, .. } => root,
            _ => usize::MAX,
        };
        assert_eq!(parts.iter().map(roots).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(parts.iter().map(|p| p.input.is_some()).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(parts.iter().map(|p| p.out.as_ref().unwrap().rows()).collect::<Vec<_>>(), counts);

        let input = [0u32; 6];
        let mut out = [0u32; 2];
        let out = ViewMut::new(&mut out, &[2, 1]).unwrap();
        let parts = scatter_parts(place, view(&input, 1), out, &counts, ReduceOp::Sum).unwrap();
        assert_eq!(parts.iter().map(roots).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(parts.iter().map(|p| p.out.is_some()).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(parts.iter().map(|p| p.input.unwrap().rows()).collect::<Vec<_>>(), counts);
    }

    #[test]
    fn equal_counts_are_one_call() {
        let input = [7u32, 8];
        let place = Place { rank: 1, size: 3 };
        let mut all = [0u32; 6];
        let mut own = [0u32; 2];
        let out = ViewMut::new(&mut all, &[6, 1]).unwrap();
        let parts = gather_parts(place, view(&input, 1), out, &[2, 2, 2]).unwrap();
        assert!(matches!(parts[..], [Part { verb: Verb::AllGather, input: Some(_), out: Some(_) }]));
        let out = ViewMut::new(&mut own, &[2, 1]).unwrap();
        let parts = scatter_parts(place, view(&all, 1), out, &[2, 2, 2], ReduceOp::Max).unwrap();
        assert!(matches!(
            parts[..],
            [Part { verb: Verb::ReduceScatter(ReduceOp::Max), input: Some(_), out: Some(_) }]
        ));
    }

    #[test]
    fn an_exchange_sends_to_and_receives_from_each_rank() {
        let input = [7u32, 8, 9];
        let mut out = [0u32; 4];
        let out = ViewMut::new(&mut out, &[4, 1]).unwrap();
        let parts = exchange_parts(view(&input, 1), &[0, 3], out, &[4, 0]).unwrap();
        let pairs = |part: &Part| match part.verb {
            Verb::Send { to } => (true, to, part.input.unwrap().rows()),
            Verb::Recv { from } => (false, from, part.out.as_ref().unwrap().rows()),
            _ => panic!("neither sends nor receives"),
        };
        let expected = [(true, 0, 0), (true, 1, 3), (false, 0, 4), (false, 1, 0)];
        assert_eq!(parts.iter().map(pairs).collect::<Vec<_>>(), expected);
    }
}
