//! Products with a matrix per head: which kernel multiplies a given number of rows, or whether a neighbouring launch
//! does.

use candle_core::DType;

use super::checks::{expect_bf16, expect_rows, expect_steps};
use super::{Feature, Form, Machine, Reason};

/// From this many rows on, cuBLAS is faster than streaming the matrices once for each eight rows.
const BLAS_ROWS: usize = 16;
/// Up to this many rows a neighbouring launch also computes the product: launches cost more than bytes then.
const BESIDE_ROWS: usize = 4;
/// The launch before attention that may hold the product of the queries with W_UK.
pub const QUERY_WITH_PRODUCT: &str = "latent_query";
/// The width of a head for which these launches are compiled, before W_UK and after W_UV.
const HEAD_DIM: usize = 128;

/// out[t, h] = w\[h\] · x[t, h].
#[derive(Clone, Copy, Debug)]
pub struct PerHeadCall {
    /// Rows T.
    pub rows: usize,
    /// Width of a head outside of latent space: columns of W_UKᵀ or rows of W_UV.
    pub head_dim: usize,
    /// Width L of the latent.
    pub latent: usize,
    /// The neighbouring launch, if it can contain the product: the launch before attention, or the launch that merges
    /// its splits.
    pub neighbour: Option<&'static str>,
    /// Dtype of x and w.
    pub dtype: DType,
}

/// The kernels of [`mla_query_into`](crate::mla_query_into) and [`mla_value_into`](crate::mla_value_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PerHeadForm {
    /// The neighbouring launch, which loads its part of the matrices into registers before its operands exist
    /// (`latent_query`, `latent_merge`).
    Overlapped,
    /// cuBLAS, a batch of products.
    Blas,
    /// Any dtype and shape on CUDA, all heads in one launch.
    Any,
    /// The CPU.
    Cpu,
}

impl Form for PerHeadForm {
    type Call = PerHeadCall;

    const ALL: &'static [Self] = &[Self::Overlapped, Self::Blas, Self::Any, Self::Cpu];

    fn name(self) -> &'static str {
        match self {
            Self::Overlapped => "in the launch next to it",
            Self::Blas => "cublas",
            Self::Any => "per_head",
            Self::Cpu => "cpu_per_head",
        }
    }

    fn fits(self, call: &PerHeadCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::Overlapped => {
                machine.expect_tuned(&[Feature::Bf16Mma, Feature::Clusters])?;
                expect_bf16(call.dtype)?;
                machine.expect_batch_variant()?;
                expect_rows(1..=BESIDE_ROWS, call.rows)?;
                expect_steps("latent", call.latent, HEAD_DIM)?;
                if call.head_dim != HEAD_DIM {
                    return Err(Reason::OneOf {
                        dimension: "head",
                        accepted: &[HEAD_DIM],
                        got: call.head_dim,
                    });
                }
                match call.neighbour {
                    Some(_) => Ok(()),
                    None => {
                        Err(Reason::Part { part: "launches next to it that leave no room for the product" })
                    }
                }
            }
            Self::Blas => {
                machine.expect_library()?;
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
        let gpu = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
        let name = |rows, dtype, machine: &Machine| {
            let call = PerHeadCall { rows, head_dim: 128, latent: 512, neighbour: None, dtype };
            PerHeadForm::choose(&call, machine).map(Form::name)
        };
        let neighbour = |rows, head_dim| {
            let latent = 512;
            let dtype = DType::BF16;
            let neighbour = Some("latent_query");
            PerHeadForm::choose(&PerHeadCall { rows, head_dim, latent, neighbour, dtype }, &gpu)
        };
        assert_eq!(neighbour(1, 128), Some(PerHeadForm::Overlapped));
        assert_eq!(neighbour(4, 128), Some(PerHeadForm::Overlapped));
        assert_eq!((neighbour(5, 128), neighbour(1, 64)), (Some(PerHeadForm::Any), Some(PerHeadForm::Any)));
        assert_eq!(name(1, DType::BF16, &gpu), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &gpu), Some("cublas"));
        assert_eq!(name(4096, DType::F32, &gpu), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &Machine { batch_invariant: true, ..gpu }), Some("per_head"));
        assert_eq!(name(4096, DType::BF16, &Machine::default()), Some("cpu_per_head"));
    }
}
