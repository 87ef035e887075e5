//! Every error of a download is one line that says what to do.

use super::Case;
use super::server::Act;

fn has_all(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn what_does_not_exist_is_named() {
    let case = Case::new("text");
    has_all(&case.error("org/other"), &["no model org/other", "private (401)", "spelling", "HF_TOKEN"]);
    has_all(&case.error("org/tiny@v9"), &["no revision `v9`", "/org/tiny/tree/main"]);
    case.server.spoil("HEAD", "tokenizer.json", 1, Act::Status(404, "EntryNotFound", "Entry not found"));
    has_all(&case.error("org/tiny"), &["no file tokenizer.json", "main (404)", "another revision"]);
    case.server.remove("model.safetensors");
    has_all(&case.error("org/tiny"), &["org/tiny@main has neither model.safetensors nor"]);
    case.server.put("model.safetensors.index.json", br#"{"weight_map": {"x": "lost.safetensors"}}"#);
    has_all(&case.error("org/tiny"), &["org/tiny@main has no lost.safetensors, which", "names"]);
}

#[test]
fn access_that_lacks_is_explained() {
    let mut case = Case::new("text");
    case.server.spoil("HEAD", "config.json", 1, Act::Status(401, "GatedRepo", "Access is restricted"));
    has_all(
        &case.error("org/tiny"),
        &["org/tiny is gated (401)", "accept its conditions at http://", "set HF_TOKEN"],
    );
    case.settings.token = Some("hf_secret".into());
    case.server.spoil("HEAD", "config.json", 1, Act::Status(403, "GatedRepo", "not in the authorized list"));
    has_all(
        &case.error("org/tiny"),
        &["org/tiny is gated (403)", "accept its conditions", "the token in use"],
    );
    let invalid = Act::Status(401, "", "Invalid credentials in Authorization header");
    case.server.spoil("GET", "/api/", 1, invalid);
    let error = case.error("org/tiny");
    has_all(&error, &["not accept the token (401)", "/settings/tokens", "HF_TOKEN"]);
    assert!(!error.contains("hf_secret"));
    case.server.spoil("HEAD", "config.json", 1, Act::Status(403, "", "no read permission"));
    has_all(&case.error("org/tiny"), &["forbids", "no read permission", "read access", "/settings/tokens"]);
}

#[test]
fn no_network_and_a_busy_hub_say_so() {
    let case = Case::new("text");
    case.server.spoil("GET", "/api/", 5, Act::Status(429, "", "slow down"));
    has_all(&case.error("org/tiny"), &["too many requests (429)", "HF_TOKEN"]);
    case.server.spoil("HEAD", "config.json", 100, Act::Status(502, "", ""));
    has_all(&case.error("org/tiny"), &["status 502", "run again"]);
    case.server.heal();
    // The first request is repeated like all others.
    case.server.spoil("GET", "/api/", 4, Act::Status(503, "", ""));
    case.get("org/tiny").unwrap();
    let mut case = Case::new("text");
    case.settings.endpoint = "http://127.0.0.1:1".into();
    has_all(
        &case.error("org/tiny"),
        &["cannot get org/tiny@main from http://127.0.0.1:1", "check the connection"],
    );
    case.settings.endpoint = "http://no-such-host.invalid".into();
    has_all(&case.error("org/tiny"), &["no-such-host.invalid", "HTTPS_PROXY"]);
}

#[test]
fn an_endpoint_that_is_no_hub_is_an_error() {
    let case = Case::new("text");
    for body in ["<html>", "{}", r#"{"sha": "../..", "siblings": []}"#] {
        case.server.spoil("GET", "/api/", 1, Act::Body(body));
        has_all(&case.error("org/tiny"), &["does not answer like the hub", "HF_ENDPOINT"]);
    }
    let escape =
        r#"{"sha": "0123456789abcdef0123456789abcdef01234567", "siblings": [{"rfilename": "../x"}]}"#;
    case.server.spoil("GET", "/api/", 1, Act::Body(escape));
    has_all(&case.error("org/tiny"), &["leaves the repository", "HF_ENDPOINT"]);
    case.server.spoil("HEAD", "config.json", 1, Act::Status(302, "", ""));
    has_all(&case.error("org/tiny"), &["redirects to nowhere", "HF_ENDPOINT"]);
    case.server.spoil("HEAD", "config.json", 1, Act::Body("no hash"));
    has_all(&case.error("org/tiny"), &["no hash and size", "config.json"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_says_how_much_lacks() {
    let case = Case::new("text");
    std::fs::create_dir_all(case.folder().join("blobs")).unwrap();
    // Every write to this device fails for lack of space.
    std::os::unix::fs::symlink("/dev/full", case.partial("model.safetensors")).unwrap();
    let error = case.error("org/tiny");
    has_all(&error, &["No space left", "130.35 KiB more are needed", "HF_HUB_CACHE", "is kept"]);
    std::fs::remove_file(case.partial("model.safetensors")).unwrap();
    case.get("org/tiny").unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let mut case = Case::new("text");
    let file = case.cache.path().join("file");
    std::fs::write(&file, "").unwrap();
    case.settings.cache = file.clone();
    has_all(&case.error("org/tiny"), &[file.to_str().unwrap(), "HF_HUB_CACHE"]);
}

#[test]
fn a_malformed_name_is_a_usage_error_and_a_folder_is_itself() {
    for name in ["gpt2", "./nowhere", "a/b/c", "o/m@../x", ""] {
        let error = super::super::resolve(name).unwrap_err();
        assert!(crate::error::is_usage(&error));
        has_all(&error.to_string(), &["--model", name, "expected"]);
    }
    let dir = super::fixture("text");
    assert_eq!(super::super::resolve(dir.to_str().unwrap()).unwrap(), dir);
}
