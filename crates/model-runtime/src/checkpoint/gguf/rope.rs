//! Reads how a GGUF file extends the context.

use serde_json::{Map, Value as Json, json};

use super::architecture::{Architecture, Layers};
use super::file::Gguf;
use crate::checkpoint::CheckpointError;

impl Gguf {
    /// Adds the scaling of rotary frequencies. A file with a factor and without a type has linear scaling, as in
    /// llama.cpp, and older files call its factor `rope.scale_linear`.
    ///
    /// # Errors
    /// The file has factors of YaRN that are not supported.
    pub(super) fn rope(
        &self,
        architecture: &Architecture,
        object: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let key = |key: &str| format!("{}.rope.scaling.{key}", architecture.name);
        let mut scaling = Map::new();
        let older = format!("{}.rope.scale_linear", architecture.name);
        let factor =
            self.float(&key("factor"))?.map_or_else(|| self.float(&older), |factor| Ok(Some(factor)))?;
        let factor = factor.filter(|factor| *factor != 0.0);
        let kind = match self.text(&key("type"))?.unwrap_or("linear") {
            "none" => "default",
            // Without a factor frequencies are not divided.
            "linear" if factor.is_none() => "default",
            kind => kind,
        };
        scaling.insert("rope_type".into(), kind.into());
        if let Some(factor) = factor.filter(|_| kind != "default") {
            scaling.insert("factor".into(), json!(factor));
        }
        if kind == "yarn" {
            self.yarn(architecture, &mut scaling)?;
        }
        object.insert("rope_scaling".into(), Json::Object(scaling));
        Ok(())
    }

    fn yarn(
        &self,
        architecture: &Architecture,
        scaling: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let key = |key: &str| format!("{}.rope.scaling.{key}", architecture.name);
        if let Some(original) = self.unsigned(&key("original_context_length"))? {
            scaling.insert("original_max_position_embeddings".into(), original.into());
        }
        for (name, to) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
            if let Some(beta) = self.float(&key(name))? {
                scaling.insert(to.into(), json!(beta));
            }
        }
        for name in ["yarn_ext_factor", "yarn_attn_factor", "attn_factor"] {
            if let Some(factor) = self.float(&key(name))?.filter(|factor| *factor != 1.0) {
                return Err(self.error(format!("`{}`: expected 1, or no such key, got {factor}", key(name))));
            }
        }
        // The factor of scores, and its part in the rotation, are the same in all published configs.
        if let Some(tenth) = self.float(&key("yarn_log_multiplier"))? {
            let mscale = json!((tenth * 10.0 * 1e6).round() / 1e6);
            scaling.extend(["mscale", "mscale_all_dim"].map(|name| (name.to_string(), mscale.clone())));
        }
        // Files do not say whether the bounds of the ramp are rounded. llama.cpp rounds them, but these models were
        // trained with bounds that are not.
        if architecture.layers == Layers::Sliding {
            scaling.insert("truncate".into(), false.into());
        }
        Ok(())
    }
}
