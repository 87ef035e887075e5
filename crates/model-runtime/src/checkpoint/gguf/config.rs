//! The metadata of a GGUF file as the config.json and generation_config.json that say the same.

use std::collections::BTreeSet;

use moe_quant::QuantConfig;
use serde_json::{Map, Value as Json, json};

use super::architecture::{Architecture, COMMON, READ_OTHERWISE, REQUIRED, SIGMOID, SOFTMAX, architectures};
use super::file::Gguf;
use super::tensors::Tensors;
use super::values::Value;
use crate::checkpoint::CheckpointError;
use crate::config::Config;

/// Texts of tokens that end an answer in one chat format or another; a tokenizer that has one means it (llama.cpp,
/// `special_eog_ids`).
const ENDS: [&str; 10] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|user|>",
    RETURN,
    CALL,
];
/// The ends of an answer and of a call in harmony's format, in which `<|end|>` is the end of a message that others
/// follow.
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";
const MESSAGE_END: &str = "<|end|>";
/// Keys of token ids that end a text.
const END_IDS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
/// The key of config.json for the factor of experts' weights.
const SCALE: &str = "routed_scaling_factor";
/// The number of a control token in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;

/// What a GGUF file contains in addition to its weights.
pub(in crate::checkpoint) struct GgufContents {
    pub config: Config,
    pub generation: Option<Config>,
    pub quantisation: QuantConfig,
    pub tensors: Tensors,
}

impl Gguf {
    /// The config of a file.
    ///
    /// # Errors
    /// An architecture that is not run, or another use of it; a value of another type.
    pub(in crate::checkpoint) fn read(&self) -> Result<GgufContents, CheckpointError> {
        let architecture = self.architecture()?;
        let name = architecture.name;
        if self.unsigned(&format!("{name}.expert_count"))?.unwrap_or(0) == 0 {
            return Err(self.error(format!(
                "it has no experts (`{name}.expert_count`); dense models are not supported"
            )));
        }
        for key in REQUIRED.iter().map(|key| format!("{name}.{key}")) {
            if self.value(&key).is_none() {
                return Err(self.error(format!("it has no `{key}`; convert the model again")));
            }
        }
        self.check_finite(name)?;
        let tensors = Tensors::of(self, architecture)?;
        let object = self.object(architecture, &tensors)?;
        let label = self.path.display().to_string();
        let config = Config::of_gguf(object, &label);
        let generation = self.generation()?.map(|object| Config::of_gguf(object, &label));
        let quantisation = tensors.quantisation(self.notes(architecture));
        Ok(GgufContents { config, generation, quantisation, tensors })
    }

    /// The family of a file. One name may stand for a family with a softmax of the scores and one with sigmoids. Files
    /// that do not say which, by no key or by 0, have sigmoids if they have a bias of the scores: GLM-4.7-Flash.
    fn architecture(&self) -> Result<&'static Architecture, CheckpointError> {
        let name = self.text("general.architecture")?.unwrap_or_default();
        let rows: Vec<_> = Architecture::named(name).collect();
        if rows.is_empty() {
            return Err(self.error(format!(
                "the architecture {name:?} is not supported; supported are {}",
                architectures()
            )));
        }
        let key = format!("{name}.expert_gating_func");
        let has_bias = self.records().any(|(_, tensor)| tensor.name.ends_with(".exp_probs_b.bias"));
        let said = self.unsigned(&key)?.filter(|gating| *gating != 0);
        let gating = said.or(has_bias.then_some(SIGMOID));
        let fits = |row: &&&Architecture| gating.is_none() || row.gating.is_none() || row.gating == gating;
        let Some(architecture) = rows.iter().find(fits) else {
            let known: Vec<_> = rows.iter().filter_map(|row| row.gating).map(scores).collect();
            let got = gating.unwrap_or_default();
            return Err(self.error(format!("`{key}`: expected {}, got {got}", known.join(" or "))));
        };
        if architecture.gating == Some(SOFTMAX) && has_bias {
            let problem = "it has a bias of the scores (`exp_probs_b`) with a softmax of them; no such model is supported";
            return Err(self.error(problem));
        }
        Ok(architecture)
    }

    fn object(
        &self,
        architecture: &Architecture,
        tensors: &Tensors,
    ) -> Result<Map<String, Json>, CheckpointError> {
        let mut object = Map::new();
        object.insert("model_type".into(), architecture.model_type.into());
        object.insert("architectures".into(), json!([architecture.class]));
        for (key, fixed) in architecture.fixed {
            object.insert((*key).into(), fixed.json());
        }
        for (key, name) in COMMON.iter().chain(architecture.keys) {
            let key = format!("{}.{key}", architecture.name);
            if let Some(json) = self.of_all_layers(&key)? {
                object.insert((*name).into(), json);
            }
        }
        // What llama.cpp takes where a file says nothing.
        object.entry("rope_theta").or_insert(json!(10_000.0));
        if architecture.reads("norm_topk_prob") {
            object.entry("norm_topk_prob").or_insert(false.into());
        }
        // No scale, or 0, leaves the weights as they are.
        if architecture.reads(SCALE) && object.get(SCALE).and_then(Json::as_f64).unwrap_or(0.0) == 0.0 {
            object.insert(SCALE.into(), json!(1.0));
        }
        if let Some(heads) = object.get("num_attention_heads").cloned() {
            object.entry("num_key_value_heads").or_insert(heads);
        }
        let names = &architecture.names;
        object.insert("vocab_size".into(), self.vocabulary()?.into());
        let head = format!("{}.weight", names.lm_head);
        object.insert("tie_word_embeddings".into(), (!tensors.has(&head)).into());
        if tensors.are_quantised() {
            object.insert("torch_dtype".into(), "bfloat16".into());
        }
        self.layers(architecture, &mut object)?;
        self.layer_types(architecture, &mut object)?;
        match architecture.is_latent {
            true => self.latent_heads(architecture, &mut object)?,
            false => self.heads(architecture, tensors, &mut object)?,
        }
        self.rope(architecture, &mut object)?;
        Ok(object)
    }

    /// Biases and norms of heads are in the file or not; heads without a width of their own share the hidden size.
    fn heads(
        &self,
        architecture: &Architecture,
        tensors: &Tensors,
        object: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let name = architecture.name;
        let number = |object: &Map<String, Json>, key: &str| object.get(key).and_then(Json::as_u64);
        let heads = number(object, "num_attention_heads").filter(|heads| *heads > 0);
        let shared = number(object, "hidden_size").zip(heads).map(|(hidden, heads)| hidden / heads);
        if let Some(given) = object.get("head_dim").filter(|given| given.as_u64().is_none()) {
            return Err(
                self.error(format!("`{name}.attention.key_length`: expected a whole number, got {given}"))
            );
        }
        let Some(width) = number(object, "head_dim").or(shared) else { return Ok(()) };
        object.insert("head_dim".into(), width.into());
        let values = self.unsigned(&format!("{name}.attention.value_length"))?.unwrap_or(width);
        if values != width {
            return Err(self.error(format!(
                "`{name}.attention.value_length`: expected {width}, the width of keys, got {values}"
            )));
        }
        let rotated = self.unsigned(&format!("{name}.rope.dimension_count"))?.unwrap_or(width);
        match architecture.rotates_parts {
            true => drop(object.insert("partial_rotary_factor".into(), json!(share(rotated, width)))),
            false if rotated == width => {}
            false => {
                return Err(self.error(format!(
                    "`{name}.rope.dimension_count`: expected {width}, the width of a head, got {rotated}"
                )));
            }
        }
        let names = &architecture.names;
        let has = |module: &str, ending: &str| {
            tensors.has_ending(&format!(".{}.{module}.{ending}", names.attention))
        };
        let bias = has(names.grouped_query.q, "bias");
        let keys = if name == "qwen2moe" { ["qkv_bias"] } else { ["attention_bias"] };
        keys.iter().for_each(|key| drop(object.insert((*key).into(), bias.into())));
        object.insert("use_qk_norm".into(), has(names.grouped_query.q_norm, "weight").into());
        Ok(())
    }

    /// Rows of the embedding.
    fn vocabulary(&self) -> Result<usize, CheckpointError> {
        let embedding = self.records().find(|(_, tensor)| tensor.name == "token_embd.weight");
        match embedding.map(|(_, tensor)| tensor.shape.as_slice()) {
            Some(&[rows, _]) => Ok(rows),
            _ => Err(self.error(
                "it has no matrix `token_embd.weight`; is it a model, or only an adapter or a vocabulary?",
            )),
        }
    }

    /// The tokens that end a text, and how the file's maker samples.
    fn generation(&self) -> Result<Option<Map<String, Json>>, CheckpointError> {
        let mut ends = BTreeSet::new();
        for key in END_IDS {
            ends.extend(self.unsigned(key)?);
        }
        let tokens = self.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let kinds = self.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
        let is_end = |(token, kind): (&&str, &i64)| *kind == CONTROL && ENDS.contains(token);
        ends.extend(
            (0u64..).zip(tokens.iter().zip(&kinds)).filter(|(_, both)| is_end(*both)).map(|(id, _)| id),
        );
        let text = |id: &u64| usize::try_from(*id).ok().and_then(|id| tokens.get(id)).copied();
        let ends_with = |end: &str| ends.iter().any(|id| text(id) == Some(end));
        if ends_with(RETURN) && ends_with(CALL) {
            ends.retain(|id| text(id) != Some(MESSAGE_END));
        }
        let mut object = Map::new();
        if !ends.is_empty() {
            object.insert("eos_token_id".into(), json!(ends));
        }
        for (key, name) in
            [("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")]
        {
            if let Some(json) = self.value(&format!("general.sampling.{key}")).and_then(Value::json) {
                object.insert(name.into(), json);
                object.insert("do_sample".into(), true.into());
            }
        }
        Ok(Some(object).filter(|object| !object.is_empty()))
    }

    /// Metadata of the architecture that nothing here reads.
    fn notes(&self, architecture: &Architecture) -> Vec<String> {
        let known = |key: &&str| {
            COMMON.iter().chain(architecture.keys).any(|(known, _)| known == key)
                || READ_OTHERWISE.contains(key)
                || architecture.layers.keys().contains(key)
        };
        let prefix = format!("{}.", architecture.name);
        let unread: Vec<_> =
            self.keys().filter_map(|key| key.strip_prefix(&prefix)).filter(|key| !known(key)).collect();
        match unread.is_empty() {
            true => Vec::new(),
            false => {
                vec![format!("metadata that is not read: {prefix}{}", unread.join(&format!(", {prefix}")))]
            }
        }
    }
}

/// What a value of `expert_gating_func` means.
fn scores(gating: u64) -> String {
    let kind = if gating == SIGMOID { "sigmoid" } else { "softmax" };
    format!("{gating} ({kind})")
}

/// The smallest share of `width` dimensions that is `part` of them, whichever way a product is rounded.
fn share(part: u64, width: u64) -> f64 {
    let share = part as f64 / width as f64;
    if (width as f64 * share) < part as f64 { share.next_up() } else { share }
}
