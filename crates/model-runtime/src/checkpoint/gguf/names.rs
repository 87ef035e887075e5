//! What llama.cpp calls a tensor, and what the family calls it.

use std::collections::HashMap;

use moe_kernels::names::TensorNames;

use super::architecture::{Architecture, Layers, POST_NORM};
use crate::checkpoint::change::Change;

/// The names of a family's tensors by those in GGUF files.
pub(super) struct Names {
    pub(super) names: TensorNames,
    /// Whether norms are stored as 1 + weight.
    adds_one: bool,
    /// Modules of a layer by their names in files, without `blk.N.`.
    pub(super) modules: HashMap<&'static str, String>,
    /// The tensors of a layer whose endings differ, too, by their names in files, without `blk.N.`.
    pub(super) tensors: HashMap<&'static str, String>,
    /// Matrices of experts by their names in files.
    experts: HashMap<&'static str, Vec<&'static str>>,
}

/// A tensor in the family's words.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The tensor is one of the model's. Its values are changed in this way.
    One(String, Change),
    /// The tensor holds one or two tensors of every expert, [E, N, ..].
    Experts(ExpertNames),
    /// Another tensor.
    Unknown,
}

/// The names of the experts' tensors that are stored in one, `{before}{expert}.{matrix}{after}`. Each matrix has an
/// equal share of an expert's rows; the shares follow each other.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExpertNames {
    pub before: String,
    pub matrices: Vec<&'static str>,
    pub after: String,
}

impl Names {
    pub fn new(architecture: &Architecture) -> Self {
        let names = architecture.names;
        let TensorNames { attention, mlp, grouped_query: heads, latent, matrices, .. } = names;
        let mut modules: HashMap<&str, String> = [
            ("attn_norm", names.input_norm.to_string()),
            ("ffn_norm", names.post_attention_norm.to_string()),
            // The name of the same norm in newer families.
            (POST_NORM, names.post_attention_norm.to_string()),
            ("attn_q", format!("{attention}.{}", heads.q)),
            ("attn_k", format!("{attention}.{}", heads.k)),
            ("attn_v", format!("{attention}.{}", heads.v)),
            ("attn_output", format!("{attention}.{}", heads.o)),
            ("attn_q_norm", format!("{attention}.{}", heads.q_norm)),
            ("attn_k_norm", format!("{attention}.{}", heads.k_norm)),
            ("attn_q_a", format!("{attention}.{}", latent.q_a)),
            ("attn_q_a_norm", format!("{attention}.{}", latent.q_a_norm)),
            ("attn_q_b", format!("{attention}.{}", latent.q_b)),
            ("attn_kv_a_mqa", format!("{attention}.{}", latent.kv_a)),
            ("attn_kv_a_norm", format!("{attention}.{}", latent.kv_a_norm)),
            ("attn_kv_b", format!("{attention}.{}", latent.kv_b)),
            ("attn_k_b", format!("{attention}.{}", latent.k_b)),
            ("attn_v_b", format!("{attention}.{}", latent.v_b)),
            ("ffn_gate", format!("{mlp}.{}", matrices.gate)),
            ("ffn_up", format!("{mlp}.{}", matrices.up)),
            ("ffn_down", format!("{mlp}.{}", matrices.down)),
            ("ffn_gate_inp", format!("{mlp}.{}", names.gate)),
        ]
        .into();
        if let Some(shared) = names.shared_experts {
            modules.insert("ffn_gate_shexp", format!("{mlp}.{shared}.{}", matrices.gate));
            modules.insert("ffn_up_shexp", format!("{mlp}.{shared}.{}", matrices.up));
            modules.insert("ffn_down_shexp", format!("{mlp}.{shared}.{}", matrices.down));
        }
        if let Some(gate) = names.shared_expert_gate {
            modules.insert("ffn_gate_inp_shexp", format!("{mlp}.{gate}"));
        }
        let mut tensors: HashMap<&str, String> = [
            ("attn_sinks.weight", format!("{attention}.{}", heads.sinks)),
            ("exp_probs_b.bias", format!("{mlp}.{}", names.correction_bias.published)),
        ]
        .into();
        let adds_one = architecture.layers == Layers::Linear;
        if adds_one {
            linear_attention(&names, &mut modules, &mut tensors);
        }
        let experts = [
            ("ffn_gate_exps", vec![matrices.gate]),
            ("ffn_up_exps", vec![matrices.up]),
            ("ffn_gate_up_exps", vec![matrices.gate, matrices.up]),
            ("ffn_down_exps", vec![matrices.down]),
        ];
        Self { names, adds_one, modules, tensors, experts: experts.into() }
    }

    /// What the family calls a tensor.
    pub fn place(&self, name: &str) -> Place {
        match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, tensor)) if layer.parse::<u32>().is_ok() => self.in_layer(layer, tensor),
            Some(_) => Place::Unknown,
            None => self.at_root(name),
        }
    }

    fn at_root(&self, name: &str) -> Place {
        let Some((module, ending)) = name.rsplit_once('.') else { return Place::Unknown };
        let root = match module {
            "token_embd" => self.names.embedding,
            "output_norm" => self.names.norm,
            "output" => self.names.lm_head,
            _ => return Place::Unknown,
        };
        Place::One(format!("{root}.{ending}"), self.change(module))
    }

    fn in_layer(&self, layer: &str, tensor: &str) -> Place {
        let TensorNames { layers, mlp, experts, .. } = self.names;
        let layer = format!("{layers}.{layer}");
        if let Some(name) = self.tensors.get(tensor) {
            return Place::One(format!("{layer}.{name}"), self.change(tensor));
        }
        let Some((module, ending)) = tensor.rsplit_once('.') else { return Place::Unknown };
        if let Some(name) = self.modules.get(module) {
            return Place::One(format!("{layer}.{name}.{ending}"), self.change(module));
        }
        let before = format!("{layer}.{mlp}.{experts}.");
        if let Some(matrices) = self.experts.get(module) {
            return Place::Experts(ExpertNames {
                before,
                matrices: matrices.clone(),
                after: format!(".{ending}"),
            });
        }
        match self.of_one_expert(module) {
            Some((expert, matrix)) => Place::One(format!("{before}{expert}.{matrix}.{ending}"), Change::None),
            None => Place::Unknown,
        }
    }

    /// The expert and the matrix of a module such as `ffn_gate.3`: files of Mixtral from 2023 have experts one by one.
    fn of_one_expert<'a>(&self, module: &'a str) -> Option<(&'a str, &'static str)> {
        let (part, expert) = module.rsplit_once('.')?;
        expert.parse::<u32>().ok()?;
        let matrices = self.experts.get(format!("{part}_exps").as_str())?;
        matrices.first().filter(|_| matrices.len() == 1).map(|matrix| (expert, *matrix))
    }

    /// Returns what restores the values of a module or a tensor of this name. The norm inside of linear attention,
    /// `ssm_norm`, is stored as it is.
    fn change(&self, name: &str) -> Change {
        match name {
            "ssm_a" => Change::LogOfNegative,
            "attn_norm" | POST_NORM | "attn_q_norm" | "attn_k_norm" | "output_norm" if self.adds_one => {
                Change::MinusOne
            }
            _ => Change::None,
        }
    }
}

/// Adds the tensors of linear attention, which llama.cpp names after state space models. `ssm_in` is the product of
/// older files, whose rows are grouped by key heads.
fn linear_attention(
    names: &TensorNames,
    modules: &mut HashMap<&'static str, String>,
    tensors: &mut HashMap<&'static str, String>,
) {
    let TensorNames { linear_attention, delta, .. } = names;
    let named = |name: &str| format!("{linear_attention}.{name}");
    modules.extend([
        ("ssm_in", named(delta.qkvz)),
        ("ssm_ba", named(delta.ba)),
        ("attn_qkv", named(delta.qkv)),
        ("attn_gate", named(delta.z)),
        ("ssm_beta", named(delta.b)),
        ("ssm_alpha", named(delta.a)),
        ("ssm_conv1d", named(delta.conv)),
        ("ssm_norm", named(delta.norm)),
        ("ssm_out", named(delta.o)),
    ]);
    tensors.extend([("ssm_a", named(delta.a_log)), ("ssm_dt.bias", named(delta.dt_bias))]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str) -> Place {
        Place::One(name.to_string(), Change::None)
    }

    fn names(architecture: &str) -> Names {
        Names::new(Architecture::named(architecture).next().unwrap())
    }

    #[test]
    fn names_are_those_of_the_family() {
        let qwen2 = names("qwen2moe");
        for (name, want) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.7.attn_q.bias", "model.layers.7.self_attn.q_proj.bias"),
            ("blk.0.ffn_gate_inp.weight", "model.layers.0.mlp.gate.weight"),
            ("blk.0.exp_probs_b.bias", "model.layers.0.mlp.gate.e_score_correction_bias"),
            ("blk.1.attn_k_b.weight", "model.layers.1.self_attn.k_b_proj.weight"),
            ("blk.3.ffn_up_shexp.weight", "model.layers.3.mlp.shared_expert.up_proj.weight"),
        ] {
            assert_eq!(qwen2.place(name), one(want));
        }
        for name in [
            "rope_freqs.weight",
            "blk.x.attn_q.weight",
            "blk.0.nextn.eh_proj.weight",
            "blk.0.attn_qkv.weight",
            "output",
            "blk.0",
            "",
        ] {
            assert_eq!(qwen2.place(name), Place::Unknown, "{name}");
        }
        let gpt_oss = names("gpt-oss");
        assert_eq!(gpt_oss.place("blk.2.attn_sinks.weight"), one("model.layers.2.self_attn.sinks"));
        assert_eq!(gpt_oss.place("blk.2.ffn_gate_inp.bias"), one("model.layers.2.mlp.router.bias"));
    }

    #[test]
    fn experts_share_a_tensor() {
        let experts = |matrices: &[&'static str], after: &str| {
            let before = "model.layers.2.mlp.experts.".to_string();
            Place::Experts(ExpertNames { before, matrices: matrices.to_vec(), after: after.to_string() })
        };
        let names = names("gpt-oss");
        assert_eq!(names.place("blk.2.ffn_down_exps.weight"), experts(&["down_proj"], ".weight"));
        assert_eq!(names.place("blk.2.ffn_up_exps.bias"), experts(&["up_proj"], ".bias"));
        let both = experts(&["gate_proj", "up_proj"], ".weight");
        assert_eq!(names.place("blk.2.ffn_gate_up_exps.weight"), both);
        // In old files each has its own.
        let own = one("model.layers.2.mlp.experts.5.up_proj.weight");
        assert_eq!(names.place("blk.2.ffn_up.5.weight"), own);
        for other in ["ffn_up.x", "ffn_gate_up.5", "attn_q.5", "ffn_up.5.5"] {
            assert_eq!(names.place(&format!("blk.2.{other}.weight")), Place::Unknown, "{other}");
        }
    }

    #[test]
    fn linear_attention_is_named_after_state_spaces() {
        let names = names("qwen35moe");
        let changed = |name: &str, change| Place::One(name.to_string(), change);
        let layer = |name: &str| format!("model.layers.0.{name}");
        for (name, want, change) in [
            ("ssm_a", "linear_attn.A_log", Change::LogOfNegative),
            ("ssm_dt.bias", "linear_attn.dt_bias", Change::None),
            ("ssm_norm.weight", "linear_attn.norm.weight", Change::None),
            ("ssm_beta.weight", "linear_attn.in_proj_b.weight", Change::None),
            ("attn_gate.weight", "linear_attn.in_proj_z.weight", Change::None),
            ("attn_norm.weight", "input_layernorm.weight", Change::MinusOne),
            ("attn_k_norm.weight", "self_attn.k_norm.weight", Change::MinusOne),
        ] {
            assert_eq!(names.place(&format!("blk.0.{name}")), changed(&layer(want), change));
        }
        assert_eq!(names.place("output_norm.weight"), changed("model.norm.weight", Change::MinusOne));
    }
}
