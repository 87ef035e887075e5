//! Products with a matrix per head: which kernel multiplies so many rows.

use candle_core::DType;

use super::linear::{expect_bf16, expect_rows};
use super::{Form, Machine, Reason};

/// From this many rows on cuBLAS is faster than streaming the matrices past eight rows at a time.
const BLAS_ROWS: usize = 16;

/// out[t, h] = w\[h\] · x[t, h].
#[derive(Clone, Copy, Debug)]
pub struct PerHeadCall {
    /// Rows T.
    pub rows: usize,
    /// Dtype of x and w.
    pub dtype: DType,
}

/// The kernels of [`mla_query_into`](crate::mla_query_into) and [`mla_value_into`](crate::mla_value_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerHeadForm {
    /// cuBLAS, a batch of products.
    Blas,
    /// Any dtype and shape on CUDA, all heads in one launch.
    Any,
    /// The CPU.
    Cpu,
}

impl Form for PerHeadForm {
    type Call = PerHeadCall;

    const ALL: &'static [Self] = &[Self::Blas, Self::Any, Self::Cpu];

    fn name(self) -> &'static str {
        match self {
            Self::Blas => "cublas",
            Self::Any => "per_head",
            Self::Cpu => "cpu",
        }
    }

    fn fits(self, call: &PerHeadCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::Blas => {
                machine.expect_gpu()?;
                expect_bf16(call.dtype)?;
                machine.expect_batch_variant()?;
                expect_rows(BLAS_ROWS.., call.rows)
            }
            Self::Any => machine.expect_gpu().map(drop),
            Self::Cpu => machine.expect_cpu(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Gpu;

    #[test]
    fn few_rows_and_batch_invariance_keep_to_one_launch() {
        let gpu = Machine { gpu: Some(Gpu::HOPPER), batch_invariant: false };
        let name = |rows, dtype, machine: &Machine| {
            PerHeadForm::choose(&PerHeadCall { rows, dtype }, machine).map(Form::name)
        };
        assert_eq!(name(1, DType::BF16, &gpu), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &gpu), Some("cublas"));
        assert_eq!(name(4096, DType::F32, &gpu), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &Machine { batch_invariant: true, ..gpu }), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &Machine::default()), Some("cpu"));
    }
}
