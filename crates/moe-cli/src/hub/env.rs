//! The environment variables that all clients of the hub use.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use crate::error::usage;

/// The address of the hub, the user's token, and the folder of the cache.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `HF_ENDPOINT` without a slash at the end.
    pub endpoint: String,
    /// The cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in `~/.cache/huggingface`.
    pub cache: PathBuf,
    /// `HF_TOKEN`, else the contents of the token file (`HF_TOKEN_PATH`, else `token` in `HF_HOME`).
    pub token: Option<String>,
    /// `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`: whether no request may be sent to the hub.
    pub offline: bool,
    /// `HF_HUB_DOWNLOAD_TIMEOUT` in seconds: how long the hub may send nothing.
    pub timeout: Duration,
    /// The pause before the second attempt. It doubles with each attempt.
    pub backoff: Duration,
}

impl Settings {
    /// The settings of this process.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(&|name| std::env::var_os(name), std::env::home_dir())
    }

    /// Reads the settings from these variables. An empty variable counts as not set.
    fn from_vars(var: &dyn Fn(&str) -> Option<OsString>, home_dir: Option<PathBuf>) -> Result<Self> {
        let path = |names: &[&str]| {
            names.iter().find_map(|name| var(name).filter(|v| !v.is_empty())).map(PathBuf::from)
        };
        let text = |names: &[&str]| path(names).map(|value| value.to_string_lossy().trim().to_string());
        let home = path(&["HF_HOME"])
            .or_else(|| Some(path(&["XDG_CACHE_HOME"])?.join("huggingface")))
            .or_else(|| Some(home_dir?.join(".cache/huggingface")))
            .ok_or_else(|| usage("there is no home directory for the cache of models: set HF_HOME"))?;
        let read_token = |path: PathBuf| std::fs::read_to_string(path).ok();
        let token_file = || path(&["HF_TOKEN_PATH"]).unwrap_or_else(|| home.join("token"));
        let token = text(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]).or_else(|| read_token(token_file()));
        Ok(Self {
            endpoint: endpoint(text(&["HF_ENDPOINT"]))?,
            cache: path(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]).unwrap_or_else(|| home.join("hub")),
            token: checked_token(token)?,
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().any(|name| is_true(text(&[name]))),
            timeout: timeout(text(&["HF_HUB_DOWNLOAD_TIMEOUT"]))?,
            backoff: Duration::from_secs(1),
        })
    }
}

fn endpoint(value: Option<String>) -> Result<String> {
    let Some(value) = value else { return Ok("https://huggingface.co".into()) };
    let host = value.strip_prefix("https://").or_else(|| value.strip_prefix("http://"));
    if host.is_none_or(|host| host.is_empty() || host.starts_with('/')) {
        return Err(usage(format!(
            "HF_ENDPOINT={value}: expected an address such as https://huggingface.co"
        )));
    }
    Ok(value.trim_end_matches('/').to_string())
}

/// Checks a token. It is sent in a header, which cannot contain control characters. The error does not contain the
/// token.
fn checked_token(token: Option<String>) -> Result<Option<String>> {
    let token = token.map(|t| t.trim().to_string()).filter(|t| !t.is_empty());
    match &token {
        Some(t) if !t.bytes().all(|b| b.is_ascii_graphic()) => Err(usage(
            "the hub token (HF_TOKEN or the token file) holds characters that no token has; copy it again",
        )),
        _ => Ok(token),
    }
}

fn is_true(value: Option<String>) -> bool {
    value.is_some_and(|v| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

fn timeout(value: Option<String>) -> Result<Duration> {
    let Some(value) = value else { return Ok(Duration::from_secs(10)) };
    match value.parse::<u64>() {
        Ok(seconds) if (1..=86_400).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => Err(usage(format!("HF_HUB_DOWNLOAD_TIMEOUT={value}: expected whole seconds, 1 to 86400"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Result<Settings> {
        let find = |name: &str| vars.iter().find(|v| v.0 == name).map(|v| OsString::from(v.1));
        Settings::from_vars(&find, Some("/home/u".into()))
    }

    #[test]
    fn defaults_are_those_of_the_hub() {
        let s = settings(&[("HF_TOKEN", ""), ("HF_HUB_OFFLINE", "0")]).unwrap();
        assert_eq!(s.endpoint, "https://huggingface.co");
        assert_eq!(s.cache, PathBuf::from("/home/u/.cache/huggingface/hub"));
        assert_eq!((s.token, s.offline, s.timeout), (None, false, Duration::from_secs(10)));
    }

    #[test]
    fn the_more_specific_variable_wins() {
        let cache = |vars: &[(&str, &str)]| settings(vars).unwrap().cache;
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")]), PathBuf::from("/h/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
        let s = settings(&[
            ("HF_ENDPOINT", "http://mirror:8080/hf/"),
            ("TRANSFORMERS_OFFLINE", "yes"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "3"),
        ]);
        let s = s.unwrap();
        assert_eq!((s.endpoint.as_str(), s.offline), ("http://mirror:8080/hf", true));
        assert_eq!(s.timeout, Duration::from_secs(3));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_a_file() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().to_str().unwrap();
        let other = home.path().join("other");
        assert_eq!(settings(&[("HF_HOME", dir)]).unwrap().token, None);
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(&other, "hf_other\n").unwrap();
        let token = |vars: &[(&str, &str)]| settings(vars).unwrap().token.unwrap();
        assert_eq!(token(&[("HF_HOME", dir)]), "hf_file");
        let path = ("HF_TOKEN_PATH", other.to_str().unwrap());
        assert_eq!(token(&[("HF_HOME", dir), path]), "hf_other");
        assert_eq!(token(&[("HF_HOME", dir), path, ("HF_TOKEN", " hf_var ")]), "hf_var");
    }

    #[test]
    fn wrong_values_are_named_and_tokens_never_shown() {
        for (name, value) in
            [("HF_ENDPOINT", "mirror"), ("HF_ENDPOINT", "https:///x"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0")]
        {
            let error = settings(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}={value}")) && error.contains("expected"), "{error}");
        }
        let error = settings(&[("HF_TOKEN", "hf_a\nhf_b")]).unwrap_err().to_string();
        assert!(error.contains("HF_TOKEN") && !error.contains("hf_a"), "{error}");
        assert!(Settings::from_vars(&|_| None, None).unwrap_err().to_string().contains("HF_HOME"));
    }
}
