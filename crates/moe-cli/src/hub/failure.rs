//! The reasons why a request to the hub failed, and what a user can do about them.

use crate::hub::env::Settings;
use crate::hub::name::ModelName;

/// Why a request did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// There was no answer or an incomplete one, or the server is busy. Another attempt may succeed.
    Transient(String),
    /// The hub refused the request.
    Refused(Refusal),
    /// Another attempt would fail in the same way.
    Fatal(anyhow::Error),
}

/// An answer of the hub with an error status.
#[derive(Debug)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The header `X-Error-Code`, which distinguishes causes with the same status.
    pub code: Option<String>,
    /// The header `X-Error-Message`.
    pub message: Option<String>,
}

impl Failure {
    /// Returns the error for the user. `file` is `None` if the request was about the repository itself.
    pub fn explain(self, name: &ModelName, file: Option<&str>, settings: &Settings) -> anyhow::Error {
        let endpoint = &settings.endpoint;
        match self {
            Self::Transient(reason) => anyhow::anyhow!(
                "cannot get {name} from {endpoint}: {reason}; check the connection (a proxy is named by \
                 HTTPS_PROXY) and run again: what is downloaded is kept"
            ),
            Self::Refused(refusal) => anyhow::anyhow!(refusal.explain(name, file, settings)),
            Self::Fatal(error) => error,
        }
    }
}

impl Refusal {
    fn explain(&self, name: &ModelName, file: Option<&str>, settings: &Settings) -> String {
        let ModelName { id, revision, .. } = name;
        let endpoint = &settings.endpoint;
        let status = self.status;
        let tokens = format!("{endpoint}/settings/tokens");
        let says = self.message.as_deref().map(|m| format!(" (\"{m}\")")).unwrap_or_default();
        let give_token = match settings.token {
            Some(_) => "the token in use must belong to an account with access",
            None => "set HF_TOKEN to a token of an account with access",
        };
        let invalid = self.message.as_deref().is_some_and(|m| m.contains("Invalid credentials"));
        match (self.code.as_deref(), status, file) {
            (Some("GatedRepo"), ..) => {
                format!("{id} is gated ({status}): accept its conditions at {endpoint}/{id}; {give_token}")
            }
            (Some("RevisionNotFound"), ..) => format!(
                "{id} has no revision `{revision}`: its branches and tags are at {endpoint}/{id}/tree/main"
            ),
            (Some("EntryNotFound"), _, Some(file)) | (None, 404, Some(file)) => {
                format!("{id} has no file {file} at revision {revision} (404): choose another revision")
            }
            (None, 401, _) if invalid => format!(
                "the hub does not accept the token (401): make one at {tokens} and set HF_TOKEN, or unset it"
            ),
            (Some("RepoNotFound"), ..) | (None, 401 | 404, _) => format!(
                "there is no model {id} at {endpoint}, or it is private ({status}): check the spelling (a folder \
                 of that name does not exist either); for a private model {give_token}"
            ),
            (_, 403, _) => format!(
                "the hub forbids access to {id} (403){says}: give the token read access to it at {tokens}"
            ),
            _ => format!(
                "the hub refuses {id} with status {status}{says}: is {endpoint} the right HF_ENDPOINT?"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(status: u16, code: Option<&str>, message: Option<&str>, file: Option<&str>) -> String {
        let settings = Settings {
            endpoint: "https://hub".into(),
            cache: "/c".into(),
            token: None,
            offline: false,
            timeout: std::time::Duration::from_secs(1),
            backoff: std::time::Duration::ZERO,
        };
        let name = ModelName::parse("o/m@v1").unwrap();
        let code = code.map(str::to_string);
        let message = message.map(str::to_string);
        Failure::Refused(Refusal { status, code, message }).explain(&name, file, &settings).to_string()
    }

    #[test]
    fn every_cause_says_what_to_do() {
        let invalid = Some("Invalid credentials in Authorization header");
        for (text, words) in [
            (
                says(401, Some("GatedRepo"), None, Some("config.json")),
                ["gated", "https://hub/o/m", "HF_TOKEN"],
            ),
            (says(401, Some("RepoNotFound"), None, None), ["no model o/m", "private", "HF_TOKEN"]),
            (says(401, None, None, None), ["no model o/m", "private", "HF_TOKEN"]),
            (says(401, None, invalid, None), ["not accept the token", "settings/tokens", "HF_TOKEN"]),
            (says(403, None, Some("read only"), None), ["forbids", "read only", "settings/tokens"]),
            (says(404, Some("RevisionNotFound"), None, None), ["no revision `v1`", "o/m", "tree/main"]),
            (
                says(404, Some("EntryNotFound"), None, Some("x.json")),
                ["no file x.json", "v1", "another revision"],
            ),
            (says(404, None, None, Some("x.json")), ["no file x.json", "404", "another revision"]),
            (says(410, None, Some("gone"), None), ["410", "gone", "HF_ENDPOINT"]),
        ] {
            assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
        }
    }
}
