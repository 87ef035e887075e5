//! Attention over the paged KV cache: which kernels run a step's rows.

use candle_core::DType;

use super::linear::{expect_at_most, expect_bf16};
use super::{Form, Machine, Reason};

/// Most rows of a grid.
const MAX_ROWS: usize = 65_535;
/// Head sizes of the fast kernels.
const HEAD_DIMS: &[usize] = &[64, 128];

/// Head norm, rotation, cache write and attention of a step's rows.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Rows T.
    pub rows: usize,
    /// Whether row i is the one new row of sequence i.
    pub one_row_each: bool,
    /// Query heads.
    pub num_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Dtype of the cache.
    pub dtype: DType,
    /// Whether all views begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// The kernels of [`rope_attention_into`](crate::rope_attention_into).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionForm {
    /// Everything in one launch, for one new row of each sequence (`attention_decode`). Its bits are not those of the
    /// same rows in a prompt.
    Decode,
    /// Head norm, rotation and cache write in one launch, then attention on tensor cores (`attention_prefill`).
    Prefill,
    /// Any dtype and head size on CUDA.
    Any,
    /// The CPU.
    Cpu,
}

impl Form for AttentionForm {
    type Call = AttentionCall;

    const ALL: &'static [Self] = &[Self::Decode, Self::Prefill, Self::Any, Self::Cpu];

    fn name(self) -> &'static str {
        match self {
            Self::Decode => "attention_decode",
            Self::Prefill => "attention_prefill",
            Self::Any => "any_attention",
            Self::Cpu => "cpu",
        }
    }

    fn fits(self, call: &AttentionCall, machine: &Machine) -> Result<(), Reason> {
        match self {
            Self::Decode => {
                machine.expect_gpu()?;
                machine.expect_batch_variant()?;
                if !call.one_row_each {
                    return Err(Reason::OneRowEach);
                }
                expect_at_most("rows", MAX_ROWS, call.rows)?;
                call.expect_fast()
            }
            Self::Prefill => {
                machine.expect_gpu()?;
                call.expect_fast()
            }
            Self::Any => machine.expect_gpu().map(drop),
            Self::Cpu => machine.expect_cpu(),
        }
    }
}

impl AttentionCall {
    fn expect_fast(&self) -> Result<(), Reason> {
        expect_bf16(self.dtype)?;
        if !HEAD_DIMS.contains(&self.head_dim) || self.num_heads == 0 {
            return Err(Reason::OneOf { dimension: "head_dim", accepted: HEAD_DIMS, got: self.head_dim });
        }
        if self.aligned { Ok(()) } else { Err(Reason::Alignment) }
    }
}
