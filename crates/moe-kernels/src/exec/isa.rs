//! The instruction sets of the CPU kernels: their names, and which of them this machine supports.

use candle_core::{Result, bail};

/// The instruction-set path of the CPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CpuIsa {
    /// Portable Rust: the readable specification.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 with AVX-VNNI for integer weights. Laptops and desktops without AVX-512 have had it since 2021. All bits
    /// are the same as with [`CpuIsa::Avx2`].
    Avx2Vnni,
    /// AVX-512 F, BW, DQ, VL: the same arithmetic as AVX2, so the same bits, at twice the width.
    Avx512,
    /// AVX-512 with VNNI for integer weights, on processors that also have BF16. All bits are the same as with
    /// [`CpuIsa::Avx512`].
    Avx512Bf16,
    /// [`CpuIsa::Avx512Bf16`] with the BF16 dot product for products of bf16.
    Avx512Dot,
    /// AMX matrix registers for products of bf16; everything else is as in [`CpuIsa::Avx512Bf16`].
    AmxBf16,
    /// NEON of 64-bit Arm: the same arithmetic as AVX2, so the same bits.
    Neon,
}

impl CpuIsa {
    /// Every path.
    pub const ALL: [CpuIsa; 8] = [
        CpuIsa::Scalar,
        CpuIsa::Avx2,
        CpuIsa::Avx2Vnni,
        CpuIsa::Avx512,
        CpuIsa::Avx512Bf16,
        CpuIsa::Avx512Dot,
        CpuIsa::AmxBf16,
        CpuIsa::Neon,
    ];

    /// The fastest path that this machine runs.
    pub fn detect() -> Self {
        let is_fast = |isa: &Self| isa.is_supported() && (*isa != Self::Avx512Dot || has_fast_dot());
        Self::ALL.into_iter().rev().find(is_fast).unwrap_or(Self::Scalar)
    }

    /// Whether this machine runs the path.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni => Self::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                Self::Avx512.is_supported()
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Dot => Self::Avx512Bf16.is_supported(),
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => Self::Avx512Bf16.is_supported() && crate::cpu::amx::is_supported(),
            #[cfg(target_arch = "x86_64")]
            Self::Neon => false,
            #[cfg(not(target_arch = "x86_64"))]
            _ => self == Self::Neon && cfg!(target_arch = "aarch64"),
        }
    }

    /// The command-line name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx2Vnni => "avx2-vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Avx512Dot => "avx512-dot",
            Self::AmxBf16 => "amx-bf16",
            Self::Neon => "neon",
        }
    }

    /// The path of that name; an error lists the names, or says that this machine lacks it.
    pub fn from_name(name: &str) -> Result<Self> {
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            let names = Self::ALL.map(Self::name).join(", ");
            bail!("unknown CPU instruction set {name:?}; expected one of {names}")
        };
        if !isa.is_supported() {
            bail!(
                "this processor does not support the instruction set {name:?}; the fastest it supports is {:?}",
                Self::detect().name()
            )
        }
        Ok(isa)
    }
}

/// Whether the BF16 dot product has a higher rate than multiply-adds with widened weights. AMD's processors issue it as
/// often as a multiply-add (Zen 5, measured) or half as often (Zen 4, by published tables); Intel's issue it a quarter
/// as often.
fn has_fast_dot() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
