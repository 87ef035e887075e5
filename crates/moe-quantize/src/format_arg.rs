//! The formats that `moe-quantize quantize` writes, by their names on the command line.

use clap::ValueEnum;
use moe_quantize::{FileFormat, GgufMix};

/// The formats of `quantize --format`.
#[derive(Clone, Copy, ValueEnum)]
pub enum FormatArg {
    Gptq,
    CompressedTensors,
    Mxfp4,
    Nvfp4,
    #[value(name = "gguf:Q8_0")]
    GgufQ8_0,
    #[value(name = "gguf:Q6_K")]
    GgufQ6K,
    #[value(name = "gguf:Q4_K_M")]
    GgufQ4KM,
    #[value(name = "gguf:Q4_0")]
    GgufQ4_0,
}

/// What a format writes.
pub enum Written {
    /// A folder like the source's.
    Folder(FileFormat),
    /// One file.
    Gguf(GgufMix),
}

impl FormatArg {
    /// Returns what the format writes.
    pub fn written(self) -> Written {
        match self {
            Self::Gptq => Written::Folder(FileFormat::Gptq),
            Self::CompressedTensors => Written::Folder(FileFormat::CompressedTensors),
            Self::Mxfp4 => Written::Folder(FileFormat::Mxfp4),
            Self::Nvfp4 => Written::Folder(FileFormat::Nvfp4),
            Self::GgufQ8_0 => Written::Gguf(GgufMix::Q8_0),
            Self::GgufQ6K => Written::Gguf(GgufMix::Q6K),
            Self::GgufQ4KM => Written::Gguf(GgufMix::Q4KM),
            Self::GgufQ4_0 => Written::Gguf(GgufMix::Q4_0),
        }
    }
}
