//! The names of the tensors of a checkpoint.
//!
//! A model family defines them in one value, [`TensorNames`], and passes it to all code that looks up tensors. Below
//! `crates/` this file is the only one that contains such names (`cargo xtask tidy`).

/// The matrices of gated MLPs: of dense layers, of shared experts, and of routed experts. A matrix has `.weight` and
/// perhaps `.bias`; a pack of all experts has neither ending, and its bias ends with `_bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpNames {
    /// Gate product, [I, H].
    pub gate: &'static str,
    /// Up product, [I, H].
    pub up: &'static str,
    /// Down product, [H, I].
    pub down: &'static str,
    /// Gate and up products of all experts in one tensor, [E, 2I, H]: gate rows, then up rows.
    pub packed_gate_up: &'static str,
    /// Down products of all experts in one tensor, [E, H, I].
    pub packed_down: &'static str,
    /// In which order both packs hold their elements.
    pub pack_order: PackOrder,
}

/// In which order packs of all experts hold the elements of their matrices.
// This enum is exhaustive: every loader must know how it reads a new order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PackOrder {
    /// [E, 2I, H], gate rows, then up rows; [E, H, I].
    #[default]
    Rows,
    /// Transposed: [E, H, 2I] and [E, I, H].
    Columns {
        /// Whether columns of gate and up take turns, gate first, and values of their bias [E, 2I] likewise (gpt-oss);
        /// else all of gate come first (Llama-4).
        in_turns: bool,
    },
}

impl MlpNames {
    /// `gate_proj`, `up_proj`, `down_proj`, and the packs of transformers 5, `gate_up_proj` and `down_proj`.
    pub const USUAL: Self = Self {
        gate: "gate_proj",
        up: "up_proj",
        down: "down_proj",
        packed_gate_up: "gate_up_proj",
        packed_down: "down_proj",
        pack_order: PackOrder::Rows,
    };

    /// Mixtral's: `w1`, `w3`, `w2`; the packs have the usual names.
    pub const MIXTRAL: Self = Self { gate: "w1", up: "w3", down: "w2", ..Self::USUAL };

    /// Gate, up and down.
    pub fn matrices(&self) -> [&'static str; 3] {
        [self.gate, self.up, self.down]
    }

    /// The two packs.
    pub fn packs(&self) -> [&'static str; 2] {
        [self.packed_gate_up, self.packed_down]
    }
}

impl Default for MlpNames {
    fn default() -> Self {
        Self::USUAL
    }
}

/// The vocabulary projection, from the root. Headers of quantised checkpoints have rules for a module of this name.
pub const LM_HEAD: &str = "lm_head";

/// Whether a tensor of this full name holds the gate and up products of all experts of a layer, in any family: a
/// checkpoint without such tensors holds experts one by one.
pub fn is_gate_up_pack(name: &str) -> bool {
    name.rsplit('.').next() == Some(MlpNames::USUAL.packed_gate_up)
}

/// An attention layer's tensors under its prefix. A projection `q` has `q.weight` and, with a bias, `q.bias`; a norm
/// has `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionNames {
    /// Query projection, [Hq*D, H].
    pub q: &'static str,
    /// Key projection, [Hkv*D, H].
    pub k: &'static str,
    /// Value projection, [Hkv*D, H].
    pub v: &'static str,
    /// Output projection, [H, Hq*D].
    pub o: &'static str,
    /// Query norm; unused without norms of q and k.
    pub q_norm: &'static str,
    /// Key norm; unused without norms of q and k.
    pub k_norm: &'static str,
    /// Logits that take part in each head's softmax, `[Hq]`, as a complete name: read with `AttentionConfig::sinks` of
    /// model-runtime. Without it a checkpoint with this tensor is refused.
    pub sinks: &'static str,
}

impl AttentionNames {
    /// `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`: the names of most models.
    pub const USUAL: Self = Self {
        q: "q_proj",
        k: "k_proj",
        v: "v_proj",
        o: "o_proj",
        q_norm: "q_norm",
        k_norm: "k_norm",
        sinks: "sinks",
    };
}

impl Default for AttentionNames {
    fn default() -> Self {
        Self::USUAL
    }
}

/// The tensors of a layer of multi-head latent attention under its prefix. A projection has `.weight` and perhaps
/// `.bias`; a norm has `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaNames {
    /// [Hq*(N+R), H], without a query down-projection.
    pub q: &'static str,
    /// Query down-projection, [q_lora_rank, H].
    pub q_a: &'static str,
    /// Norm of the query latent.
    pub q_a_norm: &'static str,
    /// Query up-projection, [Hq*(N+R), q_lora_rank].
    pub q_b: &'static str,
    /// Down-projection of the latent and the shared rotated key, [L+R, H].
    pub kv_a: &'static str,
    /// Norm of the latent.
    pub kv_a_norm: &'static str,
    /// Up-projection to N key and V value dimensions per head, [Hq*(N+V), L].
    pub kv_b: &'static str,
    /// The keys' part of `kv_b` by itself, transposed in each head: [Hq*L, N]. Some files have it and `v_b` in place
    /// of `kv_b`.
    pub k_b: &'static str,
    /// The values' part of `kv_b` by itself, [Hq*V, L].
    pub v_b: &'static str,
    /// Output projection, [H, Hq*V].
    pub o: &'static str,
}

impl MlaNames {
    /// DeepSeek's.
    pub const DEEPSEEK: Self = Self {
        q: "q_proj",
        q_a: "q_a_proj",
        q_a_norm: "q_a_layernorm",
        q_b: "q_b_proj",
        kv_a: "kv_a_proj_with_mqa",
        kv_a_norm: "kv_a_layernorm",
        kv_b: "kv_b_proj",
        k_b: "k_b_proj",
        v_b: "v_b_proj",
        o: "o_proj",
    };
}

impl Default for MlaNames {
    fn default() -> Self {
        Self::DEEPSEEK
    }
}

/// The tensors of a layer of linear attention by the gated delta rule, under its prefix. The input product is stored in
/// one of two ways: as two matrices whose rows are grouped by key heads, or as four matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNames {
    /// For each key head: q, k, then v and z of its value heads, [Hk*(2 Dk + 2 R*Dv), H] with R = Hv / Hk.
    pub qkvz: &'static str,
    /// For each key head: b, then a, of its value heads, [2 Hv, H].
    pub ba: &'static str,
    /// q of all heads, then k, then v, [2 Hk*Dk + Hv*Dv, H].
    pub qkv: &'static str,
    /// Output gates, [Hv*Dv, H].
    pub z: &'static str,
    /// [Hv, H].
    pub b: &'static str,
    /// [Hv, H].
    pub a: &'static str,
    /// Convolution over q, k, v, [2 Hk*Dk + Hv*Dv, 1, W].
    pub conv: &'static str,
    /// `[Hv]`, the whole name.
    pub a_log: &'static str,
    /// `[Hv]`, the whole name.
    pub dt_bias: &'static str,
    /// Norm of each value head before the output projection, `[Dv]`.
    pub norm: &'static str,
    /// Output projection, [H, Hv*Dv].
    pub o: &'static str,
}

impl DeltaNames {
    /// The names of Qwen3-Next and Qwen3.5.
    pub const QWEN: Self = Self {
        qkvz: "in_proj_qkvz",
        ba: "in_proj_ba",
        qkv: "in_proj_qkv",
        z: "in_proj_z",
        b: "in_proj_b",
        a: "in_proj_a",
        conv: "conv1d",
        a_log: "A_log",
        dt_bias: "dt_bias",
        norm: "norm",
        o: "out_proj",
    };
}

impl Default for DeltaNames {
    fn default() -> Self {
        Self::QWEN
    }
}

/// The names of the correction bias, which a router adds to the scores by which it chooses experts: complete names,
/// from the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorrectionBiasNames {
    /// In published checkpoints.
    pub published: &'static str,
    /// In a checkpoint that transformers 5 wrote with packed experts, where its own code uses another name.
    pub packed: &'static str,
    /// Whether it is a row [1, E] instead of `[E]`.
    pub is_row: bool,
}

impl CorrectionBiasNames {
    /// Next to the gate's weight: the place in most models, and where routers look for it.
    pub const USUAL: Self = Self {
        published: "gate.e_score_correction_bias",
        packed: "gate.e_score_correction_bias",
        is_row: false,
    };

    /// The name in a checkpoint; `has` tells which names exist below the MLP.
    pub fn stored(&self, has: impl Fn(&str) -> bool) -> &'static str {
        if has(self.packed) { self.packed } else { self.published }
    }

    /// Its dims for E experts.
    pub fn dims(&self, experts: usize) -> Vec<usize> {
        if self.is_row { vec![1, experts] } else { vec![experts] }
    }
}

impl Default for CorrectionBiasNames {
    fn default() -> Self {
        Self::USUAL
    }
}

/// The tensors of a whole decoder: prefixes of its modules, and the names below these prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorNames {
    /// Embedding, from the root.
    pub embedding: &'static str,
    /// Layers, from the root; a layer's prefix ends with its number.
    pub layers: &'static str,
    /// Norm before the attention, from the layer.
    pub input_norm: &'static str,
    /// Attention, from the layer.
    pub attention: &'static str,
    /// Linear attention, from the layers that have it in place of attention.
    pub linear_attention: &'static str,
    /// Norm before the MLP, from the layer.
    pub post_attention_norm: &'static str,
    /// MLP, from the layer: dense, or the prefix of the three below.
    pub mlp: &'static str,
    /// The same in a checkpoint whose experts are packed. transformers 5 writes such packs with the module names of its
    /// own code, and uses the published names only for experts one by one.
    pub packed_mlp: &'static str,
    /// Router, from the MLP.
    pub gate: &'static str,
    /// Correction bias of the router, where it has one.
    pub correction_bias: CorrectionBiasNames,
    /// Routed experts, from the MLP.
    pub experts: &'static str,
    /// Shared experts, from the MLP; `None` for a family that has none.
    pub shared_experts: Option<&'static str>,
    /// The gate whose sigmoid scales the shared experts' output for each token, from the MLP; `None`: the output is
    /// added unscaled.
    pub shared_expert_gate: Option<&'static str>,
    /// Last norm, from the root.
    pub norm: &'static str,
    /// Vocabulary projection, from the root.
    pub lm_head: &'static str,
    /// Matrices of MLPs and experts.
    pub matrices: MlpNames,
    /// Grouped-query attention.
    pub grouped_query: AttentionNames,
    /// Latent attention.
    pub latent: MlaNames,
    /// Linear attention.
    pub delta: DeltaNames,
    /// Patterns of tensors that a checkpoint may have without being read; `*` is a wildcard.
    pub unread: &'static [&'static str],
    /// The same if the vocabulary projection is the embedding: some exporters write the tied weight twice.
    pub unread_if_tied: &'static [&'static str],
}

impl TensorNames {
    /// The names of most models, without shared experts.
    pub const USUAL: Self = Self {
        embedding: "model.embed_tokens",
        layers: "model.layers",
        input_norm: "input_layernorm",
        attention: "self_attn",
        linear_attention: "linear_attn",
        post_attention_norm: "post_attention_layernorm",
        mlp: "mlp",
        packed_mlp: "mlp",
        gate: "gate",
        correction_bias: CorrectionBiasNames::USUAL,
        experts: "experts",
        shared_experts: None,
        shared_expert_gate: None,
        norm: "model.norm",
        lm_head: LM_HEAD,
        matrices: MlpNames::USUAL,
        grouped_query: AttentionNames::USUAL,
        latent: MlaNames::DEEPSEEK,
        delta: DeltaNames::QWEN,
        unread: &["*.rotary_emb.inv_freq"],
        unread_if_tied: &["*.rotary_emb.inv_freq", "lm_head.weight"],
    };

    /// Mixtral's; transformers 5 packs experts under the usual prefix.
    pub const MIXTRAL: Self = Self { mlp: "block_sparse_moe", matrices: MlpNames::MIXTRAL, ..Self::USUAL };

    /// Prefix, from its layer, of a sparse layer's gate and experts. `has` tells which names exist below the layer.
    pub fn sparse_mlp(&self, has: impl Fn(&str) -> bool) -> &'static str {
        let packs = format!("{}.{}.{}", self.packed_mlp, self.experts, self.matrices.packed_gate_up);
        let gate = |mlp: &str| has(&format!("{mlp}.{}.weight", self.gate));
        // A rank's view may show packs expert by expert, and a checkpoint that was made from packs has none.
        match has(&packs) || gate(self.packed_mlp) && !gate(self.mlp) {
            true => self.packed_mlp,
            false => self.mlp,
        }
    }
}

impl Default for TensorNames {
    fn default() -> Self {
        Self::USUAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_any_names_experts_are_stored_one_by_one() {
        assert_eq!(TensorNames { packed_mlp: "packs", ..TensorNames::USUAL }.sparse_mlp(|_| false), "mlp");
    }

    #[test]
    fn packed_experts_have_the_prefix_of_packs() {
        let names = TensorNames { mlp: "moe", matrices: MlpNames::MIXTRAL, ..TensorNames::USUAL };
        let prefix = |stored: &[&str]| names.sparse_mlp(|name| stored.contains(&name));
        assert_eq!(prefix(&["moe.gate.weight", "moe.experts.0.w1.weight"]), "moe");
        assert_eq!(prefix(&["mlp.gate.weight", "mlp.experts.gate_up_proj"]), "mlp");
        // Packs that a rank's view shows expert by expert, and a checkpoint that was quantised from packs.
        assert_eq!(prefix(&["mlp.gate.weight", "mlp.experts.0.w1.weight"]), "mlp");
    }

    #[test]
    fn a_correction_bias_is_where_the_checkpoint_has_it() {
        let names = CorrectionBiasNames { published: "bias", packed: "gate.bias", is_row: true };
        assert_eq!(names.stored(|name| name == "gate.bias"), "gate.bias");
        assert_eq!((names.stored(|_| false), names.dims(5)), ("bias", vec![1, 5]));
        assert_eq!(CorrectionBiasNames::default().dims(5), [5]);
    }

    #[test]
    fn a_pack_is_known_by_the_end_of_its_name() {
        assert!(is_gate_up_pack("model.layers.0.mlp.experts.gate_up_proj"));
        assert!(!is_gate_up_pack("model.layers.0.mlp.experts.0.gate_proj.weight"));
        assert!(!is_gate_up_pack("model.layers.0.mlp.experts.gate_up_proj_bias"));
    }
}
