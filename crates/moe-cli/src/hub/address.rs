//! Parses addresses of models that were copied from a browser and are given instead of a name.

/// The hosts of the hub, in addition to HF_ENDPOINT.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

/// Returns `ORG/NAME[@REVISION]` for an address of the hub, such as `https://huggingface.co/ORG/NAME/tree/REVISION`.
/// Returns `None` if the text is not an address. `endpoint` is the address of another hub.
///
/// # Errors
/// The address is of another host, or does not name a model.
pub fn name_in(text: &str, endpoint: &str) -> Result<Option<String>, String> {
    let Some(path) = path_of(text, endpoint)? else { return Ok(None) };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let parts = path.split('/').filter(|part| !part.is_empty()).map(decode);
    let parts = parts.collect::<Option<Vec<_>>>().ok_or("expected an address without damaged escapes (%)")?;
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    match parts.as_slice() {
        ["datasets" | "spaces" | "collections" | "docs" | "papers" | "api", ..] => {
            Err("the address is not a model's; expected one such as https://huggingface.co/ORG/NAME".into())
        }
        [org, name] => Ok(Some(format!("{org}/{name}"))),
        [org, name, view, rest @ ..] => {
            let revision = revision(view, rest)?;
            Ok(Some(format!("{org}/{name}@{revision}")))
        }
        _ => Err("the address names no model; expected one such as https://huggingface.co/ORG/NAME".into()),
    }
}

/// Returns the part of the address after the host.
fn path_of<'t>(text: &'t str, endpoint: &str) -> Result<Option<&'t str>, String> {
    let rest_after = |start: &str| text.strip_prefix(start).filter(|rest| rest.starts_with('/'));
    if let Some(path) = rest_after(endpoint) {
        return Ok(Some(path));
    }
    let address = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let (host, path) = address.unwrap_or(text).split_once('/').unwrap_or_default();
    match (HOSTS.iter().any(|known| host.eq_ignore_ascii_case(known)), address) {
        (true, _) => Ok(Some(path)),
        (false, None) => Ok(None),
        (false, Some(_)) => Err(format!(
            "expected an address of https://huggingface.co or of HF_ENDPOINT, which is {endpoint}"
        )),
    }
}

/// Returns the revision in a view of a repository. An address of a file in the root stands for the repository. An
/// address of a file in a folder does not.
fn revision(view: &str, rest: &[&str]) -> Result<String, String> {
    if !["tree", "blob", "resolve", "raw", "commit", "commits"].contains(&view) {
        return Err(format!(
            "the address is that of a repository's /{view}; expected the repository's own address, or /tree/REVISION"
        ));
    }
    let (revision, file) = match rest {
        [] => return Ok("main".into()),
        ["refs", kind, name, file @ ..] => (format!("refs/{kind}/{name}"), file),
        [revision, file @ ..] => (revision.to_string(), file),
    };
    let most = usize::from(matches!(view, "blob" | "resolve" | "raw"));
    match file.len() > most {
        true => Err(format!(
            "the address is of {} in the repository; expected a checkpoint in the repository's root",
            file.join("/")
        )),
        false => Ok(revision),
    }
}

/// Decodes percent-encoding.
fn decode(part: &str) -> Option<String> {
    let mut pieces = part.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        bytes.push(u8::from_str_radix(piece.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIRROR: &str = "http://mirror:8080/hf";

    #[test]
    fn addresses_are_names() {
        for (address, name) in [
            ("https://huggingface.co/Org/Name", "Org/Name"),
            ("http://huggingface.co/Org/Name/", "Org/Name"),
            ("huggingface.co/Org/Name", "Org/Name"),
            ("hf.co/Org/Name", "Org/Name"),
            ("https://HF.co/Org/Name?library=transformers#usage", "Org/Name"),
            ("https://huggingface.co/Org/Name@v1", "Org/Name@v1"),
            ("https://huggingface.co/Org/Name/tree/main", "Org/Name@main"),
            ("https://huggingface.co/Org/Name/tree", "Org/Name@main"),
            ("https://huggingface.co/Org/Name/tree/refs%2Fpr%2F3", "Org/Name@refs/pr/3"),
            ("https://huggingface.co/Org/Name/tree/refs/pr/3", "Org/Name@refs/pr/3"),
            ("https://huggingface.co/Org/Name/commit/0a0a", "Org/Name@0a0a"),
            ("https://huggingface.co/Org/Name/blob/v1.0/config.json", "Org/Name@v1.0"),
            ("https://huggingface.co/Org/Name/resolve/v2/model.safetensors?download=true", "Org/Name@v2"),
            ("http://mirror:8080/hf/Org/Name/tree/dev", "Org/Name@dev"),
        ] {
            assert_eq!(name_in(address, MIRROR), Ok(Some(name.to_string())), "{address}");
        }
        for text in ["Org/Name", "Org/Name@v1", "./folder", "/folder", "a/b/c", "hf.co", ""] {
            assert_eq!(name_in(text, MIRROR), Ok(None), "{text}");
        }
    }

    #[test]
    fn what_is_no_model_is_named() {
        for (address, word) in [
            ("https://example.com/Org/Name", "HF_ENDPOINT"),
            ("https://huggingface.co/datasets/Org/Name", "not a model's"),
            ("https://huggingface.co/Org", "no model"),
            ("https://huggingface.co/Org/Name/discussions/3", "/discussions"),
            ("https://huggingface.co/Org/Name/tree/main/onnx", "onnx in the repository"),
            ("https://huggingface.co/Org/Name/resolve/main/fp16/model.safetensors", "fp16/model.safetensors"),
            ("https://huggingface.co/Org/Na%2", "escapes"),
        ] {
            let error = name_in(address, MIRROR).unwrap_err();
            assert!(error.contains(word) && error.contains("expected"), "{address}: {error}");
        }
    }
}
