//! What the configs of all families say alike about MLPs and experts.

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
            other => Err(self.unsupported(
                format!("hidden_act {other:?}"),
                "; supported are silu, gelu and gelu_pytorch_tanh",
            )),
        }
    }

    /// The routing of the experts, by [`RouterConfig::from_hf`].
    pub fn router(&self) -> Result<RouterConfig, ConfigError> {
        RouterConfig::from_hf(&Value::Object(self.object().clone()))
            .map_err(|e| self.error(format!("the routing it describes is not usable: {e}")))
    }
}
