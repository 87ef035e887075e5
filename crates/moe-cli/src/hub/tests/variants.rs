//! Tests of the quantised variants that the hub lists.

use super::server::Act;
use super::{Case, fixture};
use crate::hub::name::ModelName;
use crate::hub::{Trust, Variant, locate_on_hub};

fn variants(case: &Case) -> anyhow::Result<Vec<Variant>> {
    let name = ModelName::parse("org/tiny").unwrap();
    locate_on_hub(name, case.settings.clone(), Trust::Present)?.variants()
}

#[test]
fn variants_are_listed_with_their_configs() {
    let case = Case::new("text");
    let list =
        r#"[{"id": "org/int4", "downloads": 5}, {"id": "org/tiny"}, {"id": "org/gone"}, {"id": "a/../b"}]"#;
    case.server.spoil("GET", "/api/models?", 1, Act::Body(list));
    let config = r#"{"model_type": "any", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}"#;
    case.server.spoil("GET", "/org/int4/resolve/main/config.json", 1, Act::Body(config));
    let variants = variants(&case).unwrap();
    let ids: Vec<&str> = variants.iter().map(|variant| variant.id.as_str()).collect();
    assert_eq!(ids, ["org/int4", "org/gone", "a/../b"], "not the model itself");
    let config = variants[0].config.as_ref().unwrap();
    assert_eq!(config.quantisation().unwrap().unwrap().method(), "gptq");
    assert!(variants[1].config.as_ref().unwrap_err().contains("org/gone"));
    assert!(variants[2].config.as_ref().unwrap_err().contains("not a name on the hub"));
    let seen = case.server.seen();
    let asked = seen.iter().find(|request| request.path.starts_with("/api/models?")).unwrap();
    assert!(
        asked.path.contains("filter=base_model%3Aquantized%3Aorg%2Ftiny&sort=downloads"),
        "{}",
        asked.path
    );
    assert!(
        seen.iter().all(|request| !request.path.contains("a/../b") && !request.path.contains("safetensors"))
    );
}

#[test]
fn a_hub_without_such_a_list_is_an_error_and_a_folder_has_none() {
    let case = Case::new("text");
    for body in ["<html>", "{}", r#"[{"name": "x"}]"#] {
        case.server.spoil("GET", "/api/models?", 1, Act::Body(body));
        let error = variants(&case).err().unwrap().to_string();
        assert!(error.contains("its list of models is not valid"), "{error}");
    }
    let folder = crate::hub::locate(fixture("text").to_str().unwrap()).unwrap();
    assert!(folder.variants().unwrap().is_empty());
}
