//! What the kernels of this build were compiled to, and which of these images runs on a GPU.
//!
//! Machine code runs on the minor version of its architecture and on later minor versions (`sm_90a` only on 9.0). PTX
//! runs on its capability and all later ones: the driver translates it. Only the portable tier is also built as PTX.

use super::features::{Feature, Features};

/// The images of each tier, for example `portable sm_80 sm_90a compute_80; tuned sm_80 sm_90a`. The build script writes
/// them.
const BUILT: &str = env!("MOE_KERNEL_IMAGES");

/// Kernels that are compiled for the same cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    /// The plain kernels, which are enough to run a model.
    Portable,
    /// Kernels for tensor cores and other features that not every card has.
    Tuned,
}

impl Tier {
    fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Tuned => "tuned",
        }
    }
}

/// Whether this build has kernels that run a model on a GPU of this compute capability (major, minor).
///
/// # Errors
/// Why not, and which GPUs it has kernels for.
pub fn check_kernel_image(capability: (u32, u32)) -> Result<(), String> {
    Built::THIS.check(capability, false)
}

/// Whether a GPU of this compute capability runs only the portable kernels, which are slow.
pub fn is_portable_only(capability: (u32, u32)) -> bool {
    check_kernel_image(capability).is_ok() && Built::THIS.code(Tier::Tuned, capability, false).is_none()
}

/// A list of images.
#[derive(Clone, Copy)]
pub(super) struct Built(&'static str);

impl Built {
    /// The images of this build.
    pub const THIS: Self = Self(BUILT);

    /// The features that the code of a tier on this GPU uses; `None`: the tier has no code for it. `ptx_only`: machine
    /// code is ignored.
    pub fn code(self, tier: Tier, capability: (u32, u32), ptx_only: bool) -> Option<Features> {
        let usable = |image: &Image| image.runs_on(capability) && !(ptx_only && image.kind == Kind::Machine);
        // The driver chooses in the same way: machine code first, then the latest version.
        let best = self.images(tier).filter(usable).max_by_key(|image| (image.kind, image.capability));
        best.map(|image| image.features())
    }

    /// Whether a model runs on a GPU of this capability.
    ///
    /// # Errors
    /// What was built, and what the GPU is.
    pub fn check(self, capability: (u32, u32), ptx_only: bool) -> Result<(), String> {
        if self.code(Tier::Portable, capability, ptx_only).is_some() {
            return Ok(());
        }
        let built_as = |(how, kind)| {
            let images = self.images(Tier::Portable).filter(move |image| image.kind == kind);
            let gpus: Vec<String> = images.map(|image| image.gpus()).collect();
            (!gpus.is_empty()).then(|| format!("{how}{}", gpus.join(" and ")))
        };
        let kinds = [("", Kind::Machine), ("as PTX for ", Kind::Ptx)];
        let built: Vec<String> = kinds.into_iter().filter_map(built_as).collect();
        let (major, minor) = capability;
        let only = if ptx_only { ", of which only PTX is asked for" } else { "" };
        Err(format!(
            "its compute capability is {major}.{minor}, and this program's kernels are built for {}{only}; use another \
             GPU, or the CPU",
            built.join(", ")
        ))
    }

    fn images(self, tier: Tier) -> impl Iterator<Item = Image> {
        let mut tiers = self.0.split(';').filter_map(|tier| tier.trim().split_once(' '));
        let images = tiers.find(|(name, _)| *name == tier.name()).map_or("", |(_, images)| images);
        images.split_whitespace().filter_map(Image::parse)
    }
}

/// The kinds of code, in ascending order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Ptx,
    Machine,
}

/// One image: what a kernel was compiled to.
#[derive(Clone, Copy, Debug)]
struct Image {
    kind: Kind,
    /// Major and minor version of the architecture.
    capability: (u32, u32),
    /// Whether it has instructions that no other architecture has (`sm_90a`).
    specific: bool,
}

impl Image {
    /// `sm_80`, `sm_90a`, `compute_80`: the last digit is the minor version.
    fn parse(name: &str) -> Option<Self> {
        let (kind, number) = match name.strip_prefix("sm_") {
            Some(number) => (Kind::Machine, number),
            None => (Kind::Ptx, name.strip_prefix("compute_")?),
        };
        let specific = number.ends_with('a');
        let number: u32 = number.trim_end_matches('a').parse().ok()?;
        Some(Self { kind, capability: (number / 10, number % 10), specific })
    }

    fn runs_on(&self, capability: (u32, u32)) -> bool {
        match self.kind {
            _ if self.specific => capability == self.capability,
            Kind::Machine => capability.0 == self.capability.0 && capability.1 >= self.capability.1,
            Kind::Ptx => capability >= self.capability,
        }
    }

    /// The features that the sources use when they are compiled for this image (`MOE_HAS_..` in cuda/ptx/ptx.cuh).
    fn features(&self) -> Features {
        let mut features = Features::default();
        if self.capability >= (8, 0) {
            features = features.and(Features::of(&[Feature::AsyncCopies, Feature::Bf16Mma]));
        }
        if self.capability >= (9, 0) {
            features = features.and(Features::of(&[Feature::TensorMaps, Feature::Clusters]));
        }
        if self.capability == (9, 0) && self.specific {
            features = features.and(Features::of(&[Feature::Wgmma]));
        }
        features
    }

    /// The GPUs on which this image runs.
    fn gpus(&self) -> String {
        let (major, minor) = self.capability;
        match (self.kind, self.specific, minor) {
            (_, true, _) => format!("{major}.{minor}"),
            (Kind::Ptx, ..) => format!("{major}.{minor} and later"),
            (Kind::Machine, false, 0) => format!("{major}.x"),
            (Kind::Machine, false, _) => format!("{major}.{minor} and later {major}.x"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_an_image_is_refused_with_the_reason() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (9, 1), (10, 0), (12, 0)] {
            assert_eq!(check_kernel_image(capability), Ok(()), "{capability:?}");
        }
        for capability in [(0, 0), (7, 5)] {
            let (major, minor) = capability;
            let error = check_kernel_image(capability).unwrap_err();
            let expected = format!(
                "compute capability is {major}.{minor}, and this program's kernels are built for 8.x and 9.0, as PTX for \
                 8.0 and later; use another GPU, or the CPU"
            );
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn tuned_kernels_run_where_their_machine_code_does() {
        let code = |capability| Built::THIS.code(Tier::Tuned, capability, false);
        for capability in [(8, 0), (8, 6), (8, 9)] {
            let features = code(capability).unwrap();
            assert!(features.has(Feature::Bf16Mma) && features.has(Feature::AsyncCopies));
            assert!(!features.has(Feature::TensorMaps) && !features.has(Feature::Wgmma));
        }
        let features = code((9, 0)).unwrap();
        assert!(features.has(Feature::Wgmma) && features.has(Feature::Clusters));
        for capability in [(9, 1), (10, 0), (10, 3), (12, 0)] {
            assert_eq!(code(capability), None, "{capability:?}");
            assert!(is_portable_only(capability));
        }
        assert!(!is_portable_only((8, 6)) && !is_portable_only((9, 0)) && !is_portable_only((7, 5)));
    }

    #[test]
    fn machine_code_comes_before_ptx_and_the_latest_first() {
        let has = |built, capability, ptx_only, feature| {
            let code = Built(built).code(Tier::Portable, capability, ptx_only);
            code.map(|features| features.has(feature))
        };
        let built = "portable sm_80 sm_90a compute_80 compute_90";
        assert_eq!(has(built, (9, 0), false, Feature::Wgmma), Some(true));
        assert_eq!(has(built, (9, 0), true, Feature::Wgmma), Some(false));
        assert_eq!(has(built, (12, 0), false, Feature::TensorMaps), Some(true));
        assert_eq!(has(built, (8, 9), true, Feature::TensorMaps), Some(false));
        assert_eq!(has("portable compute_90a", (10, 0), false, Feature::Wgmma), None);
    }

    #[test]
    fn the_build_decides() {
        let check = |built, capability| Built(built).check(capability, false);
        let built = "portable sm_75 sm_100a sm_120";
        assert!(check(built, (10, 0)).is_ok() && check(built, (12, 1)).is_ok());
        assert!(check(built, (10, 3)).is_err() && check(built, (9, 0)).is_err());
        let error = check("tuned sm_80; portable sm_86", (8, 0)).unwrap_err();
        assert!(error.contains("built for 8.6 and later 8.x;"), "{error}");
        let error = Built("portable sm_90a").check((9, 0), true).unwrap_err();
        assert!(error.contains("built for 9.0, of which only PTX is asked for"), "{error}");
    }
}
