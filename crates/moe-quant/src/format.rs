//! The format of one matrix, as plain data: everything that its tensors' names, shapes and bits depend on.

use moe_kernels::{QuantGroup, QuantScheme};
use serde::Serialize;

use crate::ggml::GgmlType;

/// Columns of a block of the MX formats.
pub(crate) const MX_BLOCK: usize = 32;
/// Columns of a block of NVFP4.
pub(crate) const NV_BLOCK: usize = 16;

/// How a checkpoint stores one linear layer's weights \[N, K\] (N outputs, K inputs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Format {
    /// Not quantised: `weight` in a float dtype.
    Plain,
    /// GPTQ: integers packed along K, transposed.
    Gptq {
        /// Bits, group, zero points, act-order.
        int: IntFormat,
        /// How zero points are stored.
        zeros: GptqZeros,
    },
    /// AWQ in its `gemm` packing: int4 packed along N, interleaved, transposed.
    Awq {
        /// Bits (4), group, zero points; never act-order.
        int: IntFormat,
    },
    /// compressed-tensors' `pack-quantized`: integers packed along K, in the order of the matrix.
    PackQuantized {
        /// Bits, group, zero points, act-order.
        int: IntFormat,
    },
    /// MXFP4: E2M1 codes packed along K, an E8M0 scale for 32 columns.
    Mxfp4(Fp4Tensors),
    /// NVFP4: E2M1 codes packed along K, an E4M3 scale for 16 columns, times one F32 scale for the matrix.
    Nvfp4(Fp4Tensors),
    /// Blocks of ggml, as GGUF files have them: codes and scales of a part of a row together.
    Ggml(GgmlType),
    /// E4M3 bytes in `weight`, and scales in a tensor of their own.
    Fp8 {
        /// Which weights share a scale.
        scales: QuantGroup,
        /// The scales' tensor is `weight_scale_inv` (DeepSeek's name; it holds factors, not inverses).
        scale_inv: bool,
    },
}

/// What the integer formats have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct IntFormat {
    /// 4 or 8.
    pub bits: u8,
    /// Columns that share a scale.
    pub group: QuantGroup,
    /// Groups have zero points of their own (asymmetric).
    pub zero_point: bool,
    /// `g_idx` says to which group a column belongs.
    pub act_order: bool,
}

/// The names that tensors of E2M1 codes go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fp4Tensors {
    /// compressed-tensors: `weight_packed`; the scale of a matrix is `weight_global_scale`, by which is divided.
    Packed,
    /// ModelOpt and Quark: `weight`; the scale of a matrix is `weight_scale_2`, a factor.
    Plain,
}

/// How GPTQ stores zero points: `checkpoint_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GptqZeros {
    /// `gptq`: minus one.
    V1,
    /// `gptq_v2`: as they are.
    V2,
}

impl Fp4Tensors {
    /// What follows a module's name in the name of the tensor with its codes.
    pub(crate) fn codes(self) -> &'static str {
        match self {
            Self::Packed => "weight_packed",
            Self::Plain => "weight",
        }
    }

    /// The same of the scale of a matrix in NVFP4.
    pub(crate) fn matrix_scale(self) -> &'static str {
        match self {
            Self::Packed => "weight_global_scale",
            Self::Plain => "weight_scale_2",
        }
    }
}

impl IntFormat {
    /// Integers in 32 bits.
    pub fn per_word(self) -> usize {
        32 / usize::from(self.bits.max(1))
    }

    /// The zero point of a symmetric format. Of bits outside 1 to 8, which no format has, it is that of the nearest
    /// bits.
    pub fn middle(self) -> u8 {
        self.scheme().middle()
    }

    fn scheme(self) -> QuantScheme {
        let Self { bits, group, zero_point, act_order } = self;
        QuantScheme::int(bits, group).with_zero_points(zero_point).with_act_order(act_order)
    }
}

impl Format {
    /// What a kernel must know of the format.
    pub fn scheme(self) -> QuantScheme {
        match self {
            Self::Plain => QuantScheme::NONE,
            Self::Gptq { int, .. } | Self::Awq { int } | Self::PackQuantized { int } => int.scheme(),
            Self::Mxfp4(_) => QuantScheme::fp4(QuantGroup::Size(MX_BLOCK)),
            Self::Nvfp4(_) => QuantScheme::fp4(QuantGroup::Size(NV_BLOCK)).with_fp8_scales(),
            Self::Ggml(ggml) => ggml.scheme(),
            Self::Fp8 { scales, .. } => QuantScheme::fp8(scales),
        }
    }

    /// The integer part; `None` for floats.
    pub fn int(self) -> Option<IntFormat> {
        match self {
            Self::Gptq { int, .. } | Self::Awq { int } | Self::PackQuantized { int } => Some(int),
            Self::Plain | Self::Mxfp4(_) | Self::Nvfp4(_) | Self::Ggml(_) | Self::Fp8 { .. } => None,
        }
    }

    /// What follows a module's name in the name of the tensor with its weights.
    pub fn main_tensor(self) -> &'static str {
        match self {
            Self::Plain | Self::Ggml(_) | Self::Fp8 { .. } => "weight",
            Self::Gptq { .. } | Self::Awq { .. } => "qweight",
            Self::PackQuantized { .. } => "weight_packed",
            Self::Mxfp4(tensors) | Self::Nvfp4(tensors) => tensors.codes(),
        }
    }

    /// Name of the format as its makers write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Gptq { zeros: GptqZeros::V1, .. } => "gptq",
            Self::Gptq { zeros: GptqZeros::V2, .. } => "gptq_v2",
            Self::Awq { .. } => "awq gemm",
            Self::PackQuantized { .. } => "pack-quantized",
            Self::Mxfp4(Fp4Tensors::Packed) => "mxfp4-pack-quantized",
            Self::Mxfp4(Fp4Tensors::Plain) => "mxfp4",
            Self::Nvfp4(Fp4Tensors::Packed) => "nvfp4-pack-quantized",
            Self::Nvfp4(Fp4Tensors::Plain) => "nvfp4",
            Self::Ggml(ggml) => ggml.name(),
            Self::Fp8 { .. } => "fp8",
        }
    }

    /// Columns that a file stores together, which must divide K; 1 where any K is stored.
    pub(crate) fn block(self) -> usize {
        match self {
            Self::Mxfp4(_) => MX_BLOCK,
            Self::Nvfp4(_) => NV_BLOCK,
            Self::Ggml(ggml) => ggml.columns(),
            _ => 1,
        }
    }

    /// Into how many equal parts a row-parallel layer may cut K, 1 first: numbers that cut through no group, and with
    /// act-order every divisor of K. Sizes above 64 are left out.
    pub fn tp_sizes(self, k: usize) -> Vec<usize> {
        let scheme = self.scheme();
        let whole = match scheme.group {
            QuantGroup::Channel | QuantGroup::Tensor => 1,
            _ if scheme.act_order => 1,
            _ => scheme.group_size(k),
        };
        (1..=64).filter(|tp| k.is_multiple_of(*tp) && (*tp == 1 || (k / tp).is_multiple_of(whole))).collect()
    }
}
