//! Random collectives that any communicator can run, on host or device memory.

use candle_core::{DType, Device, Result};
use moe_comm::{Collectives, Communicator, ReduceOp};
use moe_kernels::{Buffer, Element, Exec};

use crate::common::{FLOATS, Rng, assert_close, rounding};

const DTYPES: [DType; 7] =
    [DType::F32, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I32, DType::I64];
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AllReduce,
    AllGather,
    AllGatherV,
    ReduceScatter,
    ReduceScatterV,
    AllToAll,
    AllToAllV,
    Broadcast,
}

const KINDS: [Kind; 8] = [
    Kind::AllReduce,
    Kind::AllGather,
    Kind::AllGatherV,
    Kind::ReduceScatter,
    Kind::ReduceScatterV,
    Kind::AllToAll,
    Kind::AllToAllV,
    Kind::Broadcast,
];

/// One collective of a group, with the data that every rank knows.
#[derive(Debug)]
pub struct Round {
    kind: Kind,
    dtype: DType,
    op: ReduceOp,
    /// Elements per row.
    width: usize,
    /// Rows of each rank. The first entry is also the count of collectives with equal counts. Counts are often zero and
    /// mostly unequal.
    counts: Vec<usize>,
    /// Number of rows from each rank to each rank.
    matrix: Vec<Vec<usize>>,
    root: usize,
    seed: u64,
}

impl Round {
    /// The round of a seed in a group of `n`. In eight consecutive seeds every kind occurs once.
    pub fn new(seed: u64, n: usize) -> Self {
        let mut rng = Rng::seeded(seed);
        let largest = [1, 4, 40, 3000][rng.below(4)];
        let mut rows = || rng.below(largest + 1) * usize::from(rng.below(4) > 0);
        let counts: Vec<usize> = (0..n).map(|_| rows()).collect();
        let matrix = (0..n).map(|_| (0..n).map(|_| rows()).collect()).collect();
        Self {
            kind: KINDS[seed as usize % KINDS.len()],
            dtype: DTYPES[rng.below(DTYPES.len())],
            op: OPS[rng.below(OPS.len())],
            width: [1, 3, 16, 129][rng.below(4)],
            counts,
            matrix,
            root: rng.below(n),
            seed,
        }
    }

    /// The result of this rank, in host memory. The data is on `device`.
    pub fn play(&self, comm: &dyn Communicator, device: &Device, ex: &mut Exec) -> Result<Buffer> {
        let rank = comm.rank();
        let n = comm.world_size();
        let r = self.counts[0];
        let total: usize = self.counts.iter().sum();
        let sent = &self.matrix[rank];
        let received: Vec<usize> = self.matrix.iter().map(|row| row[rank]).collect();
        let (input_rows, out_rows) = match self.kind {
            Kind::AllReduce | Kind::Broadcast => (r, r),
            Kind::AllGather => (r, n * r),
            Kind::AllGatherV => (self.counts[rank], total),
            Kind::ReduceScatter => (n * r, r),
            Kind::ReduceScatterV => (total, self.counts[rank]),
            Kind::AllToAll => (n * r, n * r),
            Kind::AllToAllV => (sent.iter().sum(), received.iter().sum()),
        };
        let host = random(self.seed ^ (rank as u64 + 1) << 40, self.dtype, &[input_rows, self.width]);
        let mut input = Buffer::zeros_on(device, self.dtype, host.dims())?;
        ex.copy_from_host(host.view(), input.view_mut())?;
        let mut out = Buffer::zeros_on(device, self.dtype, &[out_rows, self.width])?;
        let view = input.view();
        let to = out.view_mut();
        match self.kind {
            Kind::AllGather => comm.all_gather(view, to, ex)?,
            Kind::AllGatherV => comm.all_gather_v(view, &self.counts, to, ex)?,
            Kind::ReduceScatter => comm.reduce_scatter(view, to, self.op, ex)?,
            Kind::ReduceScatterV => comm.reduce_scatter_v(view, &self.counts, to, self.op, ex)?,
            Kind::AllToAll => comm.all_to_all(view, to, ex)?,
            Kind::AllToAllV => comm.all_to_all_v(view, sent, to, &received, ex)?,
            Kind::AllReduce => {
                comm.all_reduce(input.view_mut(), self.op, ex)?;
                return ex.to_host(input.view());
            }
            Kind::Broadcast => {
                comm.broadcast(input.view_mut(), self.root, ex)?;
                return ex.to_host(input.view());
            }
        }
        ex.to_host(out.view())
    }

    /// Fails unless the result of a rank is the definition's. The bits must be equal, except for sums of floats: NCCL
    /// adds these in its own order and rounds each time, so they must be within the bound of any order.
    pub fn check(&self, n: usize, expected: &Buffer, got: &Buffer) {
        let reduces = matches!(self.kind, Kind::AllReduce | Kind::ReduceScatter | Kind::ReduceScatterV);
        if reduces && self.op == ReduceOp::Sum && FLOATS.contains(&self.dtype) {
            // There are n values below 1, and n - 1 additions of sums below n.
            let bound = (n * n) as f64 * rounding(self.dtype);
            return assert_close(&format!("{self:?}"), expected, got, bound);
        }
        assert_eq!((expected.dims(), expected.dtype()), (got.dims(), got.dtype()), "{self:?}");
        assert_eq!(bits(expected), bits(got), "{self:?}");
    }

    /// Whether every rank must get the same data.
    pub fn is_replicated(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::Broadcast | Kind::AllGather | Kind::AllGatherV)
    }
}

/// Random values: floats in -1..1, integers of any bits.
fn random(seed: u64, dtype: DType, dims: &[usize]) -> Buffer {
    let mut rng = Rng::seeded(seed);
    let n: usize = dims.iter().product();
    fn integers<T: Element>(n: usize, dims: &[usize], value: impl FnMut() -> T) -> Buffer {
        Buffer::from_vec(std::iter::repeat_with(value).take(n).collect(), dims).unwrap()
    }
    match dtype {
        DType::U8 => integers(n, dims, || rng.bits() as u8),
        DType::U32 => integers(n, dims, || rng.bits() as u32),
        DType::I32 => integers(n, dims, || rng.bits() as i32),
        DType::I64 => integers(n, dims, || (rng.bits() << 16) as i64),
        _ => rng.floats(dtype, dims),
    }
}

/// The bits of every element.
pub fn bits(buffer: &Buffer) -> Vec<u64> {
    let view = buffer.view();
    match buffer.dtype() {
        DType::U8 => view.cpu::<u8>().unwrap().iter().map(|&x| x.into()).collect(),
        DType::U32 => view.cpu::<u32>().unwrap().iter().map(|&x| x.into()).collect(),
        DType::I32 => view.cpu::<i32>().unwrap().iter().map(|&x| x as u64).collect(),
        DType::I64 => view.cpu::<i64>().unwrap().iter().map(|&x| x as u64).collect(),
        _ => view.to_f32_vec().unwrap().into_iter().map(|x| x.to_bits().into()).collect(),
    }
}
