//! Settings of MLPs and experts that the configs of all families have in common.

use moe_layer::{Activation, RouterConfig};
use serde_json::Value;

use super::error::ConfigError;
use super::value::Config;

impl Config {
    /// The activation of gated MLPs under `hidden_act`; absent means silu.
    pub fn activation(&self) -> Result<Activation, ConfigError> {
        match self.opt_string(&["hidden_act"])?.unwrap_or("silu") {
            "silu" | "swish" => Ok(Activation::SwiGlu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            other => Err(self.unsupported(
                format!("hidden_act {other:?}"),
                "; supported are silu, gelu, gelu_pytorch_tanh and relu",
            )),
        }
    }

    /// The routing of the experts, by [`RouterConfig::from_hf`], as transformers reads the config of a model.
    ///
    /// # Errors
    /// A routing that does not fit together; keys of other programs that change it and that transformers does not know.
    pub fn router(&self) -> Result<RouterConfig, ConfigError> {
        for key in [
            "moe_router_backend",
            "moe_softcapping",
            "apply_router_weight_on_input",
            "num_fused_shared_experts",
        ] {
            let is_off = |value: &Value| {
                matches!(value, Value::Null | Value::Bool(false)) || value.as_f64() == Some(0.0)
            };
            if let Some(value) = self.object().get(key).filter(|value| !is_off(value)) {
                return Err(self.unsupported(
                    format!("{key} {value}"),
                    "; models route as transformers does, which has no such key",
                ));
            }
        }
        let mut keys = self.object().clone();
        // The file may describe other models, too: the routing is read from the keys of this one.
        keys.remove("text_config");
        RouterConfig::from_hf(&Value::Object(keys))
            .map_err(|e| self.error(format!("the routing it describes is not usable: {e}")))
    }
}
