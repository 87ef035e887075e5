//! What is asked for, as plain data.

use std::path::PathBuf;

use anyhow::{Result, bail};
use moe_quant::{Format, GptqZeros, IntFormat, QuantGroup};
use safetensors::Dtype;

/// The file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// `gptq`, zero points in version 1.
    Gptq,
    /// compressed-tensors' `pack-quantized`.
    CompressedTensors,
}

/// How integers are chosen.
#[derive(Clone, Debug)]
pub enum Method {
    /// Each weight to the nearest value of its group.
    Rtn,
    /// Column after column, later columns making up for the errors of earlier ones (Frantar et al. 2022, arXiv 2210.17323).
    Gptq(Calibration),
}

/// How GPTQ calibrates.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The text.
    pub text: TextSettings,
    /// Share of the mean of a Hessian's diagonal that is added to it.
    pub damping: f64,
    /// Tokens that a module must have seen; one that saw fewer is rounded to nearest.
    pub min_tokens: usize,
}

/// Text and how much of it.
#[derive(Clone, Debug)]
pub struct TextSettings {
    /// The file, in UTF-8.
    pub file: PathBuf,
    /// Windows.
    pub samples: usize,
    /// Tokens of a window.
    pub length: usize,
}

/// What becomes of a linear layer whose sizes the format or the group does not divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// An error that lists such layers.
    Refuse,
    /// It stays in floats.
    Keep,
    /// One scale for each of its rows.
    Channel,
}

/// How a checkpoint is quantised.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The file format.
    pub format: FileFormat,
    /// 4 or 8.
    pub bits: u8,
    /// Columns that share a scale.
    pub group: QuantGroup,
    /// Whether groups have no zero points of their own.
    pub symmetric: bool,
    /// Act-order: GPTQ rounds the columns with the largest inputs first. In the format of GPTQ these also share groups; in
    /// compressed-tensors groups stay consecutive (`actorder: weight` there).
    pub desc_act: bool,
    /// How integers are chosen.
    pub method: Method,
    /// Whether the vocabulary projection is quantised too. One that is the embedding becomes a matrix of its own, and the
    /// embedding stays in floats.
    pub lm_head: bool,
    /// Modules that stay in floats; `*` stands for any run of characters.
    pub ignore: Vec<String>,
    /// What becomes of layers that do not divide.
    pub indivisible: Indivisible,
}

impl Settings {
    /// The format of most linear layers.
    ///
    /// # Errors
    /// Bits that are not written; act-order without groups.
    pub fn base(&self) -> Result<Format> {
        if !matches!(self.bits, 4 | 8) {
            bail!("--bits: expected 4 or 8, got {}", self.bits)
        }
        if self.desc_act && self.group == QuantGroup::Channel {
            bail!("--desc-act: rows with one scale have no groups to order; use --group-size 32, 64 or 128")
        }
        let int = IntFormat {
            bits: self.bits,
            group: self.group,
            zero_point: !self.symmetric,
            // compressed-tensors no longer knows groups in any order; there columns keep their groups.
            act_order: self.desc_act && self.format == FileFormat::Gptq,
        };
        Ok(match self.format {
            FileFormat::Gptq => Format::Gptq { int, zeros: GptqZeros::V1 },
            FileFormat::CompressedTensors => Format::PackQuantized { int },
        })
    }

    /// The dtype of scales for weights of a dtype: GPTQ's makers write F16, compressed-tensors keeps the weights' own.
    pub fn scale_dtype(&self, weights: Dtype) -> Dtype {
        match self.format {
            FileFormat::Gptq => Dtype::F16,
            FileFormat::CompressedTensors => weights,
        }
    }
}
