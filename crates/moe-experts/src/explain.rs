//! The oracle's answer as JSON, for people and scripts that ask why a backend runs.

use moe_kernels::{ActivationFormat, ExpertsSpec, QuantScheme};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::oracle::Selection;
use moe_kernels::plan::activation_name;

/// `{"chosen": "cpu", "rejected": [{"backend", "reason": {"check", "text"}}], "spec": {..}}`.
impl Serialize for Selection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("Selection", 3)?;
        s.serialize_field("chosen", &self.chosen)?;
        s.serialize_field("rejected", &self.rejected)?;
        s.serialize_field("spec", &SpecFields::from(&self.spec))?;
        s.end()
    }
}

/// The specification in types that serialise; field names are those of [`ExpertsSpec`].
#[derive(serde::Serialize)]
struct SpecFields {
    num_experts: usize,
    num_local_experts: usize,
    top_k: usize,
    hidden_size: usize,
    intermediate_size: usize,
    dtype: &'static str,
    quant: &'static str,
    activation: String,
    has_bias: bool,
    activation_format: &'static str,
    routing: String,
    apply_router_weight_on_input: bool,
    tp_size: usize,
    ep_size: usize,
    batch_invariant: bool,
    /// `null` on the CPU.
    compute_capability: Option<String>,
}

impl From<&ExpertsSpec> for SpecFields {
    fn from(spec: &ExpertsSpec) -> Self {
        Self {
            num_experts: spec.num_experts,
            num_local_experts: spec.num_local_experts,
            top_k: spec.top_k,
            hidden_size: spec.hidden_size,
            intermediate_size: spec.intermediate_size,
            dtype: spec.dtype.as_str(),
            quant: match spec.quant {
                QuantScheme::None => "none",
            },
            activation: activation_name(spec.activation),
            has_bias: spec.has_bias,
            activation_format: match spec.activation_format {
                ActivationFormat::Standard => "standard",
                ActivationFormat::BatchedExperts => "batched_experts",
                ActivationFormat::Listed => "listed",
            },
            routing: format!("{:?}", spec.routing),
            apply_router_weight_on_input: spec.apply_router_weight_on_input,
            tp_size: spec.tp_size,
            ep_size: spec.ep_size,
            batch_invariant: spec.batch_invariant,
            compute_capability: spec.compute_capability.map(|(major, minor)| format!("{major}.{minor}")),
        }
    }
}
