//! The heads of latent attention (MLA) in the metadata of a GGUF file.

use serde_json::{Map, Value as Json, json};

use super::architecture::Architecture;
use super::file::Gguf;
use crate::checkpoint::CheckpointError;

impl Gguf {
    /// Widths of heads, and what configs of such families say of experts that are not in groups. Files with an
    /// up-projection of keys and one of values call the widths of a cached row `key_length` and `value_length`, and
    /// the widths of heads `.._mla`.
    pub(super) fn latent_heads(
        &self,
        architecture: &Architecture,
        object: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let name = architecture.name;
        let width = |what: &str| -> Result<u64, CheckpointError> {
            let of_heads = self.unsigned(&format!("{name}.attention.{what}_mla"))?;
            let width = match of_heads {
                Some(width) => Some(width),
                None => self.unsigned(&format!("{name}.attention.{what}"))?,
            };
            width.ok_or_else(|| self.error(format!("it has no `{name}.attention.{what}`")))
        };
        let rotated_key = format!("{name}.rope.dimension_count");
        let Some(rotated) = self.unsigned(&rotated_key)? else {
            return Err(self.error(format!("it has no `{rotated_key}`")));
        };
        let keys = width("key_length")?;
        let Some(plain) = keys.checked_sub(rotated) else {
            let problem =
                format!("`{rotated_key}`: expected at most {keys}, the width of a key, got {rotated}");
            return Err(self.error(problem));
        };
        object.insert("qk_nope_head_dim".into(), plain.into());
        object.insert("qk_rope_head_dim".into(), rotated.into());
        object.insert("v_head_dim".into(), width("value_length")?.into());
        // Heads share a cached row in llama.cpp, which the file counts as one key head.
        object.remove("head_dim");
        if let Some(heads) = object.get("num_attention_heads").cloned() {
            object.insert("num_key_value_heads".into(), heads);
        }
        // Absent, it would have a default.
        object.entry("q_lora_rank").or_insert(Json::Null);
        object.entry("n_group").or_insert(json!(1));
        object.entry("topk_group").or_insert(json!(1));
        let method = match object["n_group"].as_u64() {
            Some(0 | 1) => "greedy",
            _ => "group_limited_greedy",
        };
        object.entry("topk_method").or_insert(json!(method));
        Ok(())
    }
}
