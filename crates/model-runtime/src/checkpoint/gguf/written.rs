//! The names that tensors and config keys get when a checkpoint is written as a GGUF file: the tables of the reader in
//! the other direction.

use super::architecture::{Architecture, COMMON, Layers};
use super::names::Names;

/// The tensors of a GGUF file that hold a tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GgufPlace {
    /// The tensor with this name holds it alone.
    One(String),
    /// It is the matrix of one expert. The tensor with this name holds the matrices of all experts, [E, N, K].
    Expert {
        /// The name in the file.
        tensor: String,
        /// The number of the expert.
        expert: usize,
    },
    /// It holds matrices of all experts, [E, N, K]. Its rows are divided among the tensors with these names, of which
    /// each gets an equal share.
    Packs(Vec<String>),
}

/// The names that a family has in GGUF files.
pub struct GgufNames {
    architecture: &'static Architecture,
    names: Names,
}

impl GgufNames {
    /// Returns the names of a `model_type` of config.json, or `None` if GGUF files do not have the family, or hold
    /// other values than checkpoints.
    pub fn of_model_type(model_type: &str) -> Option<Self> {
        let architecture = Architecture::of_model_type(model_type).filter(|row| keeps_values(row))?;
        Some(Self { architecture, names: Names::new(architecture) })
    }

    /// Returns every `model_type` that has names, for messages.
    pub fn model_types() -> impl Iterator<Item = &'static str> {
        Architecture::all().filter(|row| keeps_values(row)).map(|row| row.model_type)
    }

    /// Returns the `general.architecture`.
    pub fn architecture(&self) -> &'static str {
        self.architecture.name
    }

    /// Returns whether rotated dimensions are a part of a head's dimensions, which `rope.dimension_count` counts.
    pub fn rotates_parts(&self) -> bool {
        self.architecture.rotates_parts
    }

    /// Returns the metadata that say the same as keys of config.json: their names below the architecture's name, and
    /// the keys.
    pub fn keys(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        COMMON.iter().chain(self.architecture.keys).copied()
    }

    /// Returns the place of a tensor, or `None` if files have no tensor for it.
    pub fn place(&self, name: &str) -> Option<GgufPlace> {
        let names = &self.names.names;
        match name.strip_prefix(names.layers).and_then(|rest| rest.strip_prefix('.')) {
            Some(rest) => {
                let (layer, tensor) = rest.split_once('.')?;
                layer.parse::<usize>().ok()?;
                self.in_layer(layer, tensor)
            }
            None => {
                let (module, ending) = name.rsplit_once('.')?;
                let roots =
                    [(names.embedding, "token_embd"), (names.norm, "output_norm"), (names.lm_head, "output")];
                let root = roots.iter().find(|(root, _)| *root == module)?;
                Some(GgufPlace::One(format!("{}.{ending}", root.1)))
            }
        }
    }

    fn in_layer(&self, layer: &str, tensor: &str) -> Option<GgufPlace> {
        let one = |name: &str| Some(GgufPlace::One(format!("blk.{layer}.{name}")));
        if let Some((name, _)) = self.names.tensors.iter().find(|(_, of_family)| *of_family == tensor) {
            return one(name);
        }
        let names = &self.names.names;
        let experts = format!("{}.{}.", names.mlp, names.experts);
        if let Some(rest) = tensor.strip_prefix(&experts) {
            return self.of_experts(layer, rest);
        }
        let (module, ending) = tensor.rsplit_once('.')?;
        if module == names.post_attention_norm {
            return one(&format!("{}.{ending}", self.architecture.mlp_norm));
        }
        let (name, _) = self.names.modules.iter().find(|(_, of_family)| *of_family == module)?;
        one(&format!("{name}.{ending}"))
    }

    /// Returns the place of a tensor whose name ends with this part after the prefix of the experts.
    fn of_experts(&self, layer: &str, rest: &str) -> Option<GgufPlace> {
        let matrices = &self.names.names.matrices;
        let named = |part: &str, ending: &str| format!("blk.{layer}.ffn_{part}_exps.{ending}");
        if rest == matrices.packed_gate_up {
            return Some(GgufPlace::Packs(vec![named("gate", "weight"), named("up", "weight")]));
        }
        if rest == matrices.packed_down {
            return Some(GgufPlace::Packs(vec![named("down", "weight")]));
        }
        let (expert, rest) = rest.split_once('.')?;
        let (matrix, ending) = rest.rsplit_once('.')?;
        let parts = [(matrices.gate, "gate"), (matrices.up, "up"), (matrices.down, "down")];
        let part = parts.iter().find(|(of_family, _)| *of_family == matrix)?;
        Some(GgufPlace::Expert { tensor: named(part.1, ending), expert: expert.parse().ok()? })
    }
}

/// Returns whether tensors of the architecture hold the values of checkpoints in their order. Norms of families with
/// linear attention are stored as 1 + weight, and rows of q and k of Mixtral are in another order.
fn keeps_values(architecture: &Architecture) -> bool {
    let turns = |(key, _): &(&str, _)| *key == "rope_interleave";
    architecture.layers == Layers::Alike && !architecture.fixed.iter().any(turns)
}

#[cfg(test)]
mod tests {
    use super::super::names::Place;
    use super::*;
    use crate::checkpoint::change::Change;

    /// The reader finds every tensor under the name from which it was written.
    #[test]
    fn the_reader_turns_names_back() {
        for model_type in GgufNames::model_types() {
            let names = GgufNames::of_model_type(model_type).unwrap();
            let mut tensors = vec!["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"];
            tensors.extend([
                "model.layers.3.input_layernorm.weight",
                "model.layers.3.post_attention_layernorm.weight",
                "model.layers.12.self_attn.q_proj.bias",
                "model.layers.12.self_attn.kv_b_proj.weight",
                "model.layers.0.self_attn.k_norm.weight",
                "model.layers.0.mlp.gate.weight",
                "model.layers.0.mlp.gate.e_score_correction_bias",
                "model.layers.0.mlp.down_proj.weight",
            ]);
            match model_type {
                "qwen2_moe" => tensors.push("model.layers.1.mlp.shared_expert_gate.weight"),
                "glm4_moe" | "deepseek_v3" => {
                    tensors.push("model.layers.1.mlp.shared_experts.up_proj.weight")
                }
                _ => {}
            }
            for tensor in tensors {
                let Some(GgufPlace::One(there)) = names.place(tensor) else { panic!("{tensor}") };
                assert_eq!(names.names.place(&there), Place::One(tensor.to_string(), Change::None));
            }
        }
    }

    #[test]
    fn experts_share_tensors() {
        let names = GgufNames::of_model_type("qwen3_moe").unwrap();
        let place = |rest: &str| names.place(&format!("model.layers.7.mlp.experts.{rest}"));
        let down = || "blk.7.ffn_down_exps.weight".to_string();
        assert_eq!(place("31.down_proj.weight"), Some(GgufPlace::Expert { tensor: down(), expert: 31 }));
        assert_eq!(place("down_proj"), Some(GgufPlace::Packs(vec![down()])));
        let both = ["blk.7.ffn_gate_exps.weight", "blk.7.ffn_up_exps.weight"].map(String::from);
        assert_eq!(place("gate_up_proj"), Some(GgufPlace::Packs(both.to_vec())));
        for rest in ["x.down_proj.weight", "3.other.weight", "3"] {
            assert_eq!(place(rest), None, "{rest}");
        }
        assert_eq!(names.place("model.layers.x.input_layernorm.weight"), None);
        assert_eq!(names.place("visual.weight"), None);
    }

    #[test]
    fn families_with_other_values_have_no_names() {
        let known: Vec<_> = GgufNames::model_types().collect();
        assert_eq!(known, ["qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"]);
        assert!(GgufNames::of_model_type("qwen3_next").is_none());
        let norm = "model.layers.0.post_attention_layernorm.weight";
        for (model_type, name) in [("olmoe", "ffn_norm"), ("glm4_moe", "post_attention_norm")] {
            let names = GgufNames::of_model_type(model_type).unwrap();
            assert_eq!(names.place(norm), Some(GgufPlace::One(format!("blk.0.{name}.weight"))));
        }
    }
}
