//! Tests of the table: the family of a config, and the error for a config of no family.

use std::collections::HashSet;
use std::path::Path;

use model_runtime::Config;
use moe_engine::{AttentionSpec, Families, MemoryPlan, ModelFamily, WeightForms};

use crate::{ALL, EMBEDDED, TABLE, deepseek_v2, deepseek_v3, only, qwen3_moe};

fn config(text: &str) -> Config {
    Config::parse(text, "config.json").unwrap()
}

fn refused(families: Families, text: &str) -> String {
    families.parse(&config(text)).map(drop).unwrap_err().to_string()
}

#[test]
fn every_row_has_names_of_its_own() {
    assert_eq!(TABLE.iter().map(|row| row.model_type).collect::<HashSet<_>>().len(), TABLE.len());
    // A network that is published under two types has one name in `architectures`, which means the first row.
    let own_name = |row: &&ModelFamily| row.model_type != deepseek_v3::KIMI_K2.model_type;
    let architectures: Vec<_> = TABLE.iter().filter(own_name).map(|row| row.architecture).collect();
    assert_eq!(architectures.iter().collect::<HashSet<_>>().len(), architectures.len());
    assert!(TABLE.iter().all(|row| row.example.split('/').count() == 2));
    ALL.parse(&config(EMBEDDED.config)).unwrap();
}

#[test]
fn the_model_type_decides_and_without_it_the_architecture() {
    let grouped = |text| matches!(ALL.parse(&config(text)).unwrap().attention(), AttentionSpec::Layers(_));
    assert!(grouped(r#"{"model_type": "qwen3_moe"}"#));
    assert!(grouped(r#"{"model_type": "qwen3_moe", "architectures": ["DeepseekV2ForCausalLM"]}"#));
    assert!(grouped(r#"{"architectures": ["Other", "Qwen3MoeForCausalLM"]}"#));
    assert!(grouped(r#"{"architectures": ["MixtralForCausalLM"]}"#));
    assert!(grouped(r#"{"model_type": "olmoe"}"#));
    assert!(!grouped(r#"{"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}"#));
    assert!(!grouped(r#"{"model_type": "deepseek_v2", "num_experts_per_tok": 6}"#));
}

/// The `model_type`s of the table, as errors list them.
fn listed() -> String {
    TABLE.iter().map(|row| format!("{:?}", row.model_type)).collect::<Vec<_>>().join(", ")
}

#[test]
fn what_is_unknown_is_refused_with_what_is_known() {
    assert_eq!(
        refused(ALL, r#"{"model_type": "llama", "architectures": ["Qwen3MoeForCausalLM"]}"#),
        format!(
            "config.json: model_type \"llama\" is not supported; this program runs model_type {}",
            listed()
        )
    );
    for (unknown, near) in [
        ("qwen3_vl_moe", "\"qwen3_moe\" (Qwen/Qwen3-30B-A3B)"),
        ("deepseek_v32", "\"deepseek_v3\""),
        ("glm4v_moe", "\"glm4_moe\""),
    ] {
        let error = refused(ALL, &format!(r#"{{"model_type": "{unknown}"}}"#));
        let expected =
            format!("model_type \"{unknown}\" is not supported; the nearest one by name is {near}");
        assert!(error.contains(&expected) && error.ends_with(&listed()), "{error}");
    }
    for text in ["{}", r#"{"architectures": ["LlamaForCausalLM"]}"#] {
        let error = refused(ALL, text);
        assert!(error.contains("`model_type`") && error.contains(&(listed() + ", got nothing")), "{error}");
    }
    assert!(refused(ALL, r#"{"architectures": 7}"#).contains("a list of strings"));
}

#[test]
fn a_program_of_one_family_names_the_one_that_runs_all() {
    let error = refused(only(&deepseek_v2::FAMILY), r#"{"model_type": "qwen3_moe"}"#);
    let runs = format!("this program runs model_type \"deepseek_v2\"; the program `moe` runs {}", listed());
    assert_eq!(error, format!("config.json: model_type \"qwen3_moe\" is not supported; {runs}"));
    let error = refused(only(&qwen3_moe::FAMILY), r#"{"architectures": ["DeepseekV2ForCausalLM"]}"#);
    assert!(error.contains("got nothing") && error.contains("`moe` runs"), "{error}");
}

/// The program's tests run these fixtures, one for each family.
#[test]
fn every_family_has_a_fixture_with_text() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let fixtures = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let texts = fixtures.filter(|dir| dir.join("text_case.json").is_file());
    let configs: Vec<Config> = texts.map(|dir| Config::read(&dir.join("config.json")).unwrap()).collect();
    let types: HashSet<&str> = configs.iter().map(|config| config.string(&["model_type"]).unwrap()).collect();
    assert_eq!(types, TABLE.iter().map(|row| row.model_type).collect());
}

/// The published models in the table of docs/models.md: the name on the hub, and the config in this repository.
const PUBLISHED: [(&str, &str); 16] = [
    ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b-fp8-block"),
    ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-v2-lite"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
    ("moonshotai/Moonlight-16B-A3B", "moonlight-16b-a3b"),
    ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
    ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
    ("zai-org/GLM-4.5", "glm-4.5"),
    ("zai-org/GLM-4.7-Flash", "glm-4.7-flash"),
    ("MiniMaxAI/MiniMax-M2", "minimax-m2"),
    ("baidu/ERNIE-4.5-21B-A3B-PT", "ernie-4.5-21b-a3b"),
    ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen1.5-moe-a2.7b"),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
    ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
];

/// The memory in docs/models.md must be the memory that the program plans for each model.
#[test]
fn the_documented_memory_is_that_of_the_plan() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = std::fs::read_to_string(root.join("docs/models.md")).unwrap();
    let gib = |bytes: u64| format!("{:.1}", bytes as f64 / (1u64 << 30) as f64);
    let mut wrong = Vec::new();
    for (name, file) in PUBLISHED {
        let config = Config::read(&root.join(format!("tests/bench/configs/{file}.json"))).unwrap();
        let model = ALL.parse(&config).unwrap();
        let forms = WeightForms::of(model.as_ref(), &config).unwrap();
        let token = MemoryPlan::of(model.as_ref(), &config, None).unwrap().cache_of_token;
        let cache = (token * 1000) as f64 / (1u64 << 20) as f64;
        let row = format!(
            "--model {name}` | {} | {} | {} | {cache:.0} |",
            gib(forms.bf16),
            gib(forms.fp8),
            gib(forms.int4)
        );
        if !docs.contains(&row) {
            wrong.push(row);
        }
    }
    assert!(wrong.is_empty(), "docs/models.md lacks these rows:\n{}", wrong.join("\n"));
}
