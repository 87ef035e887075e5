//! The kernels of latent attention in a step: what is explained, and what the layer asks before it runs.

use candle_core::DType;
use moe_kernels::Weight;
use moe_kernels::names::MlaNames;
use moe_kernels::plan::{
    AttentionCall, AttentionForm, Form, LinearCall, Machine, PerHeadCall, PerHeadForm, PromptCall,
    PromptForm, Stage,
};
use moe_layer::PlanStep;

use super::projections::{Down, Projection, Query, Up};
use super::{MlaAttention, MlaConfig};
use crate::decoder::{OUTPUT, OUTPUT_ADD, linear_stage, plain};

/// What a plan calls the product that makes queries.
const QUERY: &str = MlaNames::DEEPSEEK.q;

impl MlaAttention {
    /// The kernels of a step, in their order.
    pub(super) fn step_stages(&self, fused: bool, step: &PlanStep, machine: &Machine) -> Vec<Stage> {
        let rows = step.rows;
        let linear = |computes, projection: &Projection| {
            linear_stage(computes, fused, &projection.call(rows), machine)
        };
        let by_rows = |computes, kernel: &str| {
            plain(computes, if machine.gpu.is_some() { kernel } else { "cpu" }, Vec::new())
        };
        let per_head = |computes, head_dim, beside| {
            let (latent, dtype) = (self.config.kv_lora_rank, self.o.weight.dtype());
            let call = PerHeadCall { rows, head_dim, latent, beside, dtype };
            PerHeadForm::stage(computes, &call, machine)
        };
        // What precedes attention is one launch, and few rows are split, so that a launch merges.
        let before = matches!(self.down, Down::Packed(_)).then_some("latent_query");
        let latent = self.attention_call(rows, step.one_row_each, None);
        let splits = matches!(
            AttentionForm::choose(&latent, machine),
            Some(AttentionForm::LatentDecode | AttentionForm::Latent)
        );
        let behind = (step.one_row_each && splits).then_some("latent_merge");
        let mut stages = Vec::new();
        match &self.down {
            Down::Packed(packed) => {
                let computes: &[&str] = if fused { &["norm", QUERY, "kv_a"] } else { &[QUERY, "kv_a"] };
                stages.push(linear(computes, packed));
                stages.push(by_rows(&["latent norm", "rope", "kv write"], "mla_rows"));
            }
            Down::Apart { query, kv_a } => {
                stages.push(linear(&["kv_a"], kv_a));
                stages.push(by_rows(&["latent norm", "rope of the key"], "mla_latent"));
                if let Up::Naive(up) = &self.up {
                    stages.push(linear(&["kv_b"], up));
                }
                stages.push(by_rows(&["kv write"], "mla_cache"));
                match query {
                    Query::Direct(q) => stages.push(linear(&[QUERY], q)),
                    Query::Low { a, b, .. } => {
                        stages.push(linear(&["q_a"], a));
                        stages.push(by_rows(&["norm of the query's latent"], "rms_norm"));
                        stages.push(linear(&["q_b"], b));
                    }
                }
                stages.push(by_rows(&["rope of the queries"], "mla_query"));
            }
        }
        let call = self.attention_call(rows, step.one_row_each, None);
        let mut attention = AttentionForm::stage(&["attention"], &call, machine);
        if matches!(self.up, Up::Naive(_)) {
            stages.push(attention);
        } else {
            let prompts = (!step.one_row_each).then(|| {
                PromptForm::stage(
                    &["keys and values of all heads", "attention"],
                    &self.prompt_call(rows, None),
                    machine,
                )
            });
            match prompts {
                Some(stage) if stage.rejected.is_empty() => stages.push(stage),
                prompts => {
                    attention.rejected.splice(0..0, prompts.into_iter().flat_map(|stage| stage.rejected));
                    stages.extend([
                        per_head(&["queries to latents"], self.config.qk_nope_head_dim, before),
                        attention,
                        per_head(&["latents to values"], self.config.v_head_dim, behind),
                    ]);
                }
            }
        }
        stages.push(linear(if fused { OUTPUT_ADD } else { OUTPUT }, &self.o));
        if self.ranks.is_some() {
            stages.push(plain(&["sum over ranks"], "all-reduce", Vec::new()));
        }
        stages
    }

    /// The dtype in which queries leave for attention. They are rounded there where they become operands of tensor cores,
    /// so what writes them may round as well.
    pub(super) fn query_dtype(&self, rows: usize, block_size: usize, machine: &Machine) -> DType {
        let call = self.attention_call(rows, false, Some(block_size));
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
            dtype: self.o.weight.dtype(),
            block_size,
            aligned: true,
        }
    }
}

impl Projection {
    pub(super) fn call(&self, rows: usize) -> LinearCall {
        let (n, k) = dims(&self.weight);
        LinearCall {
            rows,
            n,
            k,
            dtype: self.weight.dtype(),
            quant: self.weight.quantisation(),
            bias: self.bias.is_some(),
            aligned: true,
        }
    }
}

/// Rows and columns of a matrix.
fn dims(weight: &Weight) -> (usize, usize) {
    match *weight.dims() {
        [n, k] => (n, k),
        _ => (0, 0),
    }
}
