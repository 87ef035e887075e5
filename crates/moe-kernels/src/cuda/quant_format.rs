//! The codings of weights that the device's kernels read (`cuda/codes.cuh`).

use candle_core::{Result, bail};

use crate::plan::expect_codec;
use crate::scheme::{Codes, Levels, QuantScheme};

/// The coding of the weights in a quantised pack.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantFormat {
    Int4 = 0,
    Int8 = 1,
    Fp8 = 2,
    Fp4 = 3,
    /// FP4 with scales in two levels.
    Nvfp4 = 4,
    /// Integers of 4 bits with minima, and scales in two levels.
    Q4k = 5,
}

impl QuantFormat {
    /// The device's codec for a number format.
    ///
    /// # Errors
    /// A format that no kernel of the device reads.
    pub(crate) fn of(op: &str, scheme: QuantScheme) -> Result<Self> {
        let codec = expect_codec(scheme, true).ok().and_then(|()| match scheme.codes {
            Codes::Int(4) if scheme.is_q4k() => Some(Self::Q4k),
            Codes::Int(4) => Some(Self::Int4),
            Codes::Int(8) => Some(Self::Int8),
            Codes::E4m3 => Some(Self::Fp8),
            Codes::E2m1 if scheme.levels == Levels::Fp8 => Some(Self::Nvfp4),
            Codes::E2m1 => Some(Self::Fp4),
            _ => None,
        });
        match codec {
            Some(codec) => Ok(codec),
            None => bail!("{op}: no kernel of a GPU reads weights in {scheme}; compute on the CPU"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::QuantFormat;
    use crate::plan::expect_codec;
    use crate::scheme::{QuantGroup, QuantScheme};

    #[test]
    fn every_format_that_gpus_read_has_a_codec() {
        let group = QuantGroup::Size(32);
        let int = |bits| QuantScheme::int(bits, group);
        let fp4 = QuantScheme::fp4(group);
        for (scheme, codec) in [
            (int(4), Some(QuantFormat::Int4)),
            (int(8).with_zero_points(true), Some(QuantFormat::Int8)),
            (int(4).with_shared_scales(8), Some(QuantFormat::Int4)),
            (QuantScheme::fp8(group), Some(QuantFormat::Fp8)),
            (fp4, Some(QuantFormat::Fp4)),
            (fp4.with_fp8_scales(), Some(QuantFormat::Nvfp4)),
            (int(4).with_minima(), None),
            (int(4).with_minima().with_shared_scales(8), Some(QuantFormat::Q4k)),
            (int(4).with_minima().with_shared_scales(2), None),
            (int(8).with_minima().with_shared_scales(8), None),
            (int(4).with_fp8_scales(), None),
            (QuantScheme::fp8(group).with_fp8_scales(), None),
            (int(5), None),
            (QuantScheme::iq4_nl(group), None),
            (QuantScheme::NONE, None),
        ] {
            assert_eq!(QuantFormat::of("op", scheme).ok(), codec, "{scheme}");
            assert_eq!(expect_codec(scheme, true).is_ok(), codec.is_some(), "{scheme}");
        }
    }
}
