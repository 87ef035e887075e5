//! The sizes and weights of an attention layer.

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_kernels::Unread;
use moe_kernels::names::AttentionNames;

/// The most columns of all heads together. No model is near it, and products of sizes below it do not overflow.
const MAX_COLUMNS: usize = 1 << 24;

/// The elements over which the RMS norms of q and k are computed, before rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNorm {
    /// There are none.
    #[default]
    None,
    /// Over each head, with one weight `[D]` for all heads of q and one for all of k (Qwen3).
    PerHead,
    /// Over all heads together, with weights `[Hq * D]` and `[Hkv * D]` (OLMoE).
    AllHeads,
}

/// Which two of a head's R rotated dimensions are one pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RotatedPairs {
    /// i and i + R/2 (GPT-NeoX): most models.
    #[default]
    Halves,
    /// 2i and 2i + 1 (GPT-J).
    Neighbours,
}

/// Sizes and options of an attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Query heads Hq; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key-value heads Hkv.
    pub num_kv_heads: usize,
    /// Dimensions of a head D; even.
    pub head_dim: usize,
    /// Dimensions of a head that are rotated, the first ones: D or less; even.
    pub rotary_dim: usize,
    /// Which of the rotated dimensions turn together.
    pub rotated_pairs: RotatedPairs,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output product has a bias.
    pub o_bias: bool,
    /// RMS norm of q and k before their rotation.
    pub qk_norm: QkNorm,
    /// Epsilon of the norms of q and k.
    pub rms_norm_eps: f64,
    /// Positions that a row attends to, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// Factor of the scores; `None` for 1 / sqrt(D).
    pub softmax_scale: Option<f64>,
    /// Whether each head has a sink: a learned logit that takes part in the softmax of its rows and has no value.
    pub sinks: bool,
    /// Whether the sigmoid of a gate scales each dimension of each head before the output product (Qwen3-Next). The
    /// query projection then has, for each head, D rows of q and D rows of the gate.
    pub output_gate: bool,
    /// Whether norms of q and k multiply by 1 + weight, in f32.
    pub zero_centred_norms: bool,
}

impl AttentionConfig {
    /// Attention of these sizes, as in [`AttentionConfig`], without options: whole heads are rotated in halves, and a
    /// row attends to all positions before it. An option is set by `AttentionConfig { qkv_bias: true, ..new }`.
    pub fn new(hidden_size: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim: head_dim,
            rotated_pairs: RotatedPairs::Halves,
            qkv_bias: false,
            o_bias: false,
            qk_norm: QkNorm::None,
            rms_norm_eps: 1e-6,
            sliding_window: None,
            softmax_scale: None,
            sinks: false,
            output_gate: false,
            zero_centred_norms: false,
        }
    }
}

impl AttentionConfig {
    /// Fails if the checkpoint has tensors of a layer that this config does not use and that would change its results.
    pub(super) fn refuse_unread(&self, names: &AttentionNames, vb: &VarBuilder) -> Result<()> {
        let mut unread = Unread::under(vb);
        let products = [
            (names.q, self.qkv_bias),
            (names.k, self.qkv_bias),
            (names.v, self.qkv_bias),
            (names.o, self.o_bias),
        ];
        for (name, has_bias) in products {
            if !has_bias {
                unread.bias(&format!("{name}.bias"));
            }
            unread.scales(&format!("{name}.weight"));
        }
        for norm in [names.q_norm, names.k_norm] {
            if self.qk_norm != QkNorm::None {
                unread.bias(&format!("{norm}.bias"));
            } else {
                unread.tensor(&format!("{norm}.weight"));
            }
        }
        if !self.sinks {
            unread.tensor(names.sinks);
        }
        unread.refuse(
            "attention",
            "biases are read with `qkv_bias` and `o_bias`, norms with `qk_norm`, sinks with `sinks`",
        )
    }
}

/// The weights of an attention layer, in the order of a checkpoint; all in the model dtype.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// Rows of q, then k, then v: [(Hq + 2 Hkv) * D, H]. With an output gate, q also has the rows of each head's gate.
    pub qkv: Tensor,
    /// As many values as `qkv` has rows.
    pub qkv_bias: Option<Tensor>,
    /// [H, Hq * D].
    pub o: Tensor,
    /// `[H]`.
    pub o_bias: Option<Tensor>,
    /// Norm weights of q and of k, with the lengths that [`QkNorm`] gives. Zero-centred weights are stored as the
    /// factors of the rows, in f32.
    pub qk_norm: Option<(Tensor, Tensor)>,
    /// Sinks of the heads, `[Hq]`.
    pub sinks: Option<Tensor>,
}

impl AttentionConfig {
    /// Lengths of the norm weights of q and of k; `None` without norms.
    pub(super) fn norm_widths(&self) -> Option<[usize; 2]> {
        match self.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some([self.head_dim; 2]),
            QkNorm::AllHeads => Some([self.num_heads, self.num_kv_heads].map(|heads| heads * self.head_dim)),
        }
    }

    /// Rows of the pack of q, k, v and the output gate.
    pub fn qkv_rows(&self) -> usize {
        self.stored_query_rows() + 2 * self.num_kv_heads * self.head_dim
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { num_heads, num_kv_heads, head_dim, .. } = *self;
        if num_heads == 0 || num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            bail!(
                "attention: expected num_heads divisible by num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!("attention: expected an even head_dim, got {head_dim}")
        }
        if num_heads.checked_mul(head_dim).is_none_or(|columns| columns > MAX_COLUMNS) {
            bail!(
                "attention: expected at most {MAX_COLUMNS} columns of all heads, got {num_heads} heads of {head_dim}"
            )
        }
        let rotary_dim = self.rotary_dim;
        if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            bail!("attention: expected an even rotary_dim from 2 to head_dim = {head_dim}, got {rotary_dim}")
        }
        if self.sliding_window == Some(0) {
            bail!("attention: expected a sliding window of at least 1, got 0")
        }
        if self.output_gate && self.qk_norm == QkNorm::AllHeads {
            bail!(
                "attention: expected norms of q and k over each head next to an output gate, got norms over all heads"
            )
        }
        Ok(())
    }
}
