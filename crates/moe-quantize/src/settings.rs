//! The settings of a quantisation as plain data.

use std::path::PathBuf;

use anyhow::{Result, bail};
use moe_quant::{Format, Fp4Tensors, GptqZeros, IntFormat, QuantGroup};
use safetensors::Dtype;

/// The file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// The format `gptq`, with zero points of version 1.
    Gptq,
    /// The format `pack-quantized` of compressed-tensors.
    CompressedTensors,
    /// The format `mxfp4-pack-quantized` of compressed-tensors.
    Mxfp4,
    /// The format `nvfp4-pack-quantized` of compressed-tensors.
    Nvfp4,
}

impl FileFormat {
    /// Returns the number of columns that share a scale if nothing else is said.
    pub fn usual_group(self) -> QuantGroup {
        QuantGroup::Size(match self {
            Self::Gptq | Self::CompressedTensors => 128,
            Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        })
    }

    /// Returns the format of floats of 4 bits, or `None` for integers.
    fn fp4(self) -> Option<Format> {
        match self {
            Self::Gptq | Self::CompressedTensors => None,
            Self::Mxfp4 => Some(Format::Mxfp4(Fp4Tensors::Packed)),
            Self::Nvfp4 => Some(Format::Nvfp4(Fp4Tensors::Packed)),
        }
    }
}

/// How integers are chosen.
#[derive(Clone, Debug)]
pub enum Method {
    /// Each weight is rounded to the nearest value of its group.
    Rtn,
    /// Columns are rounded one after the other, and later columns compensate for the errors of earlier ones (Frantar et
    /// al. 2022, arXiv 2210.17323).
    Gptq(Calibration),
}

/// The settings of calibration with GPTQ.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The calibration text.
    pub text: TextSettings,
    /// The damping: this share of the mean of a Hessian's diagonal is added to the diagonal.
    pub damping: f64,
    /// The least number of tokens that a module must get. A module with fewer is rounded to nearest.
    pub min_tokens: usize,
}

/// A text, and the part of it that is read.
#[derive(Clone, Debug)]
pub struct TextSettings {
    /// The file, in UTF-8.
    pub file: PathBuf,
    /// The number of windows.
    pub samples: usize,
    /// The number of tokens of a window.
    pub length: usize,
}

/// How to treat a linear layer whose sizes are not multiples of the format's or the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// The run fails with an error that lists such layers.
    Refuse,
    /// The layer stays in floats.
    Keep,
    /// Each row of the layer gets one scale.
    Channel,
}

/// How a checkpoint is quantised.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The file format.
    pub format: FileFormat,
    /// The bits of an integer: 4 or 8.
    pub bits: u8,
    /// The number of columns that share a scale.
    pub group: QuantGroup,
    /// Whether groups have no zero points of their own.
    pub symmetric: bool,
    /// Whether to use act-order, in which GPTQ rounds the columns with the largest inputs first. In the format of GPTQ
    /// these columns also share groups. In compressed-tensors the groups stay consecutive, which is called `actorder:
    /// weight` there.
    pub desc_act: bool,
    /// How integers are chosen.
    pub method: Method,
    /// Whether the vocabulary projection is quantised too. If it is the embedding, it becomes a matrix of its own, and
    /// the embedding stays in floats.
    pub lm_head: bool,
    /// The names of the modules that stay in floats. `*` stands for any characters.
    pub ignore: Vec<String>,
    /// How to treat layers whose sizes do not divide.
    pub indivisible: Indivisible,
}

impl Settings {
    /// Returns the format of most linear layers.
    ///
    /// # Errors
    /// The number of bits cannot be written, act-order is set without groups, or settings of integers are set for
    /// floats of 4 bits.
    pub fn base(&self) -> Result<Format> {
        if let Some(format) = self.format.fp4() {
            self.check_fp4(format)?;
            return Ok(format);
        }
        if !matches!(self.bits, 4 | 8) {
            bail!("`bits`: expected 4 or 8, got {}", self.bits)
        }
        if self.desc_act && self.group == QuantGroup::Channel {
            bail!("`desc_act`: rows with one scale have no groups to order; use a `group` of 32, 64 or 128")
        }
        let int = IntFormat {
            bits: self.bits,
            group: self.group,
            zero_point: !self.symmetric,
            // compressed-tensors no longer supports groups in any order, so the columns keep their groups there.
            act_order: self.desc_act && self.format == FileFormat::Gptq,
        };
        Ok(match self.format {
            FileFormat::Gptq => Format::Gptq { int, zeros: GptqZeros::V1 },
            _ => Format::PackQuantized { int },
        })
    }

    fn check_fp4(&self, format: Format) -> Result<()> {
        let name = format.name();
        if self.bits != 4 {
            bail!("`bits`: {name} has 4, got {}", self.bits)
        }
        if self.group != self.format.usual_group() {
            bail!("`group`: {name} has blocks of {} columns", format.scheme().group_size(1))
        }
        if !self.symmetric {
            bail!("`symmetric` false: {name} has no zero points")
        }
        if self.desc_act || matches!(self.method, Method::Gptq(_)) {
            bail!("`method` gptq and `desc_act` choose integers; weights in {name} are rounded to nearest")
        }
        Ok(())
    }

    /// Returns the dtype of the scales for weights of a dtype. GPTQ tools write F16, and compressed-tensors keeps the
    /// dtype of the weights.
    pub fn scale_dtype(&self, weights: Dtype) -> Dtype {
        match self.format {
            FileFormat::Gptq => Dtype::F16,
            _ => weights,
        }
    }
}
