//! The order of a weight's values.

use candle_core::DType;
use serde::Serialize;

use crate::cpu::simd::LANES;
use crate::exec::CpuIsa;

/// How the values of a matrix [N, K] lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightOrder {
    /// Row by row, as in a checkpoint.
    Rows,
    /// 16 rows at a time, the same k of all of them side by side: `[N / 16][K / D][16][D]`, D = 2 for bf16, else 1.
    Panels,
}

impl WeightOrder {
    /// The best order on a path, for a matrix with rows of `k` values whose products take runs of `run` rows together:
    /// all of them or, where gate and up rows share a pack, half.
    ///
    /// Panels need whole sixteens of rows, and 16 | k so that no segment of a row-parallel product
    /// cuts a pair. The matrix registers of AMX load rows as they are, and portable Rust is the specification.
    pub fn best(isa: CpuIsa, dtype: DType, run: usize, k: usize) -> Self {
        let is_vectors = match isa {
            CpuIsa::Avx2 | CpuIsa::Avx2Vnni => true,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Avx512Dot => true,
            CpuIsa::AmxBf16 => dtype != DType::BF16,
            CpuIsa::Scalar => false,
        };
        let is_whole = run > 0 && k > 0 && run.is_multiple_of(LANES) && k.is_multiple_of(LANES);
        let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        if is_vectors && is_whole && is_float { Self::Panels } else { Self::Rows }
    }
}
