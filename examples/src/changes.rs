//! What changes in candle-transformers 0.11.1 where its sparse block is replaced: the build script and the program
//! include this file. A project that has its own copy of a model makes the same changes there.

/// The lines of a model's source that change.
pub struct Change {
    /// The file below `src/models` of candle-transformers.
    pub file: &'static str,
    /// Text that occurs once, and what stands in its place.
    pub replaced: &'static [[&'static str; 2]],
    /// Text that is added at the end.
    pub added: &'static str,
}

/// The changes of each model.
pub const CHANGES: &[Change] = &[
    Change {
        file: "mixtral.rs",
        replaced: &[
            ["block_sparse_moe: SparseMoeBlock,", "block_sparse_moe: moe_layer::SparseMoeBlock,"],
            [
                "SparseMoeBlock::new(cfg, vb.pp(\"block_sparse_moe\"))",
                "moe(cfg, vb.pp(\"block_sparse_moe\"))",
            ],
        ],
        added: r#"
fn moe(cfg: &Config, vb: VarBuilder) -> Result<moe_layer::SparseMoeBlock> {
    let config = serde_json::json!({
        "model_type": "mixtral", "hidden_size": cfg.hidden_size, "intermediate_size": cfg.intermediate_size,
        "num_local_experts": cfg.num_local_experts, "num_experts_per_tok": cfg.num_experts_per_tok,
    });
    moe_layer::SparseMoeBlock::from_hf(&config, 0, vb)
}
"#,
    },
    Change {
        file: "qwen3_moe.rs",
        replaced: &[
            ["NaiveMoE(Qwen3SparseMoeBlock),", "NaiveMoE(moe_layer::SparseMoeBlock),"],
            [
                "FusedMoE(FusedMoe::new(&moe_cfg, vb.pp(\"mlp\"), vb.dtype())?)",
                "NaiveMoE(moe(cfg, vb.pp(\"mlp\"))?)",
            ],
            [
                "NaiveMoE(Qwen3SparseMoeBlock::new(cfg, vb.pp(\"mlp\"))?)",
                "NaiveMoE(moe(cfg, vb.pp(\"mlp\"))?)",
            ],
        ],
        added: r#"
fn moe(cfg: &Config, vb: VarBuilder) -> Result<moe_layer::SparseMoeBlock> {
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": cfg.hidden_size, "moe_intermediate_size": cfg.moe_intermediate_size,
        "num_experts": cfg.num_experts, "num_experts_per_tok": cfg.num_experts_per_tok,
        "norm_topk_prob": cfg.norm_topk_prob,
    });
    moe_layer::SparseMoeBlock::from_hf(&config, 0, vb)
}
"#,
    },
    Change {
        file: "deepseek2.rs",
        replaced: &[
            ["Moe(Box<Moe>),", "Moe(Box<moe_layer::SparseMoeBlock>),"],
            [
                "Moe::new(cfg, vb.pp(\"mlp\"), cfg.n_shared_experts, n_routed_experts)?.into(),",
                "moe(cfg, vb.pp(\"mlp\"))?.into(),",
            ],
        ],
        added: r#"
fn moe(cfg: &DeepSeekV2Config, vb: VarBuilder) -> Result<moe_layer::SparseMoeBlock> {
    let groups = matches!(cfg.topk_method, TopkMethod::GroupLimitedGreedy);
    let config = serde_json::json!({
        "model_type": "deepseek_v2", "hidden_size": cfg.hidden_size, "moe_intermediate_size": cfg.moe_intermediate_size,
        "n_routed_experts": cfg.n_routed_experts, "num_experts_per_tok": cfg.num_experts_per_tok,
        "n_shared_experts": cfg.n_shared_experts.unwrap_or(0), "routed_scaling_factor": cfg.routed_scaling_factor,
        "topk_method": if groups { "group_limited_greedy" } else { "greedy" },
        "n_group": cfg.n_group, "topk_group": cfg.topk_group, "norm_topk_prob": cfg.norm_topk_prob,
    });
    moe_layer::SparseMoeBlock::from_hf(&config, 0, vb)
}
"#,
    },
];

/// candle-transformers' Qwen3-MoE in a build with its feature `cuda` always takes a fused kernel, which has no f32.
/// With this line it takes its own other block, which computes in f32 what ours is compared with.
#[allow(dead_code)] // the program does not read it
pub const UNFUSED: [&str; 2] = [
    "FusedMoE(FusedMoe::new(&moe_cfg, vb.pp(\"mlp\"), vb.dtype())?)",
    "NaiveMoE(Qwen3SparseMoeBlock::new(cfg, vb.pp(\"mlp\"))?)",
];

impl Change {
    /// Lines of the source that are changed or added.
    #[allow(dead_code)] // the build script does not count them
    pub fn lines(&self) -> usize {
        let replaced: usize = self.replaced.iter().map(|[_, to]| to.lines().count()).sum();
        replaced + self.added.trim().lines().count()
    }
}
