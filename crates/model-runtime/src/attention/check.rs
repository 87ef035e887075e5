//! Whether the weights of an attention layer are what its config implies.

use candle_core::{DType, Result, Tensor};
use moe_kernels::ArgumentError;
use moe_kernels::arguments::{expect, expect_dims, expect_float, expect_stream};

use super::config::{AttentionConfig, AttentionWeights, QkNorm};
use crate::kv_cache::KvLayer;

/// What errors call the layer.
pub(super) const ATTENTION: &str = "attention";

impl AttentionWeights {
    /// Fails unless each weight has the dims and the dtype that `config` implies, and is present if `config` asks for
    /// it.
    pub(super) fn check(&self, config: &AttentionConfig) -> Result<()> {
        let h = config.hidden_size;
        let heads = config.num_heads * config.head_dim;
        let rows = config.stored_query_rows() + 2 * config.num_kv_heads * config.head_dim;
        let dtype = self.qkv.dtype();
        expect_dims(ATTENTION, "qkv", &self.qkv, &[rows, h])?;
        expect_float(ATTENTION, "qkv", &self.qkv)?;
        expect(ATTENTION, "o", &self.o, dtype, &[h, heads])?;
        if let Some(bias) = wanted("qkv_bias", self.qkv_bias.as_ref(), config.qkv_bias, "`qkv_bias`")? {
            expect(ATTENTION, "qkv_bias", bias, dtype, &[rows])?;
        }
        if let Some(bias) = wanted("o_bias", self.o_bias.as_ref(), config.o_bias, "`o_bias`")? {
            expect(ATTENTION, "o_bias", bias, dtype, &[h])?;
        }
        let has_norms = config.qk_norm != QkNorm::None;
        let norms = wanted("qk_norm", self.qk_norm.as_ref(), has_norms, "`qk_norm`")?;
        if let (Some((q_norm, k_norm)), Some([q, k])) = (norms, config.norm_widths()) {
            check_norm("qk_norm of q", q_norm, q, dtype, config)?;
            check_norm("qk_norm of k", k_norm, k, dtype, config)?;
        }
        if let Some(sinks) = wanted("sinks", self.sinks.as_ref(), config.sinks, "`sinks`")? {
            expect_dims(ATTENTION, "sinks", sinks, &[config.num_heads])?;
            expect_float(ATTENTION, "sinks", sinks)?;
        }
        Ok(())
    }
}

fn check_norm(name: &str, norm: &Tensor, size: usize, dtype: DType, config: &AttentionConfig) -> Result<()> {
    expect_dims(ATTENTION, name, norm, &[size])?;
    match config.zero_centred_norms {
        true => expect_stream(ATTENTION, name, norm, dtype),
        false => expect(ATTENTION, name, norm, dtype, &[size]),
    }
}

/// The weight, if it is there exactly when the option of the config asks for it.
fn wanted<'a, T>(name: &str, weight: Option<&'a T>, is_wanted: bool, option: &str) -> Result<Option<&'a T>> {
    let (expected, got) = match (is_wanted, weight) {
        (true, None) => (format!("present, because the config sets {option}"), "none"),
        (false, Some(_)) => (format!("absent, because the config does not set {option}"), "one"),
        (true, Some(_)) | (false, None) => return Ok(weight),
    };
    Err(ArgumentError::Value {
        op: ATTENTION.to_string(),
        name: name.to_string(),
        expected,
        got: got.to_string(),
    }
    .into())
}

impl AttentionConfig {
    /// Fails unless a layer's cache holds keys of this layer's heads in `dtype`.
    pub(super) fn check_cache(&self, cache: &KvLayer, dtype: DType) -> Result<()> {
        let k = cache.k();
        let sizes = |axis: usize| k.dims().get(axis).copied().unwrap_or(0);
        let dims = [sizes(0), self.num_kv_heads, sizes(2), self.head_dim];
        expect(ATTENTION, "the keys of cache", &k, dtype, &dims)
    }
}

/// Fails unless `got` is `expected`.
pub(super) fn expect_count(name: &str, expected: &str, wanted: usize, got: usize) -> Result<()> {
    if wanted == got {
        return Ok(());
    }
    Err(ArgumentError::Value {
        op: ATTENTION.to_string(),
        name: name.to_string(),
        expected: format!("{expected} = {wanted}"),
        got: got.to_string(),
    }
    .into())
}
