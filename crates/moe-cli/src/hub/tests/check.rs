//! Tests of the check of the cache.

use std::fs;

use super::{Case, Trust};
use crate::hub::check::check;
use crate::hub::name::ModelName;

#[test]
fn missing_and_damaged_files_are_named() {
    let case = Case::new("sharded");
    let name = ModelName::parse("org/tiny").unwrap();
    let error = check(&name, &case.settings).unwrap_err().to_string();
    assert!(error.contains("run `download org/tiny@main`"), "{error}");
    let dir = case.get("org/tiny").unwrap();
    let report = check(&name, &case.settings).unwrap();
    assert_eq!((report.dir, report.faults, report.files), (dir.clone(), vec![], 5));

    let [first, second] = [1, 2].map(|i| format!("model-0000{i}-of-00003.safetensors"));
    let blob = fs::canonicalize(dir.join(&first)).unwrap();
    let mut bytes = fs::read(&blob).unwrap();
    bytes[100] ^= 1;
    fs::write(&blob, bytes).unwrap();
    fs::remove_file(fs::canonicalize(dir.join(&second)).unwrap()).unwrap();
    let faults = check(&name, &case.settings).unwrap().faults;
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].contains(&first) && faults[0].contains("damaged: expected SHA-256"), "{faults:?}");
    assert!(faults[0].contains(blob.to_str().unwrap()), "{faults:?}");
    assert!(faults[1].starts_with(&format!("{second}: missing")), "{faults:?}");
    // This is the remedy that the messages name.
    case.get_with("org/tiny", Trust::Verified).unwrap();
    assert!(check(&name, &case.settings).unwrap().faults.is_empty());
}

#[test]
fn a_snapshot_without_weights_is_a_fault() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    let report = check(&ModelName::parse("org/tiny").unwrap(), &case.settings).unwrap();
    assert!(report.faults[0].contains("has neither model.safetensors"), "{:?}", report.faults);
}
