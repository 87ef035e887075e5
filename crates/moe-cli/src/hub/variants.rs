//! Finds quantised variants of a model that others have published on the hub. Their repositories have the tag
//! `base_model:quantized:ORG/NAME`.
//!
//! Only their configs are downloaded, because these describe the variants.

use anyhow::Result;
use indicatif::ProgressBar;
use model_runtime::Config;

use super::client::Client;
use super::env::Settings;
use super::name::ModelName;
use super::retry::retry;
use super::{Located, Rest};

/// The number of variants that are examined. These are the most downloaded ones.
const MOST: usize = 12;
/// How often a request is repeated. The variants are only a hint, and a user waits for it.
const RETRIES: u32 = 1;

/// A variant of a model.
pub struct Variant {
    /// Its name on the hub.
    pub id: String,
    /// Its config.json, or the reason why it cannot be read.
    pub config: Result<Config, String>,
}

impl Located {
    /// Returns the published variants that say that they are quantised from this model. There are none for a folder, or
    /// if the hub must not be asked.
    ///
    /// # Errors
    /// The hub does not answer the question.
    pub fn variants(&self) -> Result<Vec<Variant>> {
        match &self.rest {
            Some(rest) => rest.variants(),
            None => Ok(Vec::new()),
        }
    }
}

impl Rest {
    fn variants(&self) -> Result<Vec<Variant>> {
        let Self { name, settings, .. } = self;
        let client = Client::new(settings);
        let ask = || client.quantised_from(&name.id, MOST);
        let listed = retry("the list of models", RETRIES, settings.backoff, &ProgressBar::hidden(), ask);
        let listed = listed.map_err(|failure| failure.explain(name, None, settings))?;
        let named = listed.into_iter().filter(|id| *id != name.id);
        Ok(named.map(|id| Variant { config: config(&client, settings, &id), id }).collect())
    }
}

/// Returns the config of a model at its main branch.
fn config(client: &Client, settings: &Settings, id: &str) -> Result<Config, String> {
    let name = ModelName::parse(id)?;
    let ask = || client.small_file(&name, "config.json");
    let bytes = retry(id, RETRIES, settings.backoff, &ProgressBar::hidden(), ask);
    let bytes = bytes
        .map_err(|failure| crate::error::describe(&failure.explain(&name, Some("config.json"), settings)))?;
    let text = String::from_utf8(bytes).map_err(|e| format!("its config.json is not text: {e}"))?;
    Config::parse(&text, &format!("config.json of {id}")).map_err(|e| e.to_string())
}
