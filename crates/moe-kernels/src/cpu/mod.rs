//! CPU kernels.
//!
//! The ops check their arguments and call these functions, which trust them. A kernel is written
//! once, generic over an instruction set ([`simd::Simd`]); [`dispatch`] runs it on the path that
//! the execution context names.

// Loops over indices keep arrays of vectors in registers. Iterators by value would move them to memory.
#![allow(clippy::needless_range_loop)]

pub(crate) mod activation;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod combine;
pub(crate) mod delta;
pub(crate) mod epilogue;
pub(crate) mod gemm;
pub(crate) mod math;
pub(crate) mod mla;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod norm;
pub(crate) mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
pub(crate) mod panel;
pub(crate) mod parallel;
pub(crate) mod product;
pub(crate) mod quant;
pub(crate) mod roof;
pub(crate) mod rope;
mod scalar;
pub(crate) mod shared;
pub(crate) mod simd;
pub(crate) mod stream;
pub(crate) mod tile;
pub(crate) mod units;
mod vectors;

use crate::exec::CpuIsa;
pub(crate) use simd::Kernel;

/// Runs a kernel on one instruction-set path. `isa` comes from an [`Exec`](crate::Exec), which only holds a path that
/// this machine supports. It is inlined, so that a kernel's fields are written where the path's function reads them,
/// and are not copied in between.
#[inline(always)]
pub(crate) fn dispatch<K: Kernel>(isa: CpuIsa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: the path comes from an Exec, which has checked that the processor supports it.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx2 | CpuIsa::Avx2Vnni => unsafe { avx2::run(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512 => unsafe { avx512::run(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512Bf16 | CpuIsa::Avx512Dot | CpuIsa::AmxBf16 => unsafe { avx512::run_vnni(kernel) },
        #[cfg(target_arch = "aarch64")]
        CpuIsa::Neon => neon::run(kernel),
        _ => run_scalar(kernel),
    }
}

/// It is not inlined, like the functions of the other paths.
#[inline(never)]
fn run_scalar<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(scalar::Scalar)
}

/// [`dispatch`] of a kernel of [`Simd::dot_i16_of_many`], the only operation for which AVX-VNNI is used in addition to
/// AVX2.
#[inline(always)]
pub(crate) fn dispatch_ints<K: Kernel>(isa: CpuIsa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: as in `dispatch`.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx2Vnni => unsafe { avx2::run_vnni(kernel) },
        _ => dispatch(isa, kernel),
    }
}
