//! Requests to the hub: the files of a repository, the size and hash of a file, and its bytes from an offset on.

use std::io::Read;

use anyhow::anyhow;
use serde::Deserialize;
use ureq::Agent;

use super::env::Settings;
use super::failure::{Failure, Refusal};
use super::files;
use super::name::{ModelName, is_commit};

type Response = ureq::http::Response<ureq::Body>;

const MAX_REDIRECTS: usize = 10;
/// The largest description of a repository, in bytes. All real ones are smaller.
const LONGEST_INFO: u64 = 64 << 20;

/// A repository at a revision.
#[derive(Debug, Deserialize)]
pub struct RepoInfo {
    /// The commit to which the revision points now.
    pub sha: String,
    /// The files.
    pub siblings: Vec<Sibling>,
}

/// A file of a repository.
#[derive(Debug, Deserialize)]
pub struct Sibling {
    /// Path in the repository.
    pub rfilename: String,
}

/// The description of a file by the hub.
#[derive(Debug)]
pub struct FileInfo {
    /// The hash of its contents. In the cache it is the name of the blob.
    pub etag: String,
    /// The number of bytes.
    pub size: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Head,
    Get,
}

/// Sends requests to the hub.
pub struct Client<'a> {
    agent: Agent,
    settings: &'a Settings,
}

impl<'a> Client<'a> {
    /// Makes a client, without sending anything.
    pub fn new(settings: &'a Settings) -> Self {
        let limit = Some(settings.timeout);
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(limit)
            .timeout_connect(limit)
            .timeout_recv_response(limit)
            .timeout_per_read(limit)
            .user_agent(concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")));
        Self { agent: config.build().into(), settings }
    }

    /// Returns the commit and the files of a revision.
    pub fn repo(&self, name: &ModelName) -> Result<RepoInfo, Failure> {
        let endpoint = &self.settings.endpoint;
        let revision = encode(&name.revision, false);
        let url = format!("{endpoint}/api/models/{}/revision/{revision}", name.id);
        let text = self.text(&url)?;
        let info: RepoInfo = serde_json::from_slice(&text)
            .map_err(|e| self.foreign(&format!("its description of the repository is not valid: {e}")))?;
        if !is_commit(&info.sha) {
            return Err(self.foreign(&format!("`{}` is not a commit", info.sha)));
        }
        match info.siblings.iter().find(|s| !files::is_inside(&s.rfilename)) {
            Some(file) => {
                Err(self.foreign(&format!("the file name {:?} leaves the repository", file.rfilename)))
            }
            None => Ok(info),
        }
    }

    /// Returns the names of models that say that they are quantised from a model. The most downloaded ones come first.
    pub fn quantised_from(&self, id: &str, most: usize) -> Result<Vec<String>, Failure> {
        #[derive(Deserialize)]
        struct Listed {
            id: String,
        }
        let filter = encode(&format!("base_model:quantized:{id}"), false);
        let endpoint = &self.settings.endpoint;
        let url = format!("{endpoint}/api/models?filter={filter}&sort=downloads&direction=-1&limit={most}");
        let text = self.text(&url)?;
        let models: Vec<Listed> = serde_json::from_slice(&text)
            .map_err(|e| self.foreign(&format!("its list of models is not valid: {e}")))?;
        Ok(models.into_iter().take(most).map(|model| model.id).collect())
    }

    /// Returns a small file of a repository at a revision.
    pub fn small_file(&self, name: &ModelName, file: &str) -> Result<Vec<u8>, Failure> {
        self.text(&self.url(name, &encode(&name.revision, false), file))
    }

    /// Returns the bytes of an answer, up to the largest size of a description.
    fn text(&self, url: &str) -> Result<Vec<u8>, Failure> {
        let response = self.ask(Method::Get, url, None)?;
        let mut text = Vec::new();
        let read = response.into_body().into_reader().take(LONGEST_INFO).read_to_end(&mut text);
        read.map_err(|e| Failure::Transient(e.to_string()))?;
        Ok(text)
    }

    /// Returns the address of a file of a commit.
    pub fn url(&self, name: &ModelName, commit: &str, file: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.settings.endpoint, name.id, encode(file, true))
    }

    /// Returns the hash and the size of a file. The hub sends them for a large file with the redirect to its storage.
    pub fn file(&self, url: &str) -> Result<FileInfo, Failure> {
        let response = self.ask(Method::Head, url, None)?;
        let etag = header(&response, "x-linked-etag").or(header(&response, "etag"));
        let etag = etag.map(|e| e.trim_start_matches("W/").trim_matches('"').to_string());
        let size = header(&response, "x-linked-size").or(header(&response, "content-length"));
        let is_name = |e: &String| {
            !e.is_empty() && e.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        match (etag.filter(is_name), size.and_then(|s| s.parse().ok())) {
            (Some(etag), Some(size)) => Ok(FileInfo { etag, size }),
            _ => Err(self.foreign(&format!("it tells no hash and size of {url}"))),
        }
    }

    /// Returns the bytes of a file from `from` on, and the offset of the first of them, which is 0 if the server does
    /// not support ranges. A read fails if the server sends nothing for too long.
    pub fn bytes(&self, url: &str, from: u64) -> Result<(u64, impl Read + use<>), Failure> {
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let response = self.ask(Method::Get, url, range.as_deref())?;
        let start = self.start_of(&response)?;
        if start != 0 && start != from {
            return Err(
                self.foreign(&format!("asked for bytes from {from} on, it sends those from {start} on"))
            );
        }
        Ok((start, response.into_body().into_reader()))
    }

    /// Returns the first `len` bytes of a file. The file must not be shorter.
    pub fn beginning(&self, url: &str, len: u64) -> Result<Vec<u8>, Failure> {
        let range = format!("bytes=0-{}", len.saturating_sub(1));
        let response = self.ask(Method::Get, url, Some(&range))?;
        let start = self.start_of(&response)?;
        if start != 0 {
            return Err(self.foreign(&format!("asked for the first bytes, it sends those from {start} on")));
        }
        let mut bytes = Vec::new();
        let read = response.into_body().into_reader().take(len).read_to_end(&mut bytes);
        read.map_err(|e| Failure::Transient(e.to_string()))?;
        match bytes.len() as u64 == len {
            true => Ok(bytes),
            false => Err(Failure::Transient(format!("it ended after {} of {len} bytes", bytes.len()))),
        }
    }

    /// Returns the offset in the file at which an answer begins.
    fn start_of(&self, response: &Response) -> Result<u64, Failure> {
        match response.status().as_u16() {
            206 => range_start(response).ok_or_else(|| self.foreign("a part of a file without its range")),
            _ => Ok(0),
        }
    }

    /// Sends a request and follows redirects itself, for two reasons: the answer to read is the first one that
    /// describes a file, and the token must not be sent to another host than the hub.
    fn ask(&self, method: Method, url: &str, range: Option<&str>) -> Result<Response, Failure> {
        let mut url = url.to_string();
        for _ in 0..MAX_REDIRECTS {
            let response = self.send(method, &url, range)?;
            let is_described = method == Method::Head && header(&response, "x-linked-etag").is_some();
            if !response.status().is_redirection() || is_described {
                return accepted(response);
            }
            let location = header(&response, "location").and_then(|to| join(&url, to));
            url = location.ok_or_else(|| self.foreign(&format!("{url} redirects to nowhere")))?;
        }
        Err(self.foreign(&format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn send(&self, method: Method, url: &str, range: Option<&str>) -> Result<Response, Failure> {
        let mut request = match method {
            Method::Head => self.agent.head(url),
            Method::Get => self.agent.get(url),
        };
        if let Some(token) = &self.settings.token
            && origin(url) == origin(&self.settings.endpoint)
        {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        request.call().map_err(|e| Failure::Transient(e.to_string()))
    }

    /// The error for an answer that does not follow the protocol of the hub.
    fn foreign(&self, what: &str) -> Failure {
        let endpoint = &self.settings.endpoint;
        Failure::Fatal(anyhow!("{endpoint} does not answer like the hub: {what}; check HF_ENDPOINT"))
    }
}

fn accepted(response: Response) -> Result<Response, Failure> {
    let status = response.status().as_u16();
    let text = |name: &str| header(&response, name).map(str::to_string);
    match status {
        200..=399 => Ok(response),
        429 => {
            Err(Failure::Transient("too many requests (429); a token in HF_TOKEN raises the limit".into()))
        }
        408 | 500.. => Err(Failure::Transient(format!("the server answers with status {status}"))),
        _ => Err(Failure::Refused(Refusal {
            status,
            code: text("x-error-code"),
            message: text("x-error-message"),
        })),
    }
}

fn header<'r>(response: &'r Response, name: &str) -> Option<&'r str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns `a` of `Content-Range: bytes a-b/size`.
fn range_start(response: &Response) -> Option<u64> {
    header(response, "content-range")?.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// Returns the scheme, the host and the port of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find('/').map_or(url, |end| &url[..host + end])
}

/// Returns the target of a redirect.
fn join(url: &str, location: &str) -> Option<String> {
    if location.starts_with("https://") || location.starts_with("http://") {
        return Some(location.to_string());
    }
    (location.starts_with('/') && !location.starts_with("//")).then(|| format!("{}{location}", origin(url)))
}

/// Encodes a path with percent signs. Without `keep_slashes` its slashes are encoded, too.
fn encode(text: &str, keep_slashes: bool) -> String {
    let plain =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.') || (keep_slashes && b == b'/');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_and_origins() {
        assert_eq!(origin("https://hub:8/a/b"), "https://hub:8");
        assert_eq!(origin("https://hub"), "https://hub");
        assert_eq!(join("http://hub/a/b", "/c?d=/e").as_deref(), Some("http://hub/c?d=/e"));
        assert_eq!(join("http://hub/a", "https://cdn/x").as_deref(), Some("https://cdn/x"));
        assert_eq!(join("http://hub/a", "//cdn/x"), None);
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(encode("a b/ü+", true), "a%20b/%C3%BC%2B");
    }
}
