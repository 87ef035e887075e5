//! `--dtype` under the names of vLLM and torch.

use candle_core::DType;
use clap::ValueEnum;

/// A dtype that models run in, or the checkpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtypeChoice {
    /// The checkpoint's.
    Auto,
    /// Single precision.
    #[value(alias = "float32", alias = "float")]
    F32,
    /// bfloat16.
    #[value(alias = "bfloat16")]
    Bf16,
    /// Half precision.
    #[value(alias = "float16", alias = "half")]
    F16,
}

impl DtypeChoice {
    /// The dtype; `None`: the checkpoint's.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }
}
