//! Runs the same op in two places, and provides random data and comparisons.

use std::sync::OnceLock;
use std::time::SystemTime;

use candle_core::{DType, Device, Result};
use moe_kernels::{Buffer, Element, Exec, Float, View, ViewMut, with_float};

/// The float dtypes.
pub const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// With TINY=1 only cases up to this size are used: under compute-sanitizer a launch takes 100 to 1,000 times as long.
pub fn small<T>(cases: impl IntoIterator<Item = T>, most: usize, size: impl Fn(&T) -> usize) -> Vec<T> {
    let tiny = tiny();
    cases.into_iter().filter(|case| !tiny || size(case) <= most).collect()
}

/// Whether the tests run under compute-sanitizer.
pub fn tiny() -> bool {
    std::env::var("TINY").is_ok_and(|v| v == "1")
}

/// The dtypes that a residual stream may have with a model dtype.
pub fn streams(model: DType) -> Vec<DType> {
    if model == DType::F32 { vec![DType::F32] } else { vec![model, DType::F32] }
}

/// A context on the GPU; all share one stream.
pub fn cuda() -> Exec {
    assert!(
        runs_one_test(),
        "a thread that captures a graph forbids the others' allocations: pass --test-threads 1"
    );
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let device =
        DEVICE.get_or_init(|| moe_kernels::cuda::device(0).expect("the GPU tests need a CUDA device"));
    Exec::on(device).unwrap()
}

/// Whether tests run one after the other.
fn runs_one_test() -> bool {
    let args: Vec<String> = std::env::args().collect();
    let threads =
        args.iter().position(|arg| arg == "--test-threads").and_then(|at| args.get(at + 1).cloned());
    let threads = threads.or_else(|| std::env::var("RUST_TEST_THREADS").ok());
    threads.as_deref() == Some("1") || args.iter().any(|arg| arg == "--test-threads=1" || arg == "--exact")
}

/// Random numbers whose seed is printed.
pub struct Rng(u64);

impl Rng {
    pub fn new() -> Self {
        let seed = std::env::var("GPU_TEST_SEED").ok().and_then(|s| s.parse().ok());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = seed.unwrap_or_else(now);
        println!("GPU_TEST_SEED={seed}");
        Self::seeded(seed)
    }

    /// The same seed gives the same numbers.
    pub fn seeded(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A random number in -1..1.
    pub fn float(&mut self) -> f32 {
        (self.bits() & 0xff_ffff) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, dtype: DType, dims: &[usize]) -> Buffer {
        let n = dims.iter().product::<usize>();
        let buffer: Result<Buffer> = with_float!(dtype, "data", T => {
            Buffer::from_vec((0..n).map(|_| <T as Float>::narrow(self.float())).collect::<Vec<T>>(), dims)
        });
        buffer.unwrap()
    }

    /// Numbers below `n`.
    pub fn ids(&mut self, n: usize, dims: &[usize]) -> Buffer {
        let len = dims.iter().product::<usize>();
        words((0..len).map(|_| self.below(n) as u32).collect(), dims)
    }

    /// The numbers 0..n in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

/// Rows of a buffer in host memory.
pub fn cut(b: &Buffer, first: usize, count: usize) -> Buffer {
    Exec::cpu().to_host(b.view().narrow(first, count).unwrap()).unwrap()
}

pub fn words(data: Vec<u32>, dims: &[usize]) -> Buffer {
    Buffer::from_vec(data, dims).unwrap()
}

/// A buffer filled with a value that no result has.
pub fn poisoned(dtype: DType, dims: &[usize]) -> Buffer {
    let n = dims.iter().product::<usize>();
    let poison =
        |x: f32| with_float!(dtype, "poison", T => Buffer::from_vec(vec![<T as Float>::narrow(x); n], dims));
    match dtype {
        DType::U32 => words(vec![0xdead_beef; n], dims),
        _ if FLOATS.contains(&dtype) => poison(77.0).unwrap(),
        _ => Buffer::zeros(dtype, dims).unwrap(),
    }
}

/// Number of elements after the data that no launch may write. It is 0 under compute-sanitizer, which itself detects
/// accesses outside of allocations.
fn guard() -> usize {
    if tiny() { 0 } else { 4096 }
}

/// The place where an op runs: the CPU or the GPU, and whether data is at misaligned addresses.
pub struct Place {
    pub ex: Exec,
    offset: usize,
}

/// Data at a place.
pub struct Placed {
    data: Buffer,
    offset: usize,
    dims: Vec<usize>,
}

impl Place {
    /// A place with aligned data.
    pub fn new(ex: Exec) -> Self {
        Self { ex, offset: 0 }
    }

    /// A copy of host data in this place.
    pub fn put(&self, host: &Buffer) -> Placed {
        let dims = host.dims().to_vec();
        let len = host.view().elem_count();
        let mut data = self.ex.zeros(host.dtype(), &[self.offset + len + guard()]).unwrap();
        let mut copy = |from: &Buffer, start: usize| {
            let to = data.view_mut().narrow(start, from.view().elem_count()).unwrap();
            self.ex.copy_from_host(from.view(), to).unwrap();
        };
        copy(host, self.offset);
        copy(&poisoned(host.dtype(), &[self.offset]), 0);
        copy(&poisoned(host.dtype(), &[guard()]), self.offset + len);
        Placed { data, offset: self.offset, dims }
    }

    pub fn put_some(&self, host: Option<&Buffer>) -> Option<Placed> {
        host.map(|host| self.put(host))
    }

    /// Poisoned memory for an output.
    pub fn out(&self, dtype: DType, dims: &[usize]) -> Placed {
        self.put(&poisoned(dtype, dims))
    }
}

impl Placed {
    pub fn view(&self) -> View<'_> {
        let len = self.dims.iter().product();
        self.data.view().narrow(self.offset, len).unwrap().reshape(&self.dims).unwrap()
    }

    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.dims.iter().product();
        self.data.view_mut().narrow(self.offset, len).unwrap().reshape(&self.dims).unwrap()
    }

    /// A copy in host memory. Fails if a launch has written before or after the data.
    pub fn host(&self, place: &Place) -> Buffer {
        let end = self.offset + self.dims.iter().product::<usize>();
        for (start, len) in [(0, self.offset), (end, self.data.view().elem_count() - end)] {
            let around = self.data.view().narrow(start, len).unwrap();
            let around = place.ex.to_host(around).unwrap();
            assert_same("memory around the data", &poisoned(around.dtype(), &[len]), &around);
        }
        place.ex.to_host(self.view()).unwrap()
    }

    /// The values of floats.
    pub fn floats(&self, place: &Place) -> Vec<f32> {
        self.host(place).view().to_f32_vec().unwrap()
    }
}

pub fn view_of(placed: &Option<Placed>) -> Option<View<'_>> {
    placed.as_ref().map(Placed::view)
}

/// Runs `op` on the CPU and on the GPU, first with aligned, then with misaligned data, and passes both outputs to
/// `check`.
pub fn on_both(op: impl Fn(&mut Place) -> Result<Vec<Placed>>, mut check: impl FnMut(&[Buffer], &[Buffer])) {
    for offset in [0, 3] {
        let run = |ex: Exec| {
            let mut place = Place { ex, offset };
            let outputs = op(&mut place).unwrap();
            outputs.iter().map(|out| out.host(&place)).collect::<Vec<_>>()
        };
        let cpu = run(Exec::cpu());
        let gpu = run(cuda());
        assert_eq!(cpu.len(), gpu.len());
        check(&cpu, &gpu);
    }
}

/// Half a unit in the last place, relative.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => f64::powi(2.0, -8),
        DType::F16 => f64::powi(2.0, -11),
        _ => f64::powi(2.0, -24),
    }
}

/// Fails unless values agree within `absolute` plus two roundings of their dtype.
pub fn assert_close(what: &str, cpu: &Buffer, gpu: &Buffer, absolute: f64) {
    assert_eq!((cpu.dims(), cpu.dtype()), (gpu.dims(), gpu.dtype()), "{what}");
    let relative = 2.0 * rounding(cpu.dtype());
    let cpu = cpu.view().to_f32_vec().unwrap();
    let gpu = gpu.view().to_f32_vec().unwrap();
    for (i, (&c, &g)) in cpu.iter().zip(&gpu).enumerate() {
        let c = f64::from(c);
        let g = f64::from(g);
        let close = (c - g).abs() <= absolute + relative * c.abs().max(g.abs()) || c == g;
        assert!(close, "{what}: element {i} of {}: CPU {c}, GPU {g}, bound {absolute}", cpu.len());
    }
}

/// Fails unless bits agree.
pub fn assert_same(what: &str, cpu: &Buffer, gpu: &Buffer) {
    assert_eq!((cpu.dims(), cpu.dtype()), (gpu.dims(), gpu.dtype()), "{what}");
    if cpu.dtype() == DType::U32 {
        assert_eq!(values::<u32>(cpu), values::<u32>(gpu), "{what}");
        return;
    }
    let bits = |b: &Buffer| b.view().to_f32_vec().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let cpu = bits(cpu);
    let gpu = bits(gpu);
    if let Some(i) = cpu.iter().zip(&gpu).position(|(c, g)| c != g) {
        let c = f32::from_bits(cpu[i]);
        let g = f32::from_bits(gpu[i]);
        panic!("{what}: element {i} of {}: CPU {c:e}, GPU {g:e}", cpu.len())
    }
}

pub fn values<T: Element>(b: &Buffer) -> Vec<T> {
    b.view().cpu::<T>().unwrap().to_vec()
}

/// Fails unless the result is an error that contains all parts.
pub fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let message = result.err().expect("an error").to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}
