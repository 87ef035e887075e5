//! Which GPUs this build has kernels for.
//!
//! Kernels are compiled to machine code of some architectures and to nothing that a driver could translate for others: a
//! launch on any other GPU would fail in the middle of a run.

/// The architectures of this build as nvcc names them, say `80 90a`; the build script knows them.
const BUILT: &str = env!("MOE_KERNEL_IMAGES");

/// Whether this build's kernels run on a GPU of this compute capability (major, minor).
///
/// # Errors
/// Why not, and which GPUs it has kernels for.
pub fn check_kernel_image(capability: (u32, u32)) -> Result<(), String> {
    check(BUILT, capability)
}

fn check(built: &str, capability: (u32, u32)) -> Result<(), String> {
    let images: Vec<Image> = built.split_whitespace().filter_map(Image::parse).collect();
    if images.iter().any(|image| image.runs_on(capability)) {
        return Ok(());
    }
    let (major, minor) = capability;
    let names: Vec<String> = images.iter().map(Image::gpus).collect();
    Err(format!(
        "its compute capability is {major}.{minor}, and this program's kernels are built for {}; use another GPU, or the CPU",
        names.join(" and ")
    ))
}

/// Machine code for one architecture.
struct Image {
    major: u32,
    minor: u32,
    /// With instructions that no other architecture has (`sm_90a`).
    specific: bool,
}

impl Image {
    /// `80`, `90a`, `120`: the last digit is the minor version.
    fn parse(name: &str) -> Option<Self> {
        let specific = name.ends_with('a');
        let number: u32 = name.trim_end_matches('a').parse().ok()?;
        Some(Self { major: number / 10, minor: number % 10, specific })
    }

    /// Machine code runs on the minor versions from its own on, and if it is specific, on its own alone.
    fn runs_on(&self, (major, minor): (u32, u32)) -> bool {
        major == self.major && (minor == self.minor || (!self.specific && minor > self.minor))
    }

    /// The GPUs that run it.
    fn gpus(&self) -> String {
        match (self.specific, self.minor) {
            (false, 0) => format!("{}.x", self.major),
            (false, minor) => format!("{}.{minor} and later {}.x", self.major, self.major),
            (true, minor) => format!("{}.{minor}", self.major),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_an_image_is_refused_with_the_reason() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0)] {
            assert_eq!(check_kernel_image(capability), Ok(()), "{capability:?}");
        }
        for capability in [(0, 0), (7, 5), (9, 1), (10, 0), (12, 0)] {
            let (major, minor) = capability;
            let error = check_kernel_image(capability).unwrap_err();
            let expected = format!("compute capability is {major}.{minor}, and this program's kernels");
            assert!(error.contains(&expected) && error.contains("are built for 8.x and 9.0;"), "{error}");
        }
    }

    #[test]
    fn the_build_decides() {
        assert!(check("75 100a 120", (10, 0)).is_ok());
        assert!(check("75 100a 120", (12, 1)).is_ok());
        assert!(check("86", (8, 0)).is_err());
        let error = check("86", (7, 5)).unwrap_err();
        assert!(error.contains("built for 8.6 and later 8.x;"), "{error}");
    }
}
