//! Tests of `download` with a damaged cache.

use std::fs;

use super::server::{Act, COMMIT, Request};
use super::{Case, Trust, fixture};

const WEIGHTS: &str = "model.safetensors";

/// Returns the number of requests for the contents of files. Other requests go to the API or get a redirect.
fn bodies(seen: &[Request]) -> usize {
    seen.iter()
        .filter(|r| r.method == "GET" && !r.path.starts_with("/api/") && !r.path.contains("/resolve/"))
        .count()
}

#[test]
fn a_truncated_or_damaged_file_is_replaced_and_no_other() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    let whole = fs::read(fixture("text").join(WEIGHTS)).unwrap();
    let mut flipped = whole.clone();
    flipped[100_000] ^= 1;
    for damaged in [&whole[..5000], &flipped, b""] {
        for name in ["org/tiny".to_string(), format!("org/tiny@{COMMIT}")] {
            fs::write(dir.join(WEIGHTS), damaged).unwrap();
            case.server.seen();
            assert_eq!(case.get_with(&name, Trust::Verified).unwrap(), dir);
            assert_eq!(fs::read(dir.join(WEIGHTS)).unwrap(), whole);
            assert_eq!(bodies(&case.server.seen()), 1, "{name}");
        }
    }
    fs::write(dir.join("config.json"), b"{}").unwrap();
    case.get_with("org/tiny", Trust::Verified).unwrap();
    assert_eq!(
        fs::read(dir.join("config.json")).unwrap(),
        fs::read(fixture("text").join("config.json")).unwrap()
    );
    case.server.seen();
    case.get_with("org/tiny", Trust::Verified).unwrap();
    assert_eq!(bodies(&case.server.seen()), 0, "all is whole");
}

#[test]
fn everything_is_downloaded_again_by_force() {
    let case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    let files = fs::read_dir(&dir).unwrap().count();
    case.server.seen();
    case.get_with("org/tiny", Trust::Nothing).unwrap();
    assert_eq!(bodies(&case.server.seen()), files);
    // A file that cannot be replaced stays.
    case.server.spoil("GET", "/storage/", 100, Act::Status(503, "", ""));
    case.get_with("org/tiny", Trust::Nothing).unwrap_err();
    assert!(dir.join(WEIGHTS).exists());
}

#[test]
fn without_the_hub_damage_is_an_error() {
    let mut case = Case::new("text");
    let dir = case.get("org/tiny").unwrap();
    case.settings.offline = true;
    assert_eq!(case.get_with("org/tiny", Trust::Verified).unwrap(), dir);
    let error = case.get_with("org/tiny", Trust::Nothing).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE") && error.contains("--force"), "{error}");
    fs::write(dir.join(WEIGHTS), b"cut").unwrap();
    let error = case.get_with("org/tiny", Trust::Verified).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: damaged: expected SHA-256"), "{error}");
}

#[test]
fn weights_of_several_unusual_names_are_whole_only_if_the_hub_says_so() {
    let case = Case::new("text");
    let pinned = format!("org/tiny@{COMMIT}");
    case.server.put("b.safetensors", &fs::read(fixture("text").join(WEIGHTS)).unwrap());
    case.server.put("a.safetensors", b"other bytes");
    case.server.remove(WEIGHTS);
    case.server.spoil("GET", "/storage/", 1, Act::Body("other bytes"));
    case.server.spoil("GET", "/storage/", 100, Act::Cut(0));
    case.get(&pinned).unwrap_err();
    case.server.heal();
    let dir = case.get(&pinned).unwrap();
    assert!(dir.join("a.safetensors").exists() && dir.join("b.safetensors").exists());
}
