//! The names under which a body may refer to the running model.

use std::path::{Path, PathBuf};

use super::fields::{ApiError, Fields};
use crate::hub;

/// The running model.
pub struct Served {
    /// The value of `--model`, the name in it if it is an address, or `embedded`.
    pub name: String,
    folder: Option<PathBuf>,
    /// Whether bodies may name any model.
    any: bool,
}

impl Served {
    /// The model that `--model` names; `any`: bodies may name any other too.
    pub fn new(model: Option<&str>, any: bool) -> Self {
        let name = model.map_or_else(|| "embedded".to_string(), hub::name_of);
        let folder = model.and_then(|model| Path::new(model).canonicalize().ok());
        Self { name, folder, any }
    }

    /// The `model` of an answer: the body's, if it has one.
    ///
    /// # Errors
    /// The body names another model than the running one; status and type are vLLM's.
    pub fn check(&self, body: &Fields) -> Result<String, ApiError> {
        match body.text("model")? {
            // vLLM treats an empty name as absent.
            None | Some("") => Ok(self.name.clone()),
            Some(asked) if self.any || self.is_called(asked) => Ok(asked.to_string()),
            Some(asked) => {
                let what = format!("The model `{asked}` does not exist; the running one is `{}`.", self.name);
                let message = format!("{what} Correct the name, leave it out, or pass --any-model.");
                Err(ApiError { status: 404, param: Some("model".into()), message })
            }
        }
    }

    /// Whether `asked` is the folder, its last names, or the name on the hub with or without organization and revision.
    fn is_called(&self, asked: &str) -> bool {
        let unpinned = self.name.split_once('@').map_or(self.name.as_str(), |(id, _)| id);
        let names = [Path::new(&self.name), Path::new(unpinned)];
        names.into_iter().chain(self.folder.as_deref()).any(|name| name.ends_with(asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn asks(served: &Served, model: &str) -> Result<String, ApiError> {
        served.check(&Fields(json!({ "model": model }).as_object().unwrap()))
    }

    #[test]
    fn a_model_goes_by_its_names() {
        let hub = Served::new(Some("Qwen/Qwen3-30B-A3B@main"), false);
        for name in ["Qwen/Qwen3-30B-A3B@main", "Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B", ""] {
            assert!(asks(&hub, name).is_ok(), "{name}");
        }
        for name in ["Qwen/Qwen3-235B-A22B", "Qwen", "Org/Qwen3-30B-A3B", "30B-A3B"] {
            assert!(asks(&hub, name).is_err(), "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("Qwen").join("Small");
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.to_str().unwrap();
        let local = Served::new(Some(&format!("{path}/.")), false);
        assert!([path, "Small", "Qwen/Small"].iter().all(|name| asks(&local, name).is_ok()));
        assert!(asks(&local, "/Small").is_err());
    }

    #[test]
    fn another_model_is_refused_as_vllm_does() {
        let error = asks(&Served::new(None, false), "gpt-4").unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (404, Some("model")));
        assert!(
            error.message.contains("`gpt-4`") && error.message.contains("`embedded`"),
            "{}",
            error.message
        );
        assert_eq!(asks(&Served::new(None, true), "gpt-4").unwrap(), "gpt-4");
        let none = Served::new(None, false).check(&Fields(&serde_json::Map::new())).unwrap();
        assert_eq!(none, "embedded");
    }
}
