//! The sizes and options of a layer of latent attention, and its form.

use std::str::FromStr;

use candle_core::{DType, Result, bail};
use candle_nn::VarBuilder;
use moe_kernels::Unread;
use moe_kernels::names::MlaNames;

use crate::kv_cache::KvLayout;

/// What the KV cache holds, and where the up-projections happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MlaForm {
    /// Latent rows: L + R values per token and layer.
    #[default]
    Absorbed,
    /// Keys and values of every head.
    Naive,
}

impl FromStr for MlaForm {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "absorbed" => Ok(Self::Absorbed),
            "naive" => Ok(Self::Naive),
            other => Err(format!("unknown form of MLA {other:?}; expected absorbed or naive")),
        }
    }
}

/// Sizes and options of an MLA layer, named as in DeepSeek's config.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Query heads Hq.
    pub num_heads: usize,
    /// Width of the query's down-projection; `None`: queries are projected at once.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent row, L.
    pub kv_lora_rank: usize,
    /// Dimensions of a head's query and key that are not rotated, N.
    pub qk_nope_head_dim: usize,
    /// Dimensions that are rotated, R; even.
    pub qk_rope_head_dim: usize,
    /// Dimensions of a head's value, V.
    pub v_head_dim: usize,
    /// Whether the down-projections and the output product have biases.
    pub bias: bool,
    /// Epsilon of the norms of both latents.
    pub norm_eps: f64,
    /// Factor of the scores: 1 / sqrt(N + R), times what YaRN adds.
    pub softmax_scale: f64,
    /// The form.
    pub form: MlaForm,
}

impl MlaConfig {
    /// This config for a rank that holds `num_heads` of the heads.
    #[must_use]
    pub fn with_heads(self, num_heads: usize) -> Self {
        Self { num_heads, ..self }
    }

    /// What a layer of this form caches of a token.
    pub fn kv_layout(&self, dtype: DType) -> KvLayout {
        let rope = self.qk_rope_head_dim;
        let (num_kv_heads, head_dim, value_dim) = match self.form {
            MlaForm::Absorbed => (1, self.kv_lora_rank + rope, None),
            MlaForm::Naive => (self.num_heads, self.qk_nope_head_dim + rope, Some(self.v_head_dim)),
        };
        KvLayout { num_kv_heads, head_dim, value_dim, dtype }
    }

    /// Rows of the matrix that makes queries.
    pub(super) fn query_rows(&self) -> usize {
        self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
    }

    pub(super) fn check(&self) -> Result<()> {
        for (name, size) in [
            ("num_heads", self.num_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            if size == 0 {
                bail!("MLA: expected {name} of at least 1, got 0")
            }
        }
        if !self.qk_rope_head_dim.is_multiple_of(2) {
            bail!("MLA: expected an even qk_rope_head_dim, got {}", self.qk_rope_head_dim)
        }
        Ok(())
    }

    /// Fails if the checkpoint has tensors of a layer that this config does not use and that would change its results.
    pub(super) fn refuse_unread(&self, names: &MlaNames, vb: &VarBuilder) -> Result<()> {
        let mut unread = Unread::under(vb);
        let biased = [names.q_a, names.kv_a, names.o];
        for name in [names.q, names.q_a, names.q_b, names.kv_a, names.kv_b, names.o] {
            if !self.bias || !biased.contains(&name) {
                unread.bias(&format!("{name}.bias"));
            }
            unread.scales(&format!("{name}.weight"));
        }
        // Tensors of the other kind of queries may be present in addition; without the wanted ones they are no layer of
        // this config.
        let (wanted, others) = match self.q_lora_rank {
            Some(_) => (names.q_a, vec![names.q]),
            None => (names.q, vec![names.q_a, names.q_a_norm, names.q_b]),
        };
        if vb.contains_tensor(&format!("{wanted}.weight")) {
            others.iter().for_each(|name| unread.tensor(&format!("{name}.weight")));
        }
        unread.refuse(
            "MLA",
            "biases of the down-projections and of the output are read with `bias`, others not at all",
        )
    }
}
