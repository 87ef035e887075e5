//! What a model author needs for fast candle inference: loading, attention, RoPE, paged KV cache, sampling.
#![doc = include_str!("../README.md")]

pub mod attention;
pub mod blocks;
pub mod checkpoint;
pub mod config;
pub mod decoder;
#[cfg(feature = "cuda")]
pub mod device_routing;
#[cfg(feature = "cuda")]
pub mod device_slots;
#[cfg(feature = "cuda")]
pub mod device_step;
mod hash;
pub mod kv_cache;
pub mod layers;
mod linear_attention;
mod lru;
mod mixer;
pub mod mla;
pub mod model;
mod prefix;
mod projection;
pub mod rope;
mod run;
pub mod sampling;
mod saved_states;
pub mod step;
pub mod step_ranks;
mod vocab;

pub use attention::{Attention, AttentionConfig, AttentionWeights, QkNorm, RotatedPairs};
pub use blocks::{BlockAllocator, KnownBlock, SequenceBlocks};
pub use checkpoint::{
    Checkpoint, CheckpointError, DummyWeights, RankView, SliceSource, TensorFiles, TensorLayout, TensorSlice,
    TensorSpec,
};
pub use config::{Config, ConfigError, RopeConfig, RopeScaling};
pub use decoder::{
    Decoder, DecoderConfig, DecoderModel, DecoderOptions, MixerConfig, MoeConfig, MtpConfig, MtpHead,
    MtpNames, MtpStep, router_gate,
};
pub use kv_cache::{
    CacheSizes, KvCache, KvLayer, KvLayout, LayerCache, LayerState, LayerStates, RecurrentLayer, StateCopy,
    StateLayout,
};
pub use layers::{Embedding, LmHead, RmsNorm};
pub use linear_attention::{LinearAttention, LinearAttentionConfig};
pub use mixer::{Mixer, MixerIo};
pub use mla::{MlaAttention, MlaConfig, MlaForm};
pub use model::{CausalLm, LayerPlan, LogitsOut, ModelInfo, MoeInfo, Observe, Observed, Observer, Scorer};
pub use prefix::PrefixId;
pub use rope::{LayerRopes, Rope, RopeRows};
pub use run::{host_logits, logits_rows, reserve_logits, run_scored_step, run_step};
pub use sampling::{
    SampleRow, Sampled, SamplingError, SamplingParams, TokenLogprob, TokenLogprobs, sample_rows,
    token_logprobs,
};
pub use step::{LogitsRows, SequenceStep, Step, StepViews};
pub use step_ranks::{DeviceSampling, RunnerSizes, StepRanks};
pub use vocab::VocabParallel;

pub use moe_comm::{Geometry, GeometryError, ParallelConfig, ParallelGroups};
pub use moe_kernels::candle;
#[cfg(feature = "cuda")]
pub use moe_kernels::cuda;
pub use moe_kernels::names::{
    AttentionNames, CorrectionBiasNames, DeltaNames, MlaNames, MlpNames, PackOrder, TensorNames,
    is_gate_up_pack,
};
pub use moe_kernels::plan::Feature;
pub use moe_kernels::{
    ArgumentError, Buffer, CpuIsa, DeltaHeads, DeviceRouting, Exec, ForcedWeights, HugePages, QuantScheme,
    Roof, RoutedExperts, Scratch, StepContext, TensorView, View, ViewMut, Workspace, cause,
};
pub use moe_kernels::{check_kernel_image, is_portable_only};
pub use moe_layer::{BlockContext, Router, RouterConfig};
pub use moe_quant::{QuantConfig, QuantError};
