//! The order of a weight's values.

use candle_core::DType;
use serde::Serialize;

use crate::cpu::simd::LANES;
use crate::exec::CpuIsa;

/// The order of the values of a matrix [N, K] in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WeightOrder {
    /// Row by row, as in a checkpoint.
    Rows,
    /// 16 rows at a time, with the same k of all of them next to each other: `[N / 16][K / D][16][D]`, where D = 2 for
    /// bf16, else 1.
    Panels,
}

impl WeightOrder {
    /// The best order for an instruction set, for a matrix with rows of `k` values. Products process `run` rows
    /// together: all rows or, if gate and up rows share a pack, half of them.
    ///
    /// Panels need a multiple of 16 rows, and 16 must divide k so that no segment of a row-parallel product cuts a
    /// pair. The matrix registers of AMX load unpacked rows, and portable Rust is the specification, so both use rows.
    pub fn best(isa: CpuIsa, dtype: DType, run: usize, k: usize) -> Self {
        let is_vectors = match isa {
            CpuIsa::Avx2 | CpuIsa::Avx2Vnni => true,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Avx512Dot => true,
            CpuIsa::AmxBf16 => dtype != DType::BF16,
            CpuIsa::Neon => true,
            CpuIsa::Scalar => false,
        };
        let is_whole = run > 0 && k > 0 && run.is_multiple_of(LANES) && k.is_multiple_of(LANES);
        let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        if is_vectors && is_whole && is_float { Self::Panels } else { Self::Rows }
    }
}
