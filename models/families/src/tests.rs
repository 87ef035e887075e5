//! The table: which family a config belongs to, and what is said of one that belongs to none.

use std::collections::HashSet;
use std::path::Path;

use model_runtime::Config;
use moe_engine::{AttentionSpec, Families, ModelFamily};

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
    // A network that is published under two types has one name in `architectures`, which stands for the first row.
    let own_name = |row: &&ModelFamily| row.model_type != deepseek_v3::KIMI_K2.model_type;
    let architectures: Vec<_> = TABLE.iter().filter(own_name).map(|row| row.architecture).collect();
    assert_eq!(architectures.iter().collect::<HashSet<_>>().len(), architectures.len());
    assert!(TABLE.iter().all(|row| row.example.split('/').count() == 2));
    ALL.parse(&config(EMBEDDED.config)).unwrap();
}

#[test]
fn the_model_type_decides_and_without_it_the_architecture() {
    let grouped =
        |text| matches!(ALL.parse(&config(text)).unwrap().attention(), AttentionSpec::GroupedQuery(_));
    assert!(grouped(r#"{"model_type": "qwen3_moe"}"#));
    assert!(grouped(r#"{"model_type": "qwen3_moe", "architectures": ["DeepseekV2ForCausalLM"]}"#));
    assert!(grouped(r#"{"architectures": ["Other", "Qwen3MoeForCausalLM"]}"#));
    assert!(grouped(r#"{"architectures": ["MixtralForCausalLM"]}"#));
    assert!(grouped(r#"{"model_type": "olmoe"}"#));
    assert!(!grouped(r#"{"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}"#));
    assert!(!grouped(r#"{"model_type": "deepseek_v2", "num_experts_per_tok": 6}"#));
}

/// The `model_type`s of the table as errors list them.
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

/// The program's tests run these fixtures, one of each family.
#[test]
fn every_family_has_a_fixture_with_text() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let fixtures = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let texts = fixtures.filter(|dir| dir.join("text_case.json").is_file());
    let configs: Vec<Config> = texts.map(|dir| Config::read(&dir.join("config.json")).unwrap()).collect();
    let types: HashSet<&str> = configs.iter().map(|config| config.string(&["model_type"]).unwrap()).collect();
    assert_eq!(types, TABLE.iter().map(|row| row.model_type).collect());
}
