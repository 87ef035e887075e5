//! Quantised weights: one type for the packs of the CPU and of CUDA devices.

use std::sync::Arc;

use candle_core::{DType, Device, Result, bail};
use parking_lot::{RwLock, RwLockReadGuard};

#[cfg(feature = "cuda")]
use crate::cuda::quant::DevicePack;
use crate::plan::QuantWeights;
use crate::quant::{QuantPacking, QuantStack, QuantUse};
use crate::scheme::QuantScheme;

/// Packed integers or FP8.
#[derive(Clone, Debug)]
pub(super) struct Quantised {
    pub pack: Pack,
    /// [N, K] or [E, N, K].
    pub dims: Vec<usize>,
    /// The dtype of the activations that it is multiplied with.
    pub dtype: DType,
}

/// Matrices in the order that the kernels of a machine read.
#[derive(Clone, Debug)]
pub(super) enum Pack {
    /// Products read it. It is written when one of its experts is replaced.
    Cpu(Arc<RwLock<QuantStack>>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<DevicePack>),
}

impl Pack {
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Cpu(matrix) => matrix.read().dims(),
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.dims(),
        }
    }

    pub fn usage(&self) -> QuantUse {
        match self {
            Self::Cpu(matrix) => matrix.read().usage(),
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.usage(),
        }
    }

    pub fn scheme(&self) -> QuantScheme {
        match self {
            Self::Cpu(matrix) => matrix.read().scheme(),
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.scheme(),
        }
    }

    pub fn weights(&self) -> QuantWeights {
        match self {
            Self::Cpu(matrix) => {
                let matrix = matrix.read();
                let gate_up = matrix.usage() == QuantUse::GateUp;
                QuantWeights {
                    scheme: matrix.scheme(),
                    scales: matrix.scale_dtype(),
                    gate_up,
                    in_blocks: false,
                    order: matrix.order(),
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.weights(),
        }
    }

    pub fn packing(&self) -> QuantPacking {
        match self {
            Self::Cpu(_) => QuantPacking::Host("its kernels are the host's".to_string()),
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.packing().clone(),
        }
    }

    pub fn device(&self) -> &Device {
        match self {
            Self::Cpu(_) => &Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.device(),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Cpu(matrix) => matrix.read().bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(pack) => pack.bytes(),
        }
    }
}

/// A quantised weight under the read guard of its matrices if they are on the CPU.
pub(super) struct QuantGuard<'a> {
    weight: &'a Quantised,
    matrix: Option<RwLockReadGuard<'a, QuantStack>>,
}

impl<'a> QuantGuard<'a> {
    pub(super) fn new(weight: &'a Quantised) -> Self {
        let matrix = match &weight.pack {
            Pack::Cpu(matrix) => Some(matrix.read()),
            #[cfg(feature = "cuda")]
            Pack::Cuda(_) => None,
        };
        Self { weight, matrix }
    }

    pub(super) fn view(&self) -> QuantView<'_> {
        QuantView { weight: self.weight, matrix: self.matrix.as_deref(), dims: &self.weight.dims }
    }
}

/// A quantised weight. Only [`Weight::of_quantised`](crate::Weight::of_quantised) makes it.
#[derive(Clone, Copy, Debug)]
pub struct QuantView<'a> {
    pub(super) weight: &'a Quantised,
    pub(super) matrix: Option<&'a QuantStack>,
    /// [N, K] or [E, N, K].
    pub(super) dims: &'a [usize],
}

impl<'a> QuantView<'a> {
    /// Its quantisation.
    pub fn scheme(self) -> QuantScheme {
        self.matrix.map_or_else(|| self.weight.pack.scheme(), QuantStack::scheme)
    }

    fn usage(self) -> QuantUse {
        self.matrix.map_or_else(|| self.weight.pack.usage(), QuantStack::usage)
    }

    /// The number of segments of K that a dense product sums separately.
    ///
    /// # Errors
    /// A weight that is packed for gate and up.
    pub(crate) fn segments(self, op: &str) -> Result<usize> {
        match self.usage() {
            QuantUse::Linear => Ok(1),
            QuantUse::RowParallel { segments } => Ok(segments),
            QuantUse::GateUp => {
                bail!("{op}: expected a matrix packed for a dense product, got one for gate and up")
            }
        }
    }

    /// Fails unless it is packed for gate and up.
    ///
    /// # Errors
    /// A weight that is packed for a dense product.
    pub(crate) fn expect_gate_up(self, op: &str) -> Result<()> {
        match self.usage() {
            QuantUse::GateUp => Ok(()),
            other => bail!("{op}: expected a matrix packed for gate and up, got one for {other:?}"),
        }
    }

    /// The matrices in the order of the CPU.
    ///
    /// # Errors
    /// A weight on a device.
    pub(crate) fn matrix(self, op: &str) -> Result<&'a QuantStack> {
        match self.matrix {
            Some(matrix) => Ok(matrix),
            None => bail!("{op}: expected quantised weights on the CPU, got some on a CUDA device"),
        }
    }

    /// The matrices on a device.
    ///
    /// # Errors
    /// A weight on the CPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_pack(self, op: &str) -> Result<&'a DevicePack> {
        match &self.weight.pack {
            Pack::Cuda(pack) => Ok(pack),
            Pack::Cpu(_) => bail!("{op}: expected quantised weights on a CUDA device, got some on the CPU"),
        }
    }
}
