//! The properties of a GPU on which the choice of kernels depends.

use super::features::{Feature, Features};
use super::images::{Built, Tier};
use super::reason::{Reason, Target};

/// Rates of a card, for choices that compare the time of memory with the time of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Bytes that it reads from its memory in a microsecond.
    pub read: u64,
    /// FLOPs of bf16 products in a microsecond.
    pub flops: u64,
}

impl Rates {
    /// Measured on an H200, with 132 SMs.
    const HOPPER: Self = Self { read: 4_400_000, flops: 570_000_000 };
    const HOPPER_SMS: u64 = 132;

    /// Cards that were not measured get Hopper's rates in proportion to their SMs. So the number of rows from which on
    /// products take longer than memory is Hopper's.
    fn of(capability: (u32, u32), sms: usize) -> Self {
        let scaled = |rate: u64| (rate * sms as u64 / Self::HOPPER_SMS).max(1);
        match capability {
            (9, 0) => Self::HOPPER,
            _ => Self { read: scaled(Self::HOPPER.read), flops: scaled(Self::HOPPER.flops) },
        }
    }
}

/// A CUDA device for which this build has kernels: the properties on which the choice among kernels depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Compute capability (major, minor), for messages.
    pub compute_capability: (u32, u32),
    /// The features that the code of the tuned kernels for this card uses; `None`: there is no such code in this build.
    /// The portable kernels always run.
    pub tuned: Option<Features>,
    /// Whether the vendor's libraries may be used.
    pub libraries: bool,
    /// Bytes of shared memory that a block may request.
    pub block_shared_memory: usize,
    /// Streaming multiprocessors (SMs).
    pub sms: usize,
    /// The bytes that it reads and the FLOPs that it computes in a microsecond.
    pub rates: Rates,
}

impl Gpu {
    /// Hopper's data-centre cards (H100, H200).
    pub const HOPPER: Self = Self {
        compute_capability: (9, 0),
        tuned: Some(Features::of(&[
            Feature::AsyncCopies,
            Feature::Bf16Mma,
            Feature::TensorMaps,
            Feature::Clusters,
            Feature::Wgmma,
        ])),
        libraries: true,
        block_shared_memory: 232_448,
        sms: 132,
        rates: Rates::HOPPER,
    };

    /// A card on which no kernel runs.
    #[cfg(feature = "cuda")]
    pub(crate) const NONE: Self = Self {
        compute_capability: (0, 0),
        tuned: None,
        libraries: false,
        block_shared_memory: 0,
        sms: 0,
        rates: Rates { read: 1, flops: 1 },
    };

    /// A card of this compute capability (major, minor), with the shared memory of a block in bytes and the number of
    /// SMs, and the kernels that this build has for it.
    ///
    /// # Errors
    /// None of its kernels runs there.
    pub fn new(capability: (u32, u32), block_shared_memory: usize, sms: usize) -> Result<Self, String> {
        Self::with_code(capability, block_shared_memory, sms, false)
    }

    /// The same card if only PTX of this program may run: no machine code, and not the vendor's libraries, which have
    /// no PTX for it.
    ///
    /// # Errors
    /// No PTX of this build runs there.
    pub fn ptx_only(capability: (u32, u32), block_shared_memory: usize, sms: usize) -> Result<Self, String> {
        Self::with_code(capability, block_shared_memory, sms, true)
    }

    fn with_code(
        capability: (u32, u32),
        block_shared_memory: usize,
        sms: usize,
        ptx_only: bool,
    ) -> Result<Self, String> {
        Built::THIS.check(capability, ptx_only)?;
        Ok(Self {
            compute_capability: capability,
            tuned: Built::THIS.code(Tier::Tuned, capability, ptx_only),
            libraries: !ptx_only,
            block_shared_memory,
            sms,
            rates: Rates::of(capability, sms),
        })
    }

    /// Whether the code of the tuned kernels here uses a feature.
    pub fn has(&self, feature: Feature) -> bool {
        self.tuned.is_some_and(|features| features.has(feature))
    }

    /// Fails unless tuned kernels that use these features run here.
    ///
    /// # Errors
    /// [`Reason::NoCode`], [`Reason::Feature`].
    pub fn expect_tuned(&self, features: &[Feature]) -> Result<(), Reason> {
        let got = self.compute_capability;
        let Some(code) = self.tuned else { return Err(Reason::NoCode { got }) };
        match features.iter().find(|feature| !code.has(**feature)) {
            Some(needs) => Err(Reason::Feature { needs: *needs, got }),
            None => Ok(()),
        }
    }

    /// Fails if a block of this card may not have `needs` bytes of shared memory.
    pub(crate) fn expect_shared_memory(&self, needs: usize) -> Result<(), Reason> {
        match self.block_shared_memory {
            has if needs <= has => Ok(()),
            has => Err(Reason::SharedMemory { needs, has }),
        }
    }
}

#[cfg(test)]
impl Gpu {
    /// An A100.
    pub(crate) fn ampere() -> Self {
        Self::new((8, 0), 166_912, 108).unwrap()
    }
}

impl Target {
    /// Fails unless `gpu` is a GPU of this kind; `None`: the CPU.
    ///
    /// # Errors
    /// [`Reason::Device`], [`Reason::NoCode`], [`Reason::Feature`].
    pub fn expect(self, gpu: Option<&Gpu>) -> Result<(), Reason> {
        match (self, gpu) {
            (Self::Cpu, None) | (Self::Gpu, Some(_)) => Ok(()),
            (Self::Tuned(features), Some(gpu)) => gpu.expect_tuned(features),
            _ => Err(Reason::Device { needs: self, got: gpu.map(|gpu| gpu.compute_capability) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_is_what_the_build_makes_of_it() {
        assert_eq!(Gpu::new((9, 0), 232_448, 132), Ok(Gpu::HOPPER));
        assert!(Gpu::new((7, 5), 65_536, 40).unwrap_err().contains("built for 8.x and 9.0"));
    }

    #[test]
    fn cards_without_machine_code_keep_the_portable_kernels() {
        let blackwell = Gpu::new((12, 0), 101_376, 170).unwrap();
        assert_eq!((blackwell.tuned, blackwell.libraries), (None, true));
        assert_eq!(blackwell.expect_tuned(&[]), Err(Reason::NoCode { got: (12, 0) }));
        let forced = Gpu::ptx_only((9, 0), 232_448, 132).unwrap();
        assert_eq!((forced.tuned, forced.libraries), (None, false));
        let ampere = Gpu::new((8, 6), 101_376, 84).unwrap();
        assert_eq!(ampere.expect_tuned(&[Feature::Bf16Mma]), Ok(()));
        let refused = ampere.expect_tuned(&[Feature::Bf16Mma, Feature::Wgmma]);
        assert_eq!(refused, Err(Reason::Feature { needs: Feature::Wgmma, got: (8, 6) }));
    }

    #[test]
    fn unmeasured_cards_have_hoppers_ratio() {
        for sms in [1, 84, 108, 148, 170] {
            let rates = Gpu::new((10, 0), 232_448, sms).unwrap().rates;
            assert_eq!(rates.flops / rates.read, Rates::HOPPER.flops / Rates::HOPPER.read, "{sms}");
        }
    }
}
