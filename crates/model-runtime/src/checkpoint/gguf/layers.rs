//! Reads what the metadata of a GGUF file say about single layers.

use serde_json::{Map, Value as Json, json};

use super::architecture::{Architecture, Layers};
use super::file::Gguf;
use super::values::Value;
use crate::checkpoint::CheckpointError;
use crate::config::limits;

impl Gguf {
    /// Returns the value of a key that has one value for all layers: a single one, or a list of equal ones.
    ///
    /// # Errors
    /// A list of several values, or of texts.
    pub(super) fn of_all_layers(&self, key: &str) -> Result<Option<Json>, CheckpointError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        if let Some(json) = value.json() {
            return Ok(Some(json));
        }
        let several = || self.unexpected(key, "one value for all layers", value);
        let values = self.floats(key)?.unwrap_or_default();
        let first = *values.first().ok_or_else(several)?;
        match values.iter().all(|value| *value == first) {
            true if first.fract() == 0.0 && first >= 0.0 => Ok(Some((first as u64).into())),
            true => Ok(Some(json!(first))),
            false => Err(several()),
        }
    }

    /// Layers that predict further tokens come after the others and are not run; experts of a file without a width of
    /// their own have that of dense layers.
    pub(super) fn layers(
        &self,
        architecture: &Architecture,
        object: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let further = self.unsigned(&format!("{}.nextn_predict_layers", architecture.name))?.unwrap_or(0);
        if let Some(layers) = object.get("num_hidden_layers").and_then(Json::as_u64) {
            object.insert("num_hidden_layers".into(), layers.saturating_sub(further).into());
        }
        if !object.contains_key("moe_intermediate_size")
            && let Some(width) = object.get("intermediate_size").cloned()
        {
            object.insert("moe_intermediate_size".into(), width);
        }
        Ok(())
    }

    /// Adds which layers see the whole sequence, if the file says it for each, and the sizes of linear attention.
    pub(super) fn layer_types(
        &self,
        architecture: &Architecture,
        object: &mut Map<String, Json>,
    ) -> Result<(), CheckpointError> {
        let name = architecture.name;
        match architecture.layers {
            Layers::Alike => return Ok(()),
            Layers::Sliding => self.check_window(name)?,
            Layers::Linear => self.value_heads(name, object)?,
        }
        let Some(key) = architecture.layers.keys().first().map(|key| format!("{name}.{key}")) else {
            return Ok(());
        };
        let kind = architecture.layers.kind();
        let layers = object.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(0);
        if layers > *limits::LAYERS.end() as u64 {
            // The family refuses it.
            return Ok(());
        }
        let is_such: Vec<bool> = match self.value(&key) {
            None => return Ok(()),
            // The number is a period: all layers of it but the last one are such layers.
            Some(value) if architecture.layers == Layers::Sliding && value.unsigned().is_some() => {
                let period = value.unsigned().unwrap_or_default();
                (0..layers).map(|layer| layer.checked_rem(period).is_none_or(|at| at + 1 < period)).collect()
            }
            Some(Value::List(_)) => {
                let listed = self.integers(&key)?.unwrap_or_default();
                // Layers that predict further tokens are listed, too.
                if (listed.len() as u64) < layers {
                    let problem = format!(
                        "`{key}`: expected an entry for each of {layers} layers, got {}",
                        listed.len()
                    );
                    return Err(self.error(problem));
                }
                listed.iter().take(layers as usize).map(|x| *x != 0).collect()
            }
            Some(other) => {
                return Err(self.unexpected(&key, "a list, with a truth value for each layer", other));
            }
        };
        let types: Vec<_> = is_such.iter().map(|such| if *such { kind } else { "full_attention" }).collect();
        object.insert("layer_types".into(), json!(types));
        Ok(())
    }

    /// Fails if a file does not say how wide the window is, or if layers with a window have rotary frequencies of their
    /// own, which llama.cpp supports.
    fn check_window(&self, name: &str) -> Result<(), CheckpointError> {
        let window = format!("{name}.attention.sliding_window");
        if self.value(&window).is_none() {
            return Err(self.error(format!("it has no `{window}`; convert the model again")));
        }
        let sliding = format!("{name}.rope.freq_base_swa");
        let all = self.float(&format!("{name}.rope.freq_base"))?.unwrap_or(10_000.0);
        match self.float(&sliding)? {
            Some(base) if base != all => Err(self.error(format!(
                "`{sliding}`: expected {all}, the base of all layers (`{name}.rope.freq_base`), got {base}; layers with \
                 rotary frequencies of their own are not supported"
            ))),
            _ => Ok(()),
        }
    }

    /// Adds the width of a value head. Files have the width of all value heads together.
    fn value_heads(&self, name: &str, object: &mut Map<String, Json>) -> Result<(), CheckpointError> {
        let size = |key: &str| -> Result<u64, CheckpointError> {
            let key = format!("{name}.ssm.{key}");
            self.unsigned(&key)?
                .ok_or_else(|| self.error(format!("it has no `{key}`; convert the model again")))
        };
        for key in ["conv_kernel", "state_size", "group_count"] {
            size(key)?;
        }
        let heads = size("time_step_rank")?;
        let together = size("inner_size")?;
        if heads == 0 || !together.is_multiple_of(heads) {
            return Err(self.error(format!(
                "`{name}.ssm.inner_size`: expected a multiple of the value heads, {heads} (`{name}.ssm.time_step_rank`), got \
                 {together}"
            )));
        }
        object.insert("linear_value_head_dim".into(), (together / heads).into());
        Ok(())
    }
}
