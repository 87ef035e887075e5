//! The kernels of latent attention in a step. The layer asks the same functions before it runs as the explanation does.

use candle_core::DType;
use moe_kernels::names::MlaNames;
use moe_kernels::plan::{
    AttentionCall, AttentionForm, Form, Fusion, Machine, PerHeadCall, PerHeadForm, PromptCall, PromptForm,
    QUERY_WITH_PRODUCT, Rejected, Stage,
};
use moe_layer::PlanStep;

use super::config::MlaConfig;
use super::layer::MlaAttention;
use super::projections::{Down, Query, Up};
use crate::projection::Projection;

/// What a plan calls the product that makes queries.
const QUERY: &str = MlaNames::DEEPSEEK.q;
/// What a plan calls the norm of the query's latent, the product after it, and both.
const QUERY_LATENT: [&[&str]; 3] =
    [&["norm of the query's latent"], &["q_b"], &["norm of the query's latent", "q_b"]];

impl MlaAttention {
    /// The kernels of a step, in their order.
    pub(super) fn step_stages(&self, fusion: Fusion, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let rows = step.rows;
        let linear = |computes, projection: &Projection| projection.stage(computes, fusion, rows, machine);
        let mut stages = Vec::new();
        match &self.down {
            Down::Packed(packed) => {
                let normed: &[&str] = &["norm", QUERY, "kv_a"];
                stages.push(linear(if fusion == Fusion::NormAdd { normed } else { &normed[1..] }, packed));
            }
            Down::Apart { query, kv_a } => {
                let first = |computes: [&'static [&'static str]; 2], projection: &Projection| {
                    linear(computes[usize::from(fusion == Fusion::NormAdd)], projection)
                };
                stages.push(first([&["kv_a"], &["norm", "kv_a"]], kv_a));
                if let Up::Naive(up) = &self.up {
                    stages.push(Stage::new(&["latent norm", "rope of the key"], "mla_latent"));
                    stages.push(up.stage(&["kv_b"], Fusion::Nothing, rows, machine));
                    stages.push(Stage::new(&["kv write"], "mla_cache"));
                }
                match query {
                    Query::Direct(q) => stages.push(first([&[QUERY], &["norm", QUERY]], q)),
                    Query::Low { a, b, .. } => {
                        stages.push(first([&["q_a"], &["norm", "q_a"]], a));
                        stages.extend(b.normed_stages(QUERY_LATENT, rows, machine));
                    }
                }
            }
        }
        stages.extend(self.attend_stages(step, machine));
        stages.extend(self.o.last_stages(fusion, rows, self.ranks.as_ref(), machine));
        stages
    }

    /// The kernels between the projections.
    fn attend_stages(&self, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        if matches!(self.up, Up::Naive(_)) {
            let call = self.attention_call(step.rows, step.one_row_each(), None);
            return vec![self.rows_stage(), AttentionForm::stage(&["attention"], &call, machine)];
        }
        let positions = Some(step.prompt_positions.unwrap_or(step.prompt_rows()));
        let prompts = self.prompt_call(step.prompt_rows(), positions);
        let prompts = PromptForm::stage(&["keys and values of all heads", "attention"], &prompts, machine);
        if prompts.kernel != PromptForm::Expanded.name() {
            let rejected = if step.one_row_each() { Vec::new() } else { prompts.rejected };
            return self.latent_stages(step.rows, step.one_row_each(), rejected, machine);
        }
        let mut stages = match step.decode_rows {
            0 => Vec::new(),
            rows => self.latent_stages(rows, true, Vec::new(), machine),
        };
        stages.extend([self.rows_stage(), prompts]);
        stages
    }

    /// The kernels of rows in latent space. `rejected` are the kernels that were tried first.
    fn latent_stages(
        &self,
        rows: usize,
        one_row_each: bool,
        rejected: Vec<Rejected>,
        machine: &Machine,
    ) -> Vec<Stage> {
        let call = self.attention_call(rows, one_row_each, None);
        let mut attention = AttentionForm::stage(&["attention"], &call, machine).after(rejected);
        // The launch before the attention may also compute the product of its queries, if they are written in the model
        // dtype. The attention of few rows is split; the launch that merges the parts may also compute the product that
        // follows.
        let dtype = self.o.weight.dtype();
        let before = (self.query_dtype(rows, None, machine) == dtype).then_some(QUERY_WITH_PRODUCT);
        let splits = matches!(
            AttentionForm::choose(&call, machine),
            Some(AttentionForm::LatentDecode | AttentionForm::Latent)
        );
        let after = (one_row_each && splits).then_some("latent_merge");
        let product = |computes, head_dim, neighbour| {
            let call = PerHeadCall { rows, head_dim, latent: self.config.kv_lora_rank, neighbour, dtype };
            PerHeadForm::stage(computes, &call, machine)
        };
        let queries = product(&["queries to latents"], self.config.qk_nope_head_dim, before);
        let values = product(&["latents to values"], self.config.v_head_dim, after);
        let is_overlapped = |stage: &Stage| stage.kernel == PerHeadForm::Overlapped.name();
        let mut stages = match is_overlapped(&queries) {
            true => vec![Stage::new(
                &["latent norm", "rope", "kv write", "queries to latents"],
                QUERY_WITH_PRODUCT,
            )],
            false => vec![self.rows_stage(), queries],
        };
        if is_overlapped(&values) {
            attention.computes = &["attention", "latents to values"];
            stages.push(attention);
        } else {
            stages.extend([attention, values]);
        }
        stages
    }

    /// The launch before attention, or before the product of the queries.
    fn rows_stage(&self) -> Stage {
        match self.up {
            Up::Absorbed { .. } => Stage::new(&["latent norm", "rope", "kv write"], "mla_rows"),
            Up::Naive(_) => Stage::new(&["rope of the queries"], "mla_query"),
        }
    }

    /// The dtype in which queries are written for attention. If attention rounds them for tensor cores anyway, the
    /// launch that writes them may round them.
    pub(super) fn query_dtype(&self, rows: usize, block_size: Option<usize>, machine: &Machine) -> DType {
        let call = self.attention_call(rows, false, block_size);
        match AttentionForm::choose(&call, machine) {
            Some(AttentionForm::Latent) => call.dtype,
            _ => DType::F32,
        }
    }

    /// The prompts' rows of a step, and the positions that they see where there are some.
    pub(super) fn prompt_call(&self, rows: usize, positions: Option<usize>) -> PromptCall {
        let MlaConfig { num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } =
            self.config;
        PromptCall {
            rows,
            positions,
            num_heads,
            dims: [kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim],
            dtype: self.o.weight.dtype(),
            aligned: true,
        }
    }

    fn attention_call(&self, rows: usize, one_row_each: bool, block_size: Option<usize>) -> AttentionCall {
        let MlaConfig { num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } =
            self.config;
        let latent = matches!(self.up, Up::Absorbed { .. });
        let (plain, value_dim) =
            if latent { (kv_lora_rank, kv_lora_rank) } else { (qk_nope_head_dim, v_head_dim) };
        AttentionCall {
            rows,
            one_row_each,
            num_heads,
            head_dim: plain + qk_rope_head_dim,
            value_dim,
            latent,
            sinks: false,
            gates: false,
            dtype: self.o.weight.dtype(),
            block_size,
            aligned: true,
        }
    }
}
