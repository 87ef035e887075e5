//! GGUF files of families whose conversion is more than names, and what files of strangers may have.

use candle_core::{DType, Device};
use model_runtime::Checkpoint;
use model_runtime::config::{Config, RopeConfig, RopeScaling};
use moe_kernels::QuantScheme;
use moe_quant::GgmlType;
use serde_json::json;

use crate::gguf::writer::{Meta, Tensor, Writer};
use crate::gguf::{F32, Q8_0, save, sizes, tensor};

/// The header of a file of two layers, and one tensor.
fn file(architecture: &str) -> Writer {
    let mut file = sizes(architecture, 2);
    file.put(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Meta::F32(1e-6));
    file.tensors.push(tensor("token_embd.weight", &[8, 32], Q8_0));
    file
}

fn gpt_oss() -> Writer {
    let mut file = file("gpt-oss");
    file.put("gpt-oss.attention.sliding_window", Meta::U32(5));
    file
}

fn qwen35() -> Writer {
    let mut file = file("qwen35moe");
    for (key, value) in
        [("conv_kernel", 4), ("state_size", 3), ("group_count", 2), ("time_step_rank", 4), ("inner_size", 20)]
    {
        file.put(&format!("qwen35moe.ssm.{key}"), Meta::U32(value));
    }
    file
}

fn opened(file: &Writer) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::open(save(&dir, &file.bytes())).map_err(|e| e.to_string())
}

/// The config, or the error, of a file with further metadata.
fn with(mut file: Writer, entries: Vec<(&str, Meta)>) -> Result<Config, String> {
    for (key, value) in entries {
        file.metadata.retain(|(other, _)| other != key);
        file.put(key, value);
    }
    opened(&file).map(|checkpoint| checkpoint.config)
}

fn layer_types(config: &Config) -> Vec<&str> {
    config.strings(&["layer_types"]).unwrap()
}

#[test]
fn windows_are_where_the_pattern_says() {
    const KEY: &str = "gpt-oss.attention.sliding_window_pattern";
    let plain = with(gpt_oss(), vec![]).unwrap();
    assert!(!plain.has("layer_types"), "every other layer, from the first one on, is the family's default");
    assert_eq!(plain.size(&["sliding_window"], 1..=9).unwrap(), 5);
    assert_eq!(plain.size(&["intermediate_size"], 1..=99).unwrap(), 32, "the width of experts");
    let types = |value| with(gpt_oss(), vec![(KEY, value)]).map(|config| layer_types(&config).join(" "));
    let listed = types(Meta::Bools(vec![false, true])).unwrap();
    assert_eq!(listed, "full_attention sliding_attention");
    assert_eq!(types(Meta::U32(2)).unwrap(), "sliding_attention full_attention");
    assert_eq!(types(Meta::U32(1)).unwrap(), "full_attention full_attention");
    assert_eq!(types(Meta::U32(0)).unwrap(), "sliding_attention sliding_attention");
    let short = types(Meta::Bools(vec![true])).unwrap_err();
    assert!(short.contains(&format!("`{KEY}`: expected an entry for each of 2 layers, got 1")), "{short}");
    let many = vec![("gpt-oss.block_count", Meta::U64(u64::MAX)), (KEY, Meta::U32(2))];
    assert!(!with(gpt_oss(), many).unwrap().has("layer_types"), "the family refuses this number of layers");
    assert!(types(Meta::Text("all".into())).unwrap_err().contains("a truth value for each layer"));
    let base = with(gpt_oss(), vec![("gpt-oss.rope.freq_base_swa", Meta::F32(5e4))]).unwrap_err();
    assert!(base.contains("`gpt-oss.rope.freq_base_swa`: expected 10000"), "{base}");
}

#[test]
fn context_is_extended_as_the_file_says() {
    let yarn = || {
        vec![
            ("gpt-oss.rope.freq_base", Meta::F32(150000.0)),
            ("gpt-oss.rope.scaling.type", Meta::Text("yarn".into())),
            ("gpt-oss.rope.scaling.factor", Meta::F32(32.0)),
            ("gpt-oss.rope.scaling.original_context_length", Meta::U32(16)),
            ("gpt-oss.rope.scaling.yarn_beta_fast", Meta::F32(24.0)),
            ("gpt-oss.rope.scaling.yarn_attn_factor", Meta::F32(1.0)),
        ]
    };
    let rope = |config: &Config| RopeConfig::from_config(config, 16, 64).unwrap();
    let read = rope(&with(gpt_oss(), yarn()).unwrap());
    let RopeScaling::Yarn(scaling) = &read.scaling else { panic!("{:?}", read.scaling) };
    assert_eq!((read.theta, scaling.factor, scaling.original_max_position_embeddings), (150000.0, 32.0, 16));
    assert_eq!((scaling.beta_fast, scaling.beta_slow, scaling.truncate), (24.0, 1.0, false));
    // A file that says nothing has no scaling, although the default of config.json may have one.
    let plain = rope(&with(gpt_oss(), vec![]).unwrap());
    assert_eq!((plain.theta, plain.scaling), (10000.0, RopeScaling::Default));
    let unused = vec![("gpt-oss.rope.scaling.type", Meta::Text("linear".into()))];
    assert_eq!(rope(&with(gpt_oss(), unused).unwrap()).scaling, RopeScaling::Default);
    // llama.cpp takes a factor without a type, and the factor's older name, for linear scaling.
    let linear = RopeScaling::Linear { factor: 4.0 };
    for key in ["rope.scaling.factor", "rope.scale_linear"].map(|key| format!("gpt-oss.{key}")) {
        let config = with(gpt_oss(), vec![(&key, Meta::F32(4.0))]).unwrap();
        assert_eq!(rope(&config).scaling, linear, "{key}");
    }
    let none = vec![
        ("gpt-oss.rope.scaling.type", Meta::Text("none".into())),
        ("gpt-oss.rope.scaling.factor", Meta::F32(4.0)),
    ];
    assert_eq!(rope(&with(gpt_oss(), none).unwrap()).scaling, RopeScaling::Default);
    for key in ["yarn_ext_factor", "yarn_attn_factor", "attn_factor"] {
        let key = format!("gpt-oss.rope.scaling.{key}");
        let mut entries = yarn();
        entries.push((&key, Meta::F32(0.5)));
        let error = with(gpt_oss(), entries).unwrap_err();
        assert!(error.contains(&format!("`{key}`: expected 1, or no such key, got 0.5")), "{error}");
    }
}

fn deepseek() -> Writer {
    let mut file = file("deepseek2");
    for (key, value) in [
        ("attention.kv_lora_rank", 8),
        ("rope.dimension_count", 4),
        ("expert_shared_count", 1),
        ("leading_dense_block_count", 1),
    ] {
        file.put(&format!("deepseek2.{key}"), Meta::U32(value));
    }
    file
}

/// One name is for DeepSeek-V2, whose scores are a softmax, and for DeepSeek-V3 and GLM-4.7-Flash, whose scores are
/// sigmoids with a bias. Published files of the last one do not say which.
#[test]
fn scores_of_experts_are_those_of_the_file() {
    let biased = || {
        let mut file = deepseek();
        file.tensors.push(tensor("blk.1.exp_probs_b.bias", &[2], F32));
        file
    };
    let key = "deepseek2.expert_gating_func";
    let family = |file: Writer, gating: Option<u32>| -> Result<String, String> {
        let config = with(file, gating.map(|gating| (key, Meta::U32(gating))).into_iter().collect())?;
        Ok(config.string(&["model_type"]).unwrap().to_string())
    };
    for (file, gating, expected) in [
        (deepseek(), None, "deepseek_v2"),
        (deepseek(), Some(1), "deepseek_v2"),
        (deepseek(), Some(2), "deepseek_v3"),
        (biased(), None, "deepseek_v3"),
        (biased(), Some(0), "deepseek_v3"),
        (biased(), Some(2), "deepseek_v3"),
    ] {
        assert_eq!(family(file, gating).as_deref(), Ok(expected), "{gating:?}");
    }
    let softmax = family(biased(), Some(1)).unwrap_err();
    assert!(softmax.contains("a bias of the scores (`exp_probs_b`) with a softmax"), "{softmax}");
    let unknown = family(deepseek(), Some(77)).unwrap_err();
    assert!(unknown.contains("expected 1 (softmax) or 2 (sigmoid), got 77"), "{unknown}");
    let glm = with(file("glm4moe"), vec![("glm4moe.expert_gating_func", Meta::U32(1))]).unwrap_err();
    assert!(glm.contains("`glm4moe.expert_gating_func`: expected 2 (sigmoid), got 1"), "{glm}");
}

/// Weights of experts are neither normalised nor scaled unless the file says so, as in llama.cpp.
#[test]
fn weights_of_experts_are_those_of_the_file() {
    let glm = || file("glm4moe");
    for (make, name) in [(&deepseek as &dyn Fn() -> Writer, "deepseek2"), (&glm, "glm4moe")] {
        let [norm, scale] = ["norm", "scale"].map(|key| format!("{name}.expert_weights_{key}"));
        let read = |entries: Vec<(&str, Meta)>| {
            let config = with(make(), entries).unwrap();
            let scale = config.float(&["routed_scaling_factor"]).unwrap();
            (config.bool_or(&["norm_topk_prob"], true).unwrap(), scale)
        };
        assert_eq!(read(vec![]), (false, 1.0), "{name}");
        assert_eq!(read(vec![(&scale, Meta::F32(0.0))]), (false, 1.0), "{name}");
        assert_eq!(read(vec![(&norm, Meta::Bool(true)), (&scale, Meta::F32(2.5))]), (true, 2.5), "{name}");
    }
    let mut file = gpt_oss();
    file.metadata.retain(|(key, _)| !key.ends_with("sliding_window"));
    let lacks = with(file, vec![]).unwrap_err();
    assert!(lacks.contains("it has no `gpt-oss.attention.sliding_window`"), "{lacks}");
}

#[test]
fn experts_have_biases_and_may_share_a_tensor() {
    let mut file = gpt_oss();
    let bias = tensor("blk.1.ffn_down_exps.bias", &[2, 32], F32);
    file.tensors.push(bias);
    file.tensors.push(tensor("blk.1.ffn_gate_up_exps.weight", &[2, 64, 32], Q8_0));
    file.tensors.push(tensor("blk.1.attn_sinks.weight", &[2], F32));
    let checkpoint = opened(&file).unwrap();
    let experts = |name: &str| format!("model.layers.1.mlp.experts.{name}");
    let floats = |name: &str| checkpoint.tensors.tensor(name).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(floats(&experts("1.down_proj.bias"))[0], 32.0);
    assert_eq!(floats("model.layers.1.self_attn.sinks"), [0.0, 1.0]);
    // A block of 32 columns for each row: gate of the first expert, then its up, then the second expert.
    for (name, block) in [("0.gate_proj", 0), ("0.up_proj", 32), ("1.gate_proj", 64), ("1.up_proj", 96)] {
        let matrix = checkpoint.tensors.tensor(&experts(&format!("{name}.weight"))).unwrap();
        assert_eq!(matrix.dims(), [32, 34]);
        assert_eq!(matrix.to_vec2::<u8>().unwrap()[0][2], block, "{name}");
    }
    let wrong = |name: &str, shape: &[usize]| {
        let mut file = gpt_oss();
        file.tensors.push(tensor(name, shape, F32));
        opened(&file).err().unwrap()
    };
    let bias = wrong("blk.0.ffn_up_exps.bias", &[2, 1, 32]);
    assert!(bias.contains("`blk.0.ffn_up_exps.bias`: expected [experts, rows], got [2, 1, 32]"), "{bias}");
    let odd = wrong("blk.0.ffn_gate_up_exps.weight", &[2, 5, 32]);
    assert!(odd.contains("expected rows of 2 matrices, as many of each, got [2, 5, 32]"), "{odd}");
}

#[test]
fn linear_attention_has_its_sizes_and_its_values() {
    let mut file = qwen35();
    let mut floats = |name: &str, shape: &[usize], values: &[f32]| {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        file.tensors.push(Tensor { name: name.into(), shape: shape.to_vec(), kind: F32, bytes });
    };
    floats("blk.0.ssm_a", &[4], &[-1.0, -0.5, -2.0, -1.0]);
    floats("blk.0.ssm_dt.bias", &[4], &[1.0, 2.0, 3.0, 4.0]);
    floats("blk.0.ssm_conv1d.weight", &[2, 4], &[0.0; 8]);
    floats("blk.0.attn_norm.weight", &[2], &[1.5, 0.75]);
    floats("blk.0.ssm_norm.weight", &[2], &[1.5, 0.75]);
    floats("blk.0.ffn_gate_inp_shexp.weight", &[2], &[1.0, 2.0]);
    floats("blk.1.ssm_a", &[4], &[-1.0, 0.0, -1.0, -1.0]);
    let checkpoint = opened(&file).unwrap();
    let config = &checkpoint.config;
    let size = |key: &str| config.size(&[key], 0..=1000).unwrap();
    assert_eq!(config.opt_string(&["model_type"]).unwrap(), Some("qwen3_5_moe_text"));
    assert_eq!((size("linear_num_key_heads"), size("linear_num_value_heads")), (2, 4));
    assert_eq!((size("linear_key_head_dim"), size("linear_value_head_dim")), (3, 5));
    assert!(config.bool_or(&["linear_value_heads_in_turns"], false).unwrap());
    let read = |name: &str| {
        let tensors = checkpoint.tensors.var_builder(DType::F32, &Device::Cpu);
        let shape = checkpoint.tensors.info(name).unwrap().shape;
        tensors.get(shape, name).and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
    };
    let layer = |name: &str| read(&format!("model.layers.0.{name}")).unwrap();
    assert_eq!(layer("linear_attn.A_log"), [0.0, 0.5f32.ln(), 2f32.ln(), 0.0]);
    assert_eq!(layer("linear_attn.dt_bias"), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(layer("input_layernorm.weight"), [0.5, -0.25]);
    assert_eq!(layer("linear_attn.norm.weight"), [1.5, 0.75]);
    let shape = |name: &str| checkpoint.tensors.info(&format!("model.layers.0.{name}.weight")).unwrap().shape;
    assert_eq!((shape("linear_attn.conv1d"), shape("mlp.shared_expert_gate")), (&[2, 1, 4][..], &[1, 2][..]));
    let undefined = read("model.layers.1.linear_attn.A_log").unwrap_err().to_string();
    assert!(undefined.contains("expected -exp(A_log), numbers below 0, got 0"), "{undefined}");
}

#[test]
fn sizes_of_linear_attention_are_checked() {
    let config = with(qwen35(), vec![]).unwrap();
    assert!(!config.has("layer_types"), "every fourth layer is the family's default");
    let listed = Meta::Bools(vec![true, false, false]);
    let listed = with(qwen35(), vec![("qwen35moe.attention.recurrent_layers", listed)]).unwrap();
    assert_eq!(
        layer_types(&listed),
        ["linear_attention", "full_attention"],
        "layers that predict are listed, too"
    );
    let number = with(qwen35(), vec![("qwen35moe.attention.recurrent_layers", Meta::U32(4))]).unwrap_err();
    assert!(number.contains("a list, with a truth value for each layer"), "{number}");
    let uneven = with(qwen35(), vec![("qwen35moe.ssm.inner_size", Meta::U32(21))]).unwrap_err();
    assert!(uneven.contains("expected a multiple of the value heads, 4"), "{uneven}");
    let lacks = opened(&file("qwen35moe")).err().unwrap();
    assert!(lacks.contains("it has no `qwen35moe.ssm.conv_kernel`"), "{lacks}");
    // A share that a product rounds down would leave no dimension.
    let sizes = [
        ("qwen35moe.attention.key_length", Meta::U32(49)),
        ("qwen35moe.attention.value_length", Meta::U32(49)),
        ("qwen35moe.rope.dimension_count", Meta::U32(1)),
    ];
    let config = with(qwen35(), sizes.into()).unwrap();
    let share = config.float(&["partial_rotary_factor"]).unwrap();
    assert_eq!((49.0 * share) as usize, 1);
}

/// The end of a message is no end of an answer in harmony's format.
#[test]
fn answers_end_where_their_format_says() {
    let ends = |tokens: &[&str]| {
        let mut file = gpt_oss();
        file.put("tokenizer.ggml.tokens", Meta::Texts(tokens.iter().map(|t| (*t).to_string()).collect()));
        file.put("tokenizer.ggml.token_type", Meta::I32s(vec![3; tokens.len()]));
        file.put("tokenizer.ggml.eos_token_id", Meta::U32(0));
        opened(&file).unwrap().eos_token_ids().unwrap()
    };
    assert_eq!(ends(&["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "<|message|>"]), [0, 2, 3]);
    assert_eq!(ends(&["<|endoftext|>", "<|end|>", "<|start|>"]), [0, 1]);
}

/// Numbers may have any type, values may be listed for each layer, and tensors may begin at other multiples.
#[test]
fn metadata_may_have_other_types() {
    for alignment in [8, 64, 4096] {
        let mut file = gpt_oss();
        let replace = |file: &mut Writer, key: &str, value: Meta| {
            file.metadata.retain(|(other, _)| other != key);
            file.put(key, value);
        };
        replace(&mut file, "gpt-oss.block_count", Meta::U8(2));
        replace(&mut file, "gpt-oss.embedding_length", Meta::U64(32));
        replace(&mut file, "gpt-oss.attention.head_count", Meta::I32(2));
        replace(&mut file, "gpt-oss.attention.head_count_kv", Meta::I32s(vec![1, 1]));
        replace(&mut file, "gpt-oss.expert_feed_forward_length", Meta::I32s(vec![32, 32]));
        replace(&mut file, "general.alignment", Meta::U32(alignment));
        file.tensors.push(tensor("blk.0.attn_norm.weight", &[32], F32));
        let dir = tempfile::tempdir().unwrap();
        let path = save(&dir, &file.aligned(alignment as usize));
        let checkpoint = Checkpoint::open(path).unwrap();
        let size = |key: &str| checkpoint.config.size(&[key], 0..=1000).unwrap();
        let sizes =
            ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"].map(size);
        assert_eq!((sizes, size("intermediate_size")), ([2, 32, 2, 1], 32));
        let norm = checkpoint.tensors.tensor("model.layers.0.input_layernorm.weight").unwrap();
        assert_eq!(norm.to_vec1::<f32>().unwrap()[31], 31.0);
    }
}

/// As many key heads as query heads, where a file does not count them.
#[test]
fn what_a_file_may_leave_out_has_the_values_of_its_writer() {
    let mut file = gpt_oss();
    file.metadata.retain(|(key, _)| !key.ends_with("head_count_kv") && !key.ends_with("_length"));
    file.put("gpt-oss.embedding_length", Meta::U32(32));
    file.put("gpt-oss.context_length", Meta::U32(64));
    file.put("gpt-oss.expert_feed_forward_length", Meta::U32(32));
    let config = opened(&file).unwrap().config;
    let sizes = ["num_key_value_heads", "head_dim"].map(|key| config.size(&[key], 0..=99).unwrap());
    assert_eq!(sizes, [2, 16]);
    assert_eq!(config.object()["rope_theta"], json!(10000.0));
}

/// Every type of tensors that files in use have is read: 256 columns of a row, in elements or in bytes of blocks.
#[test]
fn every_type_is_read() {
    const NAMES: [&str; 16] = [
        "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS",
        "MXFP4", "BF16", "F16", "F32",
    ];
    let floats = [("F32", 0, 4), ("F16", 1, 2), ("BF16", 30, 2)];
    for name in NAMES {
        let block = GgmlType::all().find(|ggml| ggml.name() == name);
        let float = floats.iter().find(|(other, ..)| *other == name);
        let (kind, row_bytes) = match (block, float) {
            (Some(ggml), _) => (ggml.id(), 256 / ggml.columns() * ggml.bytes()),
            (None, Some((_, kind, size))) => (*kind, 256 * size),
            (None, None) => panic!("{name} is not read"),
        };
        let mut file = gpt_oss();
        let tensor = "blk.0.ffn_up_exps.weight".to_string();
        file.tensors.push(Tensor {
            name: tensor,
            shape: vec![2, 3, 256],
            kind,
            bytes: vec![0; 6 * row_bytes],
        });
        let checkpoint = opened(&file).unwrap();
        let module = "model.layers.0.mlp.experts.1.up_proj";
        let shape = checkpoint.tensors.info(&format!("{module}.weight")).unwrap().shape;
        assert_eq!(shape, [3, if block.is_some() { row_bytes } else { 256 }], "{name}");
        let scheme = checkpoint.quantisation.unwrap().scheme_of(module).unwrap();
        assert_eq!(scheme == QuantScheme::NONE, block.is_none(), "{name}");
    }
}
