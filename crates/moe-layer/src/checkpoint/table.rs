//! A table of the sparse block of each `model_type`, with the parts that transformers 5.24 computes. Routings are in
//! another table (`moe_router::hf`).

use moe_kernels::candle::Result;
use moe_kernels::names::{CorrectionBiasNames, MlpNames, PackOrder};
use moe_router::RouterError;
use moe_router::hf::Keys;

use super::names::BlockNames;
use crate::error::BlockError;

/// The shared experts of a family.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shared {
    None,
    /// One shared expert, as wide as a routed one.
    AsWide,
    /// The number of shared experts is under `key`, and each is as wide as a routed one.
    Count {
        key: &'static str,
        default: usize,
    },
    /// There is one shared expert. Its width is under this key, and the sigmoid of a gate scales it.
    Gated {
        width: &'static str,
    },
}

/// A family of models whose blocks have the same form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// The model types.
    model_types: &'static [&'static str],
    /// The key that has the width of a routed expert.
    pub width: &'static str,
    /// Shared experts.
    pub shared: Shared,
    /// Names of tensors.
    pub names: BlockNames,
    /// The source of the experts' activation.
    pub activation: FamilyActivation,
    /// Whether the experts' products have biases.
    pub expert_bias: bool,
}

/// The source of the activation of a family's experts.
#[derive(Clone, Copy, Debug)]
pub(super) enum FamilyActivation {
    /// The name under `hidden_act`.
    Named,
    /// `swiglu_alpha` and `swiglu_limit`; `hidden_act` has no effect.
    GptOss,
    /// `swiglu_limit`, with this default.
    Clamped { limit: f32 },
}

const BASE: Family = Family {
    model_types: &[],
    width: "moe_intermediate_size",
    shared: Shared::None,
    names: BlockNames::USUAL,
    activation: FamilyActivation::Named,
    expert_bias: false,
};

const GATED: Family = Family {
    shared: Shared::Gated { width: "shared_expert_intermediate_size" },
    names: BlockNames { shared_experts: "shared_expert", ..BlockNames::USUAL },
    ..BASE
};

/// The names of experts whose matrices are w1, w3 and w2.
const NUMBERED: BlockNames = BlockNames { matrices: MlpNames::MIXTRAL, ..BlockNames::USUAL };

const fn counted(default: usize) -> Shared {
    Shared::Count { key: "n_shared_experts", default }
}

/// The names of a correction bias that is not stored with the gate.
const fn bias_at(published: &'static str, packed: &'static str, is_row: bool) -> CorrectionBiasNames {
    CorrectionBiasNames { published, packed, is_row }
}

const FAMILIES: &[Family] = &[
    Family { model_types: &["qwen3_moe"], ..BASE },
    Family { model_types: &["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"], ..GATED },
    Family { model_types: &["olmoe", "flex_olmo"], width: "intermediate_size", ..BASE },
    Family { model_types: &["mixtral", "minimax"], width: "intermediate_size", names: NUMBERED, ..BASE },
    Family {
        model_types: &["minimax_m2"],
        width: "intermediate_size",
        names: BlockNames {
            correction_bias: bias_at("e_score_correction_bias", "e_score_correction_bias", false),
            ..NUMBERED
        },
        ..BASE
    },
    Family { model_types: &["deepseek_v2"], shared: counted(2), ..BASE },
    Family {
        model_types: &[
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe_text",
            "glm_moe_dsa",
            "solar_open",
        ],
        shared: counted(1),
        ..BASE
    },
    Family {
        model_types: &["exaone_moe"],
        shared: Shared::Count { key: "num_shared_experts", default: 1 },
        names: BlockNames {
            correction_bias: bias_at("e_score_correction_bias", "gate.e_score_correction_bias", false),
            ..BlockNames::USUAL
        },
        ..BASE
    },
    Family {
        model_types: &["hunyuan_v1_moe"],
        width: "intermediate_size",
        shared: Shared::AsWide,
        names: BlockNames { gate: "gate.wg", shared_experts: "shared_mlp", ..BlockNames::USUAL },
        ..BASE
    },
    Family {
        model_types: &["granitemoe"],
        width: "intermediate_size",
        names: BlockNames {
            gate: "router.layer",
            experts: "",
            matrices: MlpNames {
                packed_gate_up: "input_linear.weight",
                packed_down: "output_linear.weight",
                ..MlpNames::USUAL
            },
            ..BlockNames::USUAL
        },
        ..BASE
    },
    Family { model_types: &["dots1"], shared: counted(0), ..BASE },
    Family {
        model_types: &["ernie4_5_moe"],
        shared: Shared::Count { key: "moe_num_shared_experts", default: 2 },
        names: BlockNames {
            correction_bias: bias_at(
                "moe_statics.e_score_correction_bias",
                "gate.moe_statics.e_score_correction_bias",
                true,
            ),
            ..BlockNames::USUAL
        },
        ..BASE
    },
    Family {
        model_types: &["llama4_text"],
        width: "intermediate_size",
        shared: Shared::AsWide,
        names: BlockNames {
            gate: "router",
            shared_experts: "shared_expert",
            matrices: MlpNames { pack_order: PackOrder::Columns { in_turns: false }, ..MlpNames::USUAL },
            ..BlockNames::USUAL
        },
        ..BASE
    },
    Family {
        model_types: &["gpt_oss"],
        width: "intermediate_size",
        names: BlockNames {
            gate: "router",
            matrices: MlpNames { pack_order: PackOrder::Columns { in_turns: true }, ..MlpNames::USUAL },
            ..BlockNames::USUAL
        },
        activation: FamilyActivation::GptOss,
        expert_bias: true,
        ..BASE
    },
    Family {
        model_types: &["deepseek_v4"],
        shared: counted(1),
        activation: FamilyActivation::Clamped { limit: 10.0 },
        ..BASE
    },
    Family {
        model_types: &["longcat_flash"],
        width: "expert_ffn_hidden_size",
        names: BlockNames {
            gate: "router.classifier",
            correction_bias: bias_at(
                "router.e_score_correction_bias",
                "router.e_score_correction_bias",
                false,
            ),
            ..BlockNames::USUAL
        },
        ..BASE
    },
];

impl Family {
    /// The family of a config's `model_type`.
    pub fn of(keys: Keys<'_>) -> Result<&'static Self> {
        let Some(model_type) = keys.text("model_type")? else {
            return Err(RouterError::Missing { keys: vec!["model_type"] }.into());
        };
        if let Some(family) = FAMILIES.iter().find(|family| family.model_types.contains(&model_type)) {
            return Ok(family);
        }
        let known = model_types().collect::<Vec<_>>().join(", ");
        Err(BlockError::UnknownModelType { model_type: model_type.to_string(), known }.into())
    }
}

/// The model types for which [`CheckpointBlock::from_config`](super::CheckpointBlock::from_config) can make a block.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.model_types.iter().copied())
}
