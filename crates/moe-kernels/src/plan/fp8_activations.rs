//! The setting `--fp8-activations`.

use std::fmt;
use std::str::FromStr;

/// Whether products of many rows quantise their activations to FP8 if the weights are FP8.
///
/// It changes results: each activation keeps 3 bits of its mantissa. Checkpoints with weights in blocks are made for
/// it, and their reference implementation quantises activations for every number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fp8Activations {
    /// For weights in blocks of 128 columns.
    Auto,
    /// For all FP8 weights that the kernels read.
    On,
    /// Never: activations keep 16 bits.
    #[default]
    Off,
}

impl fmt::Display for Fp8Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

impl FromStr for Fp8Activations {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err("expected auto, on or off".to_string()),
        }
    }
}
