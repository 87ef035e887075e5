//! Checkpoints: safetensors files with their configs, on disk or embedded in the program, and GGUF files.
//!
//! Layout of a checkpoint: the Hugging Face hub's (`config.json`, `generation_config.json`,
//! `model.safetensors` or `model.safetensors.index.json` with its shards).

mod change;
#[cfg(any(feature = "cuda", test))]
mod chunks;
mod configs;
mod decode;
mod dummy;
mod dummy_quant;
mod error;
mod file;
mod files;
mod floats;
pub mod gguf;
mod head;
mod layout;
mod layout_experts;
mod left_out;
mod quantised;
mod rank_view;
mod reorder;
mod shards;
mod slice;
mod spec;
#[cfg(feature = "cuda")]
mod stages;
#[cfg(feature = "cuda")]
mod stream;
mod verify;

use std::path::{Path, PathBuf};

use candle_core::DType;
use moe_kernels::names::TensorNames;
use moe_quant::QuantConfig;

use crate::config::Config;
use head::{TIED, is_tied_in_vain};

pub use configs::Configs;
pub use dummy::DummyWeights;
pub use error::CheckpointError;
pub use files::{TensorFiles, TensorInfo};
pub use gguf::{Gguf, GgufNames, GgufPlace};
pub use head::has_own_head;
pub use layout::{HeldTensor, SharedPacks, TensorLayout};
pub use layout_experts::{BiasStorage, StoredExperts};
pub use left_out::LeftOut;
pub use quantised::QuantTensors;
pub use rank_view::RankView;
pub use slice::{SliceOrder, SliceSource, TensorSlice};
pub use spec::TensorSpec;
pub use verify::Verified;

/// The names of the embedding and the vocabulary projection, before the family is known.
const NAMES: TensorNames = TensorNames::USUAL;

/// A model on disk or in the program: weights, `config.json` and, if present,
/// `generation_config.json`.
#[derive(Clone)]
pub struct Checkpoint {
    /// The weights.
    pub tensors: TensorFiles,
    /// The model's config. If the file has its own vocabulary projection, this config says that the projection is not
    /// tied, even if the file `config.json` says that it is ([`has_own_head`]).
    pub config: Config,
    /// Defaults for generation, if the checkpoint has any.
    pub generation_config: Option<Config>,
    /// How it is quantised; `None`: it is not.
    pub quantisation: Option<QuantConfig>,
    dir: Option<PathBuf>,
    /// Whether `config.json` ties the vocabulary projection, but `config` does not.
    untied: bool,
}

impl Checkpoint {
    /// Opens a checkpoint directory, or a GGUF file. Only configs and headers are read, and, where a config ties the
    /// vocabulary projection that the file has, both tensors up to the first difference.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let dir = dir.as_ref();
        if let Some(file) = Gguf::find(dir)? {
            return Self::of_gguf(Gguf::open(&file)?);
        }
        let Configs { config, generation: generation_config, quantisation } = Configs::read(dir)?;
        let tensors = TensorFiles::open_dir(dir)?;
        let has_own_head = is_tied_in_vain(&config, &tensors, &NAMES).map_err(CheckpointError::of_tensors)?;
        // If config.json says nothing about it, there is no contradiction.
        let untied = has_own_head && config.has(TIED);
        let config = if has_own_head { config.with(TIED, false) } else { config };
        Ok(Self { tensors, config, generation_config, quantisation, dir: Some(dir.to_path_buf()), untied })
    }

    fn of_gguf(gguf: Gguf) -> Result<Self, CheckpointError> {
        let gguf::GgufContents { config, generation: generation_config, quantisation, tensors } =
            gguf.read()?;
        let dir = Some(gguf.path().to_path_buf());
        let tensors = tensors.into_files(gguf)?;
        Ok(Self { tensors, config, generation_config, quantisation: Some(quantisation), dir, untied: false })
    }

    /// A checkpoint that is embedded in the program (`include_bytes!`, `include_str!`).
    pub fn from_static(
        weights: &'static [u8],
        config: &str,
        generation_config: Option<&str>,
    ) -> Result<Self, CheckpointError> {
        let config = Config::parse(config, "the embedded config.json")?;
        Ok(Self {
            tensors: TensorFiles::from_static(weights, "the embedded checkpoint")?,
            quantisation: config.quantisation()?,
            config,
            generation_config: generation_config
                .map(|text| Config::parse(text, "the embedded generation_config.json"))
                .transpose()?,
            dir: None,
            untied: false,
        })
    }

    /// The same checkpoint, of which quantised matrices are loaded as floats ([`QuantConfig::dequantised`]). A
    /// checkpoint that is not quantised stays as it is.
    #[must_use]
    pub fn dequantised(self) -> Self {
        Self { quantisation: self.quantisation.map(QuantConfig::dequantised), ..self }
    }

    /// What the checkpoint holds as a rank with these slices sees it. `expected` are the model's tensors in floats.
    pub fn rank_view(&self, expected: &[TensorSpec], slices: Vec<TensorSlice>) -> RankView {
        match &self.quantisation {
            Some(config) => {
                RankView::new(QuantTensors::new(self.tensors.clone(), config.clone(), expected), slices)
            }
            None => RankView::new(self.tensors.clone(), slices),
        }
        .only(expected)
    }

    /// Whether the checkpoint has a tensor, or a quantised matrix in its place.
    pub fn has(&self, name: &str) -> bool {
        match self.quantisation {
            Some(_) => QuantTensors::has(&self.tensors, name),
            None => self.tensors.info(name).is_some(),
        }
    }

    /// Compares the checkpoint with the tensors that a model expects, see [`TensorFiles::verify`]. The result is a
    /// report for people.
    ///
    /// # Errors
    /// All tensors that are missing or of another shape.
    pub fn verify(&self, expected: &[TensorSpec], ignored: &[&str]) -> Result<Verified, CheckpointError> {
        let all = expected.iter().cloned();
        let mut verified = match &self.quantisation {
            Some(config) => {
                QuantTensors::new(self.tensors.clone(), config.clone(), expected).verify(all, ignored)?
            }
            None => {
                self.tensors.check_floats(expected)?;
                self.tensors.verify(all, ignored)?
            }
        };
        if self.untied {
            verified.notes.push(format!(
                "{}: config.json says {TIED} true, but the file has an {} of other values than {}: it is used as it is, as \
                 transformers does",
                self.tensors.origin(),
                NAMES.lm_head,
                NAMES.embedding
            ));
        }
        Ok(verified)
    }

    /// The directory, for other files next to the weights, or the GGUF file, which contains their settings; `None` if
    /// the checkpoint is embedded.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The dtype to run in: the config's, else the float dtype of most weights, else f32.
    pub fn dtype(&self) -> Result<DType, CheckpointError> {
        let stored = || self.tensors.float_dtype().filter(|d| *d != DType::F64);
        Ok(self.config.dtype()?.or_else(stored).unwrap_or(DType::F32))
    }

    /// End-of-sequence ids: generation_config.json's, else config.json's; empty if neither has any.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>, CheckpointError> {
        let ids = |config: &Config| config.token_ids(&["eos_token_id"]);
        if let Some(generation) = &self.generation_config
            && let Some(found) = ids(generation)?
        {
            return Ok(found);
        }
        Ok(ids(&self.config)?.unwrap_or_default())
    }
}
