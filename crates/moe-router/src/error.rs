//! What can be wrong with a router's configuration, one variant per fault.

/// A configuration that cannot be honoured. Nothing is ever replaced by a fallback.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouterError {
    /// A count that must be at least 1.
    #[error("{name} must be at least 1, got 0")]
    Zero {
        /// The field.
        name: &'static str,
    },
    /// Ids are u32 and expert maps are i32.
    #[error(
        "{num_experts} experts, {num_zero_experts} zero experts and {num_fused_shared_experts} fused shared \
         experts are more than the {max} that expert ids can name"
    )]
    TooManyExperts {
        /// Routed experts E.
        num_experts: usize,
        /// Identity experts.
        num_zero_experts: usize,
        /// Fused shared experts.
        num_fused_shared_experts: usize,
        /// The limit.
        max: usize,
    },
    /// More experts per token than experts to choose from.
    #[error("num_experts_per_tok = {top_k} exceeds the {available} experts of the router")]
    TopKTooLarge {
        /// Routed experts per token.
        top_k: usize,
        /// Experts that can be chosen, zero experts included.
        available: usize,
    },
    /// Groups must have equal sizes.
    #[error("{num_experts} experts do not divide into {num_expert_group} groups")]
    ExpertsNotDivisible {
        /// Routed experts E.
        num_experts: usize,
        /// Number of groups.
        num_expert_group: usize,
    },
    /// More groups to keep than there are.
    #[error("topk_group = {topk_group} exceeds num_expert_group = {num_expert_group}")]
    TopkGroupTooLarge {
        /// Groups kept per token.
        topk_group: usize,
        /// Number of groups.
        num_expert_group: usize,
    },
    /// The kept groups hold too few experts.
    #[error(
        "num_experts_per_tok = {top_k} exceeds the {left} experts that {topk_group} groups of \
         {experts_per_group} leave"
    )]
    TopKExceedsGroups {
        /// Routed experts per token.
        top_k: usize,
        /// Experts left after grouping.
        left: usize,
        /// Groups kept per token.
        topk_group: usize,
        /// Experts in each group.
        experts_per_group: usize,
    },
    /// The biased group score is the sum of two experts' scores.
    #[error(
        "with a correction bias a group is scored by its two best experts, so each of the \
         {num_expert_group} groups needs at least 2 experts, got {experts_per_group}"
    )]
    GroupTooSmall {
        /// Number of groups.
        num_expert_group: usize,
        /// Experts in each group.
        experts_per_group: usize,
    },
    /// The selection ignores scores, so a bias on them would silently do nothing.
    #[error("a correction bias has no effect on {selection} selection; remove one of the two")]
    BiasWithoutEffect {
        /// The selection.
        selection: &'static str,
    },
    /// The configuration calls for a bias that was not given.
    #[error("the router selects on score + bias, but no e_score_correction_bias was given")]
    MissingCorrectionBias,
    /// A bias was given that the configuration does not use.
    #[error("an e_score_correction_bias was given, but the router is configured without one")]
    UnexpectedCorrectionBias,
    /// Zero experts are chosen by score + bias only.
    #[error(
        "{num_zero_experts} zero experts need plain top-k selection with a correction bias, \
         got {selection} selection with correction_bias = {correction_bias}"
    )]
    ZeroExpertsNeedBias {
        /// Identity experts.
        num_zero_experts: usize,
        /// The selection.
        selection: &'static str,
        /// Whether there is a bias.
        correction_bias: bool,
    },
    /// Weights on the input are defined for one slot per token only.
    #[error(
        "apply_router_weight_on_input is only implemented for topk = 1, got {slots} slots per token \
         ({top_k} routed, {num_fused_shared_experts} fused shared)"
    )]
    WeightOnInput {
        /// All slots per token.
        slots: usize,
        /// Routed experts per token.
        top_k: usize,
        /// Fused shared experts.
        num_fused_shared_experts: usize,
    },
    /// A number outside of its range.
    #[error("{name} must be {expected}, got {value}")]
    BadNumber {
        /// The field.
        name: &'static str,
        /// The range.
        expected: &'static str,
        /// The value.
        value: f32,
    },
    /// No simulation strategy has this name.
    #[error("unknown routing simulation strategy `{name}`; available: {available}")]
    UnknownStrategy {
        /// The name.
        name: String,
        /// The registered names, in order.
        available: String,
    },
    /// An input that the selection needs was not given, or one that it does not use was.
    #[error("{selection} selection {fault}")]
    WrongParams {
        /// The selection.
        selection: &'static str,
        /// What is missing or superfluous.
        fault: &'static str,
    },

    /// The configuration is not a JSON object.
    #[error("expected the model's configuration as a JSON object, got {got}")]
    NotAnObject {
        /// What was there.
        got: String,
    },
    /// A required key is absent.
    #[error("the model's configuration lacks {key}")]
    MissingKey {
        /// The key and its aliases.
        key: String,
    },
    /// A value of the wrong type.
    #[error("{key} must be {expected}, got {got}")]
    WrongType {
        /// The key.
        key: String,
        /// The type.
        expected: &'static str,
        /// The value as JSON.
        got: String,
    },
    /// Two spellings of one setting disagree.
    #[error("{first} = {first_value} contradicts {second} = {second_value}; keep one of the two")]
    ConflictingKeys {
        /// The first spelling.
        first: String,
        /// Its value.
        first_value: String,
        /// The second spelling.
        second: String,
        /// Its value.
        second_value: String,
    },
    /// A name that the key does not take.
    #[error("unknown {key} `{name}`; expected one of {expected}")]
    UnknownName {
        /// The key.
        key: &'static str,
        /// The name.
        name: String,
        /// The accepted names.
        expected: &'static str,
    },
    /// Nothing says how the model routes.
    #[error(
        "model_type `{model_type}` is unknown to the router and the configuration does not say how it routes; \
         set moe_router_backend, topk_method or scoring_func"
    )]
    UnknownModelType {
        /// The model type.
        model_type: String,
    },
    /// Groups without a method that uses them.
    #[error(
        "num_expert_group = {num_expert_group} is set, but nothing says whether routing uses groups; \
         set topk_method (greedy, group_limited_greedy or noaux_tc)"
    )]
    AmbiguousGroups {
        /// Number of groups.
        num_expert_group: usize,
    },
    /// Grouped routing without its two group values.
    #[error(
        "{method} routing requires num_expert_group (n_group) and topk_group, both non-zero, \
         got {num_expert_group:?} and {topk_group:?}"
    )]
    MissingGroups {
        /// The method's name.
        method: &'static str,
        /// Number of groups.
        num_expert_group: Option<usize>,
        /// Groups kept per token.
        topk_group: Option<usize>,
    },
    /// noaux_tc is defined by its bias.
    #[error("fused_gate (noaux_tc) routing requires a correction bias, but {key} is false")]
    FusedGateNeedsBias {
        /// The key that switches the bias off.
        key: &'static str,
    },
    /// The fused shared slots are counted in num_experts_per_tok.
    #[error(
        "num_experts_per_tok = {num_experts_per_tok} counts the fused shared experts and must exceed \
         num_fused_shared_experts = {num_fused_shared_experts}"
    )]
    FusedSharedExceedTopK {
        /// All slots per token.
        num_experts_per_tok: usize,
        /// Fused shared experts.
        num_fused_shared_experts: usize,
    },
    /// Zero experts that do something else than pass their input on.
    #[error("unsupported zero_expert_type `{name}`; only `identity` is defined")]
    UnknownZeroExpertType {
        /// The type.
        name: String,
    },
}

impl From<RouterError> for candle_core::Error {
    fn from(e: RouterError) -> Self {
        candle_core::Error::wrap(e)
    }
}
