//! Hardware features of a GPU that kernels use in addition to plain instructions.

use std::fmt;

/// A part of the hardware that some kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feature {
    /// Copies from global to shared memory during which threads continue (`cp.async`).
    AsyncCopies,
    /// Products of tiles of bf16 by a warp (`mma.sync`).
    Bf16Mma,
    /// An engine that copies rows, or tiles that a tensor map describes, to shared memory (TMA).
    TensorMaps,
    /// Blocks that read each other's shared memory.
    Clusters,
    /// Products by four warps that read shared memory (`wgmma`). Only cards of capability 9.0 have them; a block has
    /// 227 KiB of shared memory there.
    Wgmma,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsyncCopies => "asynchronous copies (cp.async)",
            Self::Bf16Mma => "tensor cores for bf16 (mma.sync)",
            Self::TensorMaps => "tensor maps and bulk copies",
            Self::Clusters => "clusters of blocks",
            Self::Wgmma => "warpgroup products (wgmma)",
        })
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u8);

impl Features {
    /// These features.
    pub const fn of(features: &[Feature]) -> Self {
        let mut set = 0;
        let mut next = 0;
        while next < features.len() {
            set |= 1 << features[next] as u8;
            next += 1;
        }
        Self(set)
    }

    /// Whether a feature is in the set.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }

    /// Both sets together.
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The features that the kernels for tensor cores of any card use.
pub const TENSOR_CORES: &[Feature] = &[Feature::AsyncCopies, Feature::Bf16Mma];
/// Features of streaming kernels that were only measured on cards with bulk copies.
pub const BULK_COPIES: &[Feature] = &[Feature::AsyncCopies, Feature::Bf16Mma, Feature::TensorMaps];
/// The features that the kernels on warpgroup products use.
pub const WARPGROUPS: &[Feature] = &[Feature::TensorMaps, Feature::Clusters, Feature::Wgmma];
