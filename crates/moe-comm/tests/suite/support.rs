//! Helpers of the tests: worlds of threads and of sockets, random values, their bits, the definition of a reduction,
//! the texts of errors.

use std::borrow::Borrow;
use std::time::Duration;

use half::{bf16, f16};
use moe_comm::candle::{Error, Result};
use moe_comm::{
    DEFAULT_TIMEOUT, ReduceOp, SocketComm, Supervised, ThreadComm, View, ViewMut, run_ranks_with,
};
use moe_kernels::Element;

/// A kind of communicator of which a test can make worlds.
pub trait World: Supervised + Sized {
    fn world_with_timeout(n: usize, timeout: Duration) -> Vec<Self>;

    fn world(n: usize) -> Vec<Self> {
        Self::world_with_timeout(n, DEFAULT_TIMEOUT)
    }
}

impl World for ThreadComm {
    fn world_with_timeout(n: usize, timeout: Duration) -> Vec<Self> {
        ThreadComm::world_with_timeout(n, timeout)
    }
}

impl World for SocketComm {
    fn world_with_timeout(n: usize, timeout: Duration) -> Vec<Self> {
        SocketComm::loopback(n, timeout).unwrap()
    }
}

/// Runs a function on every rank of a new world.
pub fn run<C: World, R: Send>(n: usize, f: impl Fn(usize, C) -> Result<R> + Sync) -> Vec<Result<R>> {
    run_ranks_with(C::world(n), f)
}

/// Makes a test of each function for each kind of communicator.
macro_rules! over_both {
    ($($name:ident)*) => {
        mod threads {
            $(#[test] fn $name() { super::$name::<moe_comm::ThreadComm>() })*
        }
        mod sockets {
            $(#[test] fn $name() { super::$name::<moe_comm::SocketComm>() })*
        }
    };
}
pub(crate) use over_both;

/// A deterministic stream of numbers (SplitMix64).
pub struct Stream(pub u64);

impl Stream {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

pub trait Value: Element {
    fn random(stream: &mut Stream) -> Self;
    fn bits(self) -> u64;
    /// The reduction of one element's values, rank 0 first.
    fn reduced(op: ReduceOp, values: &[Self]) -> Self;

    fn randoms(seed: u64, len: usize) -> Vec<Self> {
        let mut stream = Stream(seed);
        (0..len).map(|_| Self::random(&mut stream)).collect()
    }
}

macro_rules! float_value {
    ($($ty:ty: $to:expr, $from:expr, $bits:expr;)*) => {$(
        impl Value for $ty {
            /// The magnitudes differ widely, so that another order of addition gives other bits.
            fn random(stream: &mut Stream) -> Self {
                let bits = stream.next();
                let mantissa = (bits >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
                $from(mantissa * 2f32.powi((bits % 13) as i32 - 6))
            }
            fn bits(self) -> u64 { $bits(self) }
            fn reduced(op: ReduceOp, values: &[Self]) -> Self {
                let mut all = values.iter().map(|&v| $to(v));
                let first = all.next().unwrap();
                $from(all.fold(first, |a: f32, b: f32| match op {
                    ReduceOp::Sum => a + b,
                    ReduceOp::Max => if b > a { b } else { a },
                    ReduceOp::Min => if b < a { b } else { a },
                }))
            }
        }
    )*};
}

float_value! {
    f32: |x: f32| x, |x: f32| x, |x: f32| u64::from(x.to_bits());
    bf16: |x: bf16| x.to_f32(), bf16::from_f32, |x: bf16| u64::from(x.to_bits());
    f16: |x: f16| x.to_f32(), f16::from_f32, |x: f16| u64::from(x.to_bits());
}

macro_rules! integer_value {
    ($($ty:ty)*) => {$(
        impl Value for $ty {
            fn random(stream: &mut Stream) -> Self { stream.next() as $ty }
            fn bits(self) -> u64 { self as u64 }
            fn reduced(op: ReduceOp, values: &[Self]) -> Self {
                let wide = values.iter().map(|&v| v as i128);
                match op {
                    ReduceOp::Sum => wide.sum::<i128>() as $ty,
                    ReduceOp::Max => wide.max().unwrap() as $ty,
                    ReduceOp::Min => wide.min().unwrap() as $ty,
                }
            }
        }
    )*};
}

integer_value! { u8 u32 i32 i64 }

pub fn bits<T: Value>(data: &[T]) -> Vec<u64> {
    data.iter().map(|&x| x.bits()).collect()
}

/// A view of `rows` rows of `row` elements.
pub fn view<T: Value>(data: &[T], rows: usize, row: usize) -> View<'_> {
    View::new(data, &[rows, row]).unwrap()
}

pub fn view_mut<T: Value>(data: &mut [T], rows: usize, row: usize) -> ViewMut<'_> {
    ViewMut::new(data, &[rows, row]).unwrap()
}

/// An error's text, without the backtrace that RUST_BACKTRACE=1 appends.
pub fn text(e: impl Borrow<Error>) -> String {
    match e.borrow() {
        Error::WithBacktrace { inner, .. } => text(&**inner),
        e => e.to_string(),
    }
}
