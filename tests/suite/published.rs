//! Which kernels the published models take on Hopper, from their configs alone: no kernel of the tier "any" in a decode
//! step or a prompt, except for the kernels that a table lists with the reason.
//!
//! A loaded model says the same (`--explain-backends`; `explained.rs` compares that with what runs). Here no weights
//! are needed, so models that fit no card are asked, too: each part of a layer chooses its form for the sizes in the
//! config, in bf16, on one rank.

use std::collections::BTreeSet;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use model_families::ALL;
use model_runtime::{AttentionConfig, Config, MixerConfig, MlaConfig, QkNorm};
use moe_engine::{AttentionSpec, ModelSpec};
use moe_kernels::plan::{
    AttentionCall, AttentionForm, ColumnOrder, EpilogueCall, ExpertsCall, ExpertsForm, Form, FusedLinearForm,
    Fusion, Gpu, LinearCall, LinearForm, Machine, MonolithicCall, MonolithicForm, PerHeadCall, PerHeadForm,
    PromptCall, PromptForm, QuantWeights, RouterCall, RouterForm,
};
use moe_kernels::{QuantGroup, QuantScheme};
use moe_router::{Router, RouterParams};

/// Rows of a step, around the bounds of the forms.
const ROWS: [usize; 14] = [1, 2, 3, 4, 5, 7, 8, 16, 64, 65, 256, 512, 2048, 8192];

/// Forms and launches of the tier "any" on a card that has tuned kernels, by the beginning of their names. The last two
/// have no other form.
const ANY: [&str; 6] = ["any_", "gate product, then route", "none", "per_head", "mla_rows", "heads_norm"];
/// Models with latent attention.
const LATENT: [&str; 6] =
    ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash", "kimi-k2", "moonlight-16b-a3b"];

/// The kernels of the tier "any" that are accepted, and the reasons.
const EXCEPTIONS: [(&str, &[&str], &str); 3] = [
    (
        "per_head",
        &LATENT,
        "below 16 rows it streams the matrices of the heads past all rows, which is faster than cuBLAS; to 4 rows the launches \
         next to it compute heads of 128",
    ),
    (
        "mla_rows",
        &LATENT,
        "norm, rotation and cache write in one launch, which memory bounds; to 4 rows and with heads of 128 `latent_query` does it",
    ),
    (
        "heads_norm",
        &["minimax-m2", "olmoe-1b-7b"],
        "a norm over all heads is a launch of its own before the attention, which norms each head; memory bounds it",
    ),
];

/// Shapes of our own, for benchmarks on two CPU cores.
const SCALED_DOWN: [&str; 3] = ["deepseekv2-0.5b-a0.1b", "qwen3_5moe-0.9b-a0.2b", "qwen3moe-0.9b-a0.2b"];

/// The configs of published models in floats: names of their files.
fn configs() -> Vec<(String, Config)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("bench/configs");
    let mut files: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let texts = files.into_iter().map(|file| {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(file).unwrap())
    });
    // The forms of quantised weights are in `pins.txt` of moe-kernels.
    let published = texts.filter(|(name, text)| {
        !text.contains("quantization_config") && !SCALED_DOWN.contains(&name.as_str())
    });
    let parsed = published.map(|(name, text)| {
        let config = Config::parse(&text, &name).unwrap();
        (name, config)
    });
    parsed.collect()
}

/// A model on a machine, and the kernels that it was found to take.
struct Requested<'a> {
    spec: &'a dyn ModelSpec,
    machine: Machine,
    /// How all matrices but the router are quantised, with scales in bytes on a device.
    quant: Option<QuantScheme>,
    kernels: BTreeSet<String>,
}

impl Requested<'_> {
    fn choose<F: Form>(&mut self, call: &F::Call) -> Option<F> {
        let form = F::choose(call, &self.machine);
        self.kernels.insert(form.map_or("none".to_string(), |form| form.kernel(call)));
        form
    }

    fn weights(&self, gate_up: bool) -> Option<QuantWeights> {
        let weights = |scheme| QuantWeights {
            scheme,
            scales: DType::U8,
            gate_up,
            in_blocks: false,
            order: ColumnOrder::Input,
        };
        self.quant.map(weights)
    }

    fn linear(&mut self, rows: usize, [n, k]: [usize; 2], bias: bool) {
        let quant = self.weights(false);
        let call = LinearCall { rows, n, k, dtype: DType::BF16, quant, bias, aligned: true };
        match FusedLinearForm::Stream.fits(&call, &self.machine) {
            Ok(()) => drop(self.kernels.insert(FusedLinearForm::Stream.name().to_string())),
            Err(_) => drop(self.choose::<LinearForm>(&call)),
        }
    }

    /// Everything that a step of `rows` rows launches, decoding ones or a prompt's.
    fn step(&mut self, rows: usize, decodes: bool) {
        let decoder = self.spec.decoder();
        let h = decoder.hidden_size;
        match self.spec.attention() {
            AttentionSpec::Layers(mixers) => {
                for mixer in mixers {
                    match mixer {
                        MixerConfig::Attention(layer) => self.grouped_query(rows, decodes, layer),
                        MixerConfig::Linear(layer) => {
                            self.linear(rows, [layer.heads.projected(), layer.hidden_size], false);
                            self.linear(rows, [layer.hidden_size, layer.heads.value_width()], false);
                        }
                    }
                }
            }
            AttentionSpec::Latent(config) => self.latent(rows, decodes, config),
        }
        if decoder.is_sparse.contains(&false) {
            self.linear(rows, [2 * decoder.intermediate_size, h], false);
            self.linear(rows, [h, decoder.intermediate_size], false);
        }
        self.linear(rows, [decoder.vocab_size, h], false);
        self.experts(rows);
    }

    fn grouped_query(&mut self, rows: usize, decodes: bool, config: &AttentionConfig) {
        let AttentionConfig { hidden_size, num_heads, head_dim, .. } = *config;
        self.linear(rows, [config.qkv_rows(), hidden_size], config.qkv_bias);
        if config.qk_norm == QkNorm::AllHeads {
            self.kernels.insert("heads_norm".to_string());
        }
        self.choose::<AttentionForm>(&AttentionCall {
            rows,
            one_row_each: decodes,
            num_heads,
            head_dim,
            value_dim: head_dim,
            latent: false,
            sinks: config.sinks,
            gates: config.output_gate,
            dtype: DType::BF16,
            block_size: None,
            aligned: true,
        });
        self.linear(rows, [hidden_size, num_heads * head_dim], config.o_bias);
    }

    fn latent(&mut self, rows: usize, decodes: bool, config: &MlaConfig) {
        let MlaConfig {
            hidden_size,
            num_heads,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        } = *config;
        let query = num_heads * (qk_nope_head_dim + qk_rope_head_dim);
        let latent = kv_lora_rank + qk_rope_head_dim;
        match config.q_lora_rank {
            None => self.linear(rows, [query + latent, hidden_size], config.bias),
            Some(rank) => {
                self.linear(rows, [latent, hidden_size], config.bias);
                self.linear(rows, [rank, hidden_size], config.bias);
                self.linear(rows, [query, rank], false);
            }
        }
        self.kernels.insert("mla_rows".to_string());
        let prompt = PromptCall {
            rows,
            positions: None,
            num_heads,
            dims: [kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim],
            dtype: DType::BF16,
            aligned: true,
        };
        if decodes || self.choose::<PromptForm>(&prompt) == Some(PromptForm::Latent) {
            self.choose::<AttentionForm>(&AttentionCall {
                rows,
                one_row_each: decodes,
                num_heads,
                head_dim: latent,
                value_dim: kv_lora_rank,
                latent: true,
                sinks: false,
                gates: false,
                dtype: DType::BF16,
                block_size: None,
                aligned: true,
            });
            for (head_dim, overlapped) in
                [(qk_nope_head_dim, Some("latent_query")), (v_head_dim, decodes.then_some("latent_merge"))]
            {
                let call = PerHeadCall {
                    rows,
                    head_dim,
                    latent: kv_lora_rank,
                    neighbour: overlapped,
                    dtype: DType::BF16,
                };
                self.choose::<PerHeadForm>(&call);
            }
        }
        self.linear(rows, [hidden_size, num_heads * v_head_dim], config.bias);
    }

    fn experts(&mut self, rows: usize) {
        let decoder = self.spec.decoder();
        let moe = decoder.moe.as_ref().unwrap();
        let config = &moe.router;
        let bias = Tensor::zeros(config.num_logits(), DType::F32, &Device::Cpu).unwrap();
        let correction_bias = config.correction_bias.then_some(bias);
        let router =
            Router::new(config.clone(), RouterParams { correction_bias, ..Default::default() }).unwrap();
        // Shared experts as wide as routed ones are slots of every token, unless they have a gate.
        let is_gated = decoder.names.shared_expert_gate.is_some();
        let slots = moe.shared_experts().filter(|_| !is_gated);
        let apart = slots.is_none() && moe.shared_intermediate_size > 0;
        let shared = slots.unwrap_or(0);
        let call = ExpertsCall {
            tokens: rows,
            top_k: config.top_k + shared,
            num_ids: config.num_experts + shared,
            num_local: config.num_experts + shared,
            hidden: decoder.hidden_size,
            inter: moe.intermediate_size,
            quant: self.weights(true).zip(self.weights(false)).map(Into::into),
            passes: 1,
            epilogue: EpilogueCall { bias: moe.expert_bias, activation: decoder.activation },
        };
        if apart {
            self.linear(rows, [2 * moe.shared_intermediate_size, decoder.hidden_size], false);
            self.linear(rows, [decoder.hidden_size, moe.shared_intermediate_size], false);
        }
        let fusions: &[Fusion] =
            if apart { &[Fusion::Nothing] } else { &[Fusion::NormAdd, Fusion::AddNorm, Fusion::Nothing] };
        let with_router = fusions.iter().find_map(|fusion| {
            router.kernel_rule().ok()?;
            // The gate is taken for bf16. One that a checkpoint has in f32 is a product of its own.
            let call =
                MonolithicCall { experts: call, dtype: DType::BF16, gate: DType::BF16, fusion: *fusion };
            MonolithicForm::choose(&call, &self.machine).map(|form| form.kernel(&call))
        });
        if let Some(kernel) = with_router {
            self.kernels.insert(kernel);
            return;
        }
        match router.kernel_rule() {
            Ok(()) => drop(self.choose::<RouterForm>(&RouterCall {
                hidden: call.hidden,
                experts: call.num_ids,
                top_k: call.top_k,
                dtype: DType::BF16,
                gate: DType::BF16,
            })),
            Err(_) => drop(self.kernels.insert(RouterForm::Apart.name().to_string())),
        }
        self.choose::<ExpertsForm>(&call);
    }
}

/// The kernels of the tier "any" in decode steps and prompts of a model.
fn any_kernels(config: &Config, machine: Machine, quant: Option<QuantScheme>) -> BTreeSet<String> {
    let spec = ALL.parse(config).unwrap();
    let mut asked = Requested { spec: spec.as_ref(), machine, quant, kernels: BTreeSet::new() };
    for rows in ROWS {
        asked.step(rows, true);
        asked.step(rows, false);
    }
    let is_any = |kernel: &String| ANY.iter().any(|any| kernel.starts_with(any));
    asked.kernels.into_iter().filter(is_any).collect()
}

#[test]
fn published_models_take_tuned_kernels_on_hopper() {
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    let configs = configs();
    assert!(configs.len() >= 12, "{}", configs.len());
    for (name, config) in &configs {
        let listed = EXCEPTIONS.iter().filter(|(_, models, _)| models.contains(&name.as_str()));
        let expected: BTreeSet<String> = listed.map(|(kernel, ..)| kernel.to_string()).collect();
        assert_eq!(
            any_kernels(config, machine, None),
            expected,
            "{name}: kernels of the tier any, and those that are listed"
        );
    }
    for (_, models, reason) in EXCEPTIONS {
        for model in models {
            assert!(
                configs.iter().any(|(name, _)| name == model),
                "{model} has no config, but is listed: {reason}"
            );
        }
    }
}

/// Every product of this model in Q4_K has a tuned kernel for its sizes.
#[test]
fn qwen3_30b_in_q4_k_takes_tuned_kernels_on_hopper() {
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    let q4_k = QuantScheme::int(4, QuantGroup::Size(32)).with_minima().with_shared_scales(8);
    let configs = configs();
    let (_, config) = configs.iter().find(|(name, _)| name == "qwen3-30b-a3b").unwrap();
    assert_eq!(any_kernels(config, machine, Some(q4_k)), BTreeSet::new());
}

#[test]
fn a_card_without_machine_code_takes_the_tier_any() {
    let machine = Machine { gpu: Some(Gpu::ptx_only((9, 0), 232_448, 132).unwrap()), ..Machine::default() };
    for (name, config) in configs() {
        let kernels = any_kernels(&config, machine, None);
        for kernel in ["any_linear", "any_attention", "gate product, then route"] {
            assert!(kernels.contains(kernel), "{name}: {kernels:?}");
        }
    }
}
