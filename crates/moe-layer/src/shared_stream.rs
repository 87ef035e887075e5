//! The setting of where shared experts run.

use std::str::FromStr;

/// Where shared experts run on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedExpertsStream {
    /// As slots of the routed experts if kernels support that, and otherwise on a second stream if that is faster.
    #[default]
    Auto,
    /// On a second stream, at the same time as the routed experts.
    On,
    /// After the routed experts.
    Off,
}

impl FromStr for SharedExpertsStream {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            other => Err(format!("unknown place of shared experts {other:?}; expected on, off or auto")),
        }
    }
}
