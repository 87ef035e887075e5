//! The format of one matrix, as plain data: everything that its tensors' names, shapes and bits depend on.

use moe_kernels::{QuantGroup, QuantScheme};
use serde::Serialize;

/// Columns of a block of the MX formats.
pub(crate) const MX_BLOCK: usize = 32;

/// How a checkpoint stores one linear layer's weights \[N, K\] (N outputs, K inputs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
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
    /// compressed-tensors' `mxfp4-pack-quantized`: E2M1 codes packed along K, an E8M0 scale for 32 columns.
    Mxfp4,
    /// E4M3 bytes in `weight`, scales beside them.
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

/// How GPTQ stores zero points: `checkpoint_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GptqZeros {
    /// `gptq`: minus one.
    V1,
    /// `gptq_v2`: as they are.
    V2,
}

impl IntFormat {
    /// Integers in 32 bits.
    pub fn per_word(self) -> usize {
        32 / usize::from(self.bits.max(1))
    }

    /// The zero point of a symmetric format. Of bits outside 1 to 8, which no format has, it is that of the nearest bits.
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
            Self::Mxfp4 => QuantScheme::fp4(QuantGroup::Size(MX_BLOCK)),
            Self::Fp8 { scales, .. } => QuantScheme::fp8(scales),
        }
    }

    /// The integer part; `None` for floats.
    pub fn int(self) -> Option<IntFormat> {
        match self {
            Self::Gptq { int, .. } | Self::Awq { int } | Self::PackQuantized { int } => Some(int),
            Self::Plain | Self::Mxfp4 | Self::Fp8 { .. } => None,
        }
    }

    /// What follows a module's name in the name of the tensor with its weights.
    pub fn main_tensor(self) -> &'static str {
        match self {
            Self::Plain | Self::Fp8 { .. } => "weight",
            Self::Gptq { .. } | Self::Awq { .. } => "qweight",
            Self::PackQuantized { .. } | Self::Mxfp4 => "weight_packed",
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
            Self::Mxfp4 => "mxfp4-pack-quantized",
            Self::Fp8 { .. } => "fp8",
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
