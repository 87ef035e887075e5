//! Compares every collective with its definition on one thread, for random worlds and row counts.

use std::time::Duration;

use half::{bf16, f16};
use moe_comm::candle::Result;
use moe_comm::{
    AddNorm, Collectives, Communicator, Exec, FusedCollective, PreNorm, ReduceOp, SelfComm, SocketComm,
    ThreadComm, View, ViewMut,
};
use proptest::prelude::*;

use crate::support::{Stream, Value, World, bits, over_both, run, view, view_mut};

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// One random set of arguments for all collectives.
#[derive(Clone, Debug)]
struct Case {
    world: usize,
    /// Elements per row.
    row: usize,
    /// Rows of each rank. The first entry is also the count of the collectives with equal counts.
    counts: Vec<usize>,
    /// Number of rows from each rank to each rank.
    matrix: Vec<Vec<usize>>,
    op: ReduceOp,
    root: usize,
    seed: u64,
    /// Whether the ranks arrive in a random order.
    jitter: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    (1..=6usize).prop_flat_map(|world| {
        let counts = prop::collection::vec(0..5usize, world);
        let matrix = prop::collection::vec(prop::collection::vec(0..4usize, world), world);
        (0..4usize, counts, matrix, 0..3usize, 0..world, any::<u64>(), any::<bool>()).prop_map(
            move |(row, counts, matrix, op, root, seed, jitter)| Case {
                world,
                row,
                counts,
                matrix,
                op: OPS[op],
                root,
                seed,
                jitter,
            },
        )
    })
}

/// The name and the result of each collective on one rank.
type Outputs = Vec<(&'static str, Vec<u64>)>;

impl Case {
    /// The rows that rank `r` passes to collective number `i`.
    fn input<T: Value>(&self, i: u64, r: usize, rows: usize) -> Vec<T> {
        T::randoms(self.seed ^ (i << 32) ^ r as u64, rows * self.row)
    }

    fn total(&self) -> usize {
        self.counts.iter().sum()
    }

    fn before(&self, rank: usize) -> usize {
        self.counts[..rank].iter().sum()
    }

    fn sent(&self, rank: usize) -> usize {
        self.matrix[rank].iter().sum()
    }

    fn received(&self, rank: usize) -> Vec<usize> {
        self.matrix.iter().map(|row| row[rank]).collect()
    }

    fn pause(&self, stream: &mut Stream) {
        if self.jitter {
            std::thread::sleep(Duration::from_micros(stream.next() % 200));
        }
    }

    /// Calls every collective as one rank.
    fn run<T: Value>(&self, rank: usize, comm: &dyn Communicator) -> Result<Outputs> {
        let mut ex = Exec::cpu();
        let mut stream = Stream(self.seed ^ rank as u64);
        let n = self.world;
        let row = self.row;
        let equal = self.counts[0];
        let own = self.counts[rank];
        let mut outputs = Vec::new();
        let mut step = |name, out: Vec<T>| {
            outputs.push((name, bits(&out)));
            self.pause(&mut stream);
        };

        let mut data = self.input::<T>(0, rank, equal);
        comm.all_reduce(view_mut(&mut data, equal, row), self.op, &mut ex)?;
        step("all_reduce", data);

        let mut out = vec![T::default(); n * equal * row];
        let input = self.input::<T>(1, rank, equal);
        comm.all_gather(view(&input, equal, row), view_mut(&mut out, n * equal, row), &mut ex)?;
        step("all_gather", out);

        let mut out = vec![T::default(); self.total() * row];
        let input = self.input::<T>(2, rank, own);
        let out_view = view_mut(&mut out, self.total(), row);
        comm.all_gather_v(view(&input, own, row), &self.counts, out_view, &mut ex)?;
        step("all_gather_v", out);

        let mut outs = [2, 8].map(|_| vec![T::default(); self.total() * row]);
        let inputs = [2, 8].map(|i| self.input::<T>(i, rank, own));
        let arrays = inputs.iter().zip(&mut outs);
        let arrays = arrays.map(|(input, out)| (view(input, own, row), view_mut(out, self.total(), row)));
        let arrays = arrays.collect();
        let counts = &self.counts;
        FusedCollective::Gather { arrays, counts, needs: None }.run(comm, &mut ex)?;
        step("gather", outs.concat());

        let mut out = vec![T::default(); equal * row];
        let input = self.input::<T>(3, rank, n * equal);
        comm.reduce_scatter(view(&input, n * equal, row), view_mut(&mut out, equal, row), self.op, &mut ex)?;
        step("reduce_scatter", out);

        let mut out = vec![T::default(); own * row];
        let input = self.input::<T>(4, rank, self.total());
        let input = view(&input, self.total(), row);
        let out_view = view_mut(&mut out, own, row);
        comm.reduce_scatter_v(input, &self.counts, out_view, self.op, &mut ex)?;
        step("reduce_scatter_v", out);

        let mut out = vec![T::default(); n * equal * row];
        let input = self.input::<T>(5, rank, n * equal);
        comm.all_to_all(view(&input, n * equal, row), view_mut(&mut out, n * equal, row), &mut ex)?;
        step("all_to_all", out);

        let recv = self.received(rank);
        let sent = self.sent(rank);
        let rows = recv.iter().sum::<usize>();
        let mut out = vec![T::default(); rows * row];
        let input = self.input::<T>(6, rank, sent);
        let out_view = view_mut(&mut out, rows, row);
        comm.all_to_all_v(view(&input, sent, row), &self.matrix[rank], out_view, &recv, &mut ex)?;
        step("all_to_all_v", out);

        let mut data = self.input::<T>(7, rank, equal);
        comm.broadcast(view_mut(&mut data, equal, row), self.root, &mut ex)?;
        step("broadcast", data);

        comm.barrier(&mut ex)?;
        Ok(outputs)
    }

    /// The results by the definitions.
    fn expected<T: Value>(&self, rank: usize) -> Outputs {
        let n = self.world;
        let row = self.row;
        let equal = self.counts[0];
        let all = |i: u64, rows: &dyn Fn(usize) -> usize| -> Vec<Vec<T>> {
            (0..n).map(|r| self.input(i, r, rows(r))).collect()
        };
        let rows = |data: &[T], start: usize, len: usize| data[start * row..(start + len) * row].to_vec();
        let reduced = |i: u64, rows: usize| -> Vec<T> {
            let inputs = all(i, &|_| rows);
            let element = |e: usize| T::reduced(self.op, &inputs.iter().map(|x| x[e]).collect::<Vec<T>>());
            (0..rows * row).map(element).collect()
        };
        let all_to_all = all(5, &|_| n * equal).iter().flat_map(|x| rows(x, rank * equal, equal)).collect();
        let sent =
            |(r, x): (usize, &Vec<T>)| rows(x, self.matrix[r][..rank].iter().sum(), self.matrix[r][rank]);
        let outputs: Vec<(&'static str, Vec<T>)> = vec![
            ("all_reduce", reduced(0, equal)),
            ("all_gather", all(1, &|_| equal).concat()),
            ("all_gather_v", all(2, &|r| self.counts[r]).concat()),
            ("gather", [2, 8].map(|i| all(i, &|r| self.counts[r]).concat()).concat()),
            ("reduce_scatter", rows(&reduced(3, n * equal), rank * equal, equal)),
            ("reduce_scatter_v", rows(&reduced(4, self.total()), self.before(rank), self.counts[rank])),
            ("all_to_all", all_to_all),
            ("all_to_all_v", all(6, &|r| self.sent(r)).iter().enumerate().flat_map(sent).collect()),
            ("broadcast", self.input(7, self.root, equal)),
        ];
        outputs.into_iter().map(|(name, data)| (name, bits(&data))).collect()
    }

    fn check<T: Value>(&self) {
        self.check_over::<T, ThreadComm>();
        if self.world == 1 {
            assert_eq!(self.run::<T>(0, &SelfComm::new()).unwrap(), self.expected::<T>(0));
        }
    }

    fn check_over<T: Value, C: World>(&self) {
        let outputs = run::<C, _>(self.world, |rank, comm| self.run::<T>(rank, &comm));
        for (rank, outputs) in outputs.into_iter().enumerate() {
            assert_eq!(outputs.unwrap(), self.expected::<T>(rank), "rank {rank}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn collectives_are_their_definitions(case in cases()) {
        case.check::<f32>();
        case.check::<bf16>();
        case.check::<f16>();
        case.check::<u8>();
        case.check::<u32>();
        case.check::<i32>();
        case.check::<i64>();
        case.check_over::<f32, SocketComm>();
        case.check_over::<bf16, SocketComm>();
        case.check_over::<i64, SocketComm>();
    }
}

fn large_all_reduce<T: Value, C: World>(world: usize, len: usize, op: ReduceOp) {
    let inputs: Vec<Vec<T>> = (0..world).map(|r| T::randoms(r as u64, len)).collect();
    let element = |e: usize| T::reduced(op, &inputs.iter().map(|x| x[e]).collect::<Vec<T>>());
    let expected = bits(&(0..len).map(element).collect::<Vec<T>>());
    let outputs = run::<C, _>(world, |rank, comm| {
        let mut data = inputs[rank].clone();
        comm.all_reduce(ViewMut::new(&mut data, &[len])?, op, &mut Exec::cpu())?;
        Ok(bits(&data))
    });
    for output in outputs {
        assert!(output.unwrap() == expected, "world {world}, {len} elements, {op}");
    }
}

/// Large all-reduces are shared by the ranks, which must not change the bits.
fn the_size_of_an_all_reduce_does_not_show<C: World>() {
    for world in [1, 2, 3, 5, 6] {
        for op in OPS {
            for len in [8_191, 8_192, 8_193, 50_001] {
                large_all_reduce::<f32, C>(world, len, op);
            }
            large_all_reduce::<bf16, C>(world, 40_007, op);
            large_all_reduce::<i64, C>(world, 4_097, op);
        }
    }
}

/// All ranks and all runs agree on every bit of a sum whose order matters.
fn timing_does_not_change_a_bit<C: World>() {
    let all_runs = |round: u64| {
        run::<C, _>(4, |rank, comm| {
            let mut ex = Exec::cpu();
            let mut stream = Stream(round * 4 + rank as u64);
            let mut all = Vec::new();
            for i in 0..10 {
                let mut data = f32::randoms(i * 4 + rank as u64, 33);
                std::thread::sleep(Duration::from_micros(stream.next() % 300));
                comm.all_reduce(ViewMut::new(&mut data, &[11, 3])?, ReduceOp::Sum, &mut ex)?;
                all.extend(bits(&data));
            }
            Ok(all)
        })
    };
    let first = all_runs(0).remove(0).unwrap();
    for round in 0..10 {
        for output in all_runs(round) {
            assert!(output.unwrap() == first);
        }
    }
}

/// Views of any dims, also of none, are reduced and broadcast.
fn scalars_and_many_dims<C: World>() {
    let outputs = run::<C, _>(3, |rank, comm| {
        let mut ex = Exec::cpu();
        let mut scalar = [rank as i64];
        let mut block = vec![rank as u32; 24];
        comm.all_reduce(ViewMut::new(&mut scalar, &[])?, ReduceOp::Sum, &mut ex)?;
        comm.broadcast(ViewMut::new(&mut block, &[2, 3, 2, 2])?, 2, &mut ex)?;
        Ok((scalar, block))
    });
    for output in outputs {
        assert_eq!(output.unwrap(), ([3], vec![2; 24]));
    }
}

/// After the first round the workspace holds everything that rounds need, so later rounds work with a frozen one.
fn rounds_reuse_the_workspace<C: World>() {
    let outputs = run::<C, _>(3, |rank, comm| {
        let mut ex = Exec::cpu();
        let round = |ex: &mut Exec| -> Result<()> {
            let mut large = vec![rank as f32; 40_000];
            let mut out = vec![0f32; 120_000];
            comm.all_reduce(ViewMut::new(&mut large, &[40_000])?, ReduceOp::Max, ex)?;
            comm.all_gather(view(&large, 40_000, 1), view_mut(&mut out, 120_000, 1), ex)
        };
        round(&mut ex)?;
        ex.workspace().freeze(true);
        let bytes = ex.workspace().bytes();
        for _ in 0..50 {
            round(&mut ex)?;
        }
        assert_eq!(ex.workspace().bytes(), bytes);
        Ok(())
    });
    outputs.into_iter().for_each(|o| o.unwrap());
}

/// `residual` + the sum in rank order, and the norm of that, by the definition.
fn a_sum_is_added_and_normed<C: World>() {
    let t = 3;
    let h = 40;
    let eps = 1e-5f32;
    let stream = |seed: u64, len: usize| f32::randoms(seed, len);
    let residual = stream(90, t * h);
    let weight = stream(91, h);
    let partial = |rank: usize| stream(rank as u64, t * h);
    let outputs = run::<C, _>(3, |rank, comm| {
        let mut ex = Exec::cpu();
        let mut partial = partial(rank);
        let mut residual = residual.clone();
        let mut out = vec![0f32; t * h];
        let norm = PreNorm { weight: View::new(&weight, &[h])?, eps };
        let end = AddNorm { residual: view_mut(&mut residual, t, h), norm, out: view_mut(&mut out, t, h) };
        let partial = view_mut(&mut partial, t, h);
        FusedCollective::AllReduceAddNorm { partial, end }.run(&comm, &mut ex)?;
        Ok((residual, out))
    });
    let sum = |i: usize| partial(0)[i] + partial(1)[i] + partial(2)[i];
    let expected: Vec<f32> = (0..t * h).map(|i| residual[i] + sum(i)).collect();
    for output in outputs {
        let (residual, out) = output.unwrap();
        assert_eq!(bits(&residual), bits(&expected));
        for (row, out) in expected.chunks(h).zip(out.chunks(h)) {
            let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let scale = 1.0 / (squares / h as f64 + f64::from(eps)).sqrt();
            for ((x, w), out) in row.iter().zip(&weight).zip(out) {
                let normed = f64::from(*x) * scale * f64::from(*w);
                assert!((normed - f64::from(*out)).abs() <= 1e-5 * normed.abs() + 1e-7, "{normed} {out}");
            }
        }
    }
}

/// Thousands of rounds without a pause find lost wake-ups.
fn many_rounds_in_a_row<C: World>() {
    let outputs = run::<C, _>(4, |rank, comm| {
        let mut ex = Exec::cpu();
        let mut sum = 0u64;
        for i in 0..3000u32 {
            let mut data = [i + rank as u32];
            match i % 3 {
                0 => comm.all_reduce(ViewMut::new(&mut data, &[1])?, ReduceOp::Sum, &mut ex)?,
                1 => comm.broadcast(ViewMut::new(&mut data, &[1])?, i as usize % 4, &mut ex)?,
                _ => comm.barrier(&mut ex)?,
            }
            sum += u64::from(data[0]) * u64::from(i % 3 != 2);
        }
        Ok(sum)
    });
    let sums: Vec<u64> = outputs.into_iter().map(|o| o.unwrap()).collect();
    let expected = (0..3000u64).map(|i| match i % 3 {
        0 => 4 * i + 6,
        1 => i + i % 4,
        _ => 0,
    });
    assert_eq!(sums, [expected.sum::<u64>(); 4]);
}

over_both! {
    the_size_of_an_all_reduce_does_not_show
    timing_does_not_change_a_bit
    scalars_and_many_dims
    rounds_reuse_the_workspace
    a_sum_is_added_and_normed
    many_rounds_in_a_row
}
