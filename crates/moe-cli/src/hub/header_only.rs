//! Downloads the headers of GGUF files that are on the hub.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use indicatif::{BinaryBytes, ProgressBar};
use model_runtime::checkpoint::gguf::holds_header;
use moe_engine::terminal::note;

use super::client::Client;
use super::failure::Failure;
use super::gguf::{HeaderOnly, base};
use super::retry::{RETRIES, retry};
use super::{Rest, temporary};

/// The number of bytes of the first request, and the largest number. A header contains the vocabulary.
const FIRST: u64 = 8 << 20;
const MOST: u64 = 256 << 20;

impl Rest {
    /// Downloads the headers of a model's files, and logs what would be downloaded later.
    ///
    /// # Errors
    /// A server that does not answer; a folder for temporary files that cannot be created.
    pub(super) fn header_only(&self, files: &[String]) -> Result<HeaderOnly> {
        let header_only = HeaderOnly { dir: temporary::folder("moe-gguf")? };
        let mut bytes = 0;
        for file in files {
            bytes += self.header_only_file(file, &header_only.dir.join(base(file)))?;
        }
        let parts = if files.len() > 1 { format!(" in {} parts", files.len()) } else { String::new() };
        let first = files.first().map_or("", String::as_str);
        note(format_args!("{}: {first}, {}{parts}", self.name, BinaryBytes(bytes)));
        Ok(header_only)
    }

    fn header_only_file(&self, file: &str, to: &Path) -> Result<u64> {
        let Self { name, settings, commit, .. } = self;
        let client = Client::new(settings);
        let url = client.url(name, commit, file);
        let ask = || -> std::result::Result<_, Failure> {
            let size = client.file(&url)?.size;
            let mut len = FIRST.min(size);
            loop {
                let bytes = client.beginning(&url, len)?;
                // If there is no complete header within the limit, the reader gets the file as it is and refuses it.
                if len >= MOST.min(size) || holds_header(&bytes, size) {
                    return Ok((bytes, size));
                }
                len = (2 * len).min(MOST.min(size));
            }
        };
        let asked = retry(file, RETRIES, settings.backoff, &ProgressBar::hidden(), ask);
        let (header, size) = asked.map_err(|failure: Failure| failure.explain(name, Some(file), settings))?;
        let write = || {
            let mut header_only = File::create_new(to)?;
            header_only.write_all(&header)?;
            header_only.set_len(size)
        };
        write().with_context(|| format!("cannot write the header of {file} to {}", to.display()))?;
        Ok(size)
    }
}
