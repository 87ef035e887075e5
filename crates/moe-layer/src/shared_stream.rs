//! Where shared experts run, as users say it.

use std::str::FromStr;

/// Where shared experts run on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedExpertsStream {
    /// As slots of the routed experts where kernels take them so, else on a second stream where that pays.
    #[default]
    Auto,
    /// On a second stream, beside the routed experts.
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
