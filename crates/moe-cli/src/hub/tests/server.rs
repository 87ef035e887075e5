//! A hub on this machine, for tests: one repository, served as the hub does. Small files are served through a redirect
//! within the host, large ones through a redirect to a storage host that must never see a token.
#![allow(clippy::unwrap_used, dead_code)] // two test programs share this file

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit of branch `main`.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The repository.
pub const REPO: &str = "org/tiny";

/// A fault of a request.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// The answer has this status, `X-Error-Code` and `X-Error-Message`.
    Status(u16, &'static str, &'static str),
    /// The connection ends after this number of bytes of the body.
    Cut(usize),
    /// Nothing is sent after this number of bytes of the body, and the connection stays open.
    Stall(usize),
    /// The whole file is sent for every requested range.
    IgnoreRange,
    /// Zeros are sent instead of the bytes of the body.
    Zeros,
    /// The lowest bit of this byte of the body is flipped.
    Flip(usize),
    /// This text is sent instead of the body.
    Body(&'static str),
}

/// A request that the server saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    pub host: String,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

struct Rule {
    method: &'static str,
    part: &'static str,
    times: usize,
    act: Act,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    rules: Vec<Rule>,
    seen: Vec<Request>,
    silent: Vec<TcpStream>,
    is_down: bool,
}

/// The server; it stops when dropped.
pub struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Serves every file of a folder.
    pub fn of_folder(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            // The files that tests compare with are not part of a repository.
            let name = path.file_name().unwrap().to_str().unwrap().to_string();
            if name != "reference.safetensors" {
                state.lock().unwrap().files.insert(name, fs::read(path).unwrap());
            }
        }
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.lock().unwrap().is_down {
                    return;
                }
                let shared = Arc::clone(&shared);
                // An error of a client that closes its connection early is ignored.
                thread::spawn(move || stream.and_then(|stream| serve(stream, address.port(), &shared)));
            }
        });
        Self { address, state }
    }

    /// The address for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds a file.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        self.state.lock().unwrap().files.insert(name.into(), bytes.into());
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) {
        self.state.lock().unwrap().files.remove(name);
    }

    /// Gives this fault to the next `times` requests of this method whose path contains `part`.
    pub fn spoil(&self, method: &'static str, part: &'static str, times: usize, act: Act) {
        self.state.lock().unwrap().rules.push(Rule { method, part, times, act });
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }

    /// The name of a file's blob.
    pub fn etag(&self, name: &str) -> String {
        etag(name, &self.state.lock().unwrap().files[name])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.lock().unwrap().is_down = true;
        let _ = TcpStream::connect(self.address);
    }
}

/// Returns the hash of a file: SHA-256 for weights, and git's hash for small files.
fn etag(name: &str, bytes: &[u8]) -> String {
    match is_large(name) {
        true => format!("{:x}", Sha256::digest(bytes)),
        false => {
            let git = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
            format!("{:x}", git.chain_update(bytes).finalize())
        }
    }
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors")
}

fn serve(stream: TcpStream, port: u16, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ');
    let method = words.next().unwrap_or_default();
    let path = words.next().unwrap_or_default();
    let mut headers = BTreeMap::new();
    for line in lines {
        match line?.split_once(": ") {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_string()),
            None => break,
        };
    }
    let request = Request {
        method: method.into(),
        host: headers.remove("host").unwrap_or_default(),
        path: path.into(),
        range: headers.remove("range"),
        token: headers.remove("authorization"),
    };
    let (act, answer) = state.lock().unwrap().accept(&request, port);
    if answer.write(&stream, &request, act)? {
        state.lock().unwrap().silent.push(stream);
    }
    Ok(())
}

struct Answer {
    status: u16,
    headers: Vec<String>,
    body: Vec<u8>,
}

impl Answer {
    fn error(status: u16, code: &str, message: &str) -> Self {
        let mut headers = vec![];
        if !code.is_empty() {
            headers.push(format!("X-Error-Code: {code}"));
        }
        if !message.is_empty() {
            headers.push(format!("X-Error-Message: {message}"));
        }
        Self { status, headers, body: message.into() }
    }

    /// Writes the answer with the fault `act`. Returns true if the rest of the answer is never sent.
    fn write(&self, mut out: &TcpStream, request: &Request, act: Option<Act>) -> std::io::Result<bool> {
        write!(out, "HTTP/1.1 {} -\r\nConnection: close\r\n", self.status)?;
        for header in &self.headers {
            write!(out, "{header}\r\n")?;
        }
        write!(out, "Content-Length: {}\r\n\r\n", self.body.len())?;
        let length = match act {
            _ if request.method == "HEAD" => 0,
            Some(Act::Cut(length) | Act::Stall(length)) => length.min(self.body.len()),
            _ => self.body.len(),
        };
        out.write_all(&self.body[..length])?;
        out.flush()?;
        Ok(matches!(act, Some(Act::Stall(_))))
    }
}

impl State {
    fn accept(&mut self, request: &Request, port: u16) -> (Option<Act>, Answer) {
        self.seen.push(request.clone());
        let act = self.act(request);
        (act, self.answer(request, port, act))
    }

    fn act(&mut self, request: &Request) -> Option<Act> {
        let fits = |r: &&mut Rule| r.times > 0 && r.method == request.method && request.path.contains(r.part);
        let rule = self.rules.iter_mut().find(fits)?;
        rule.times -= 1;
        Some(rule.act)
    }

    fn answer(&self, request: &Request, port: u16, act: Option<Act>) -> Answer {
        match act {
            Some(Act::Status(status, code, message)) => return Answer::error(status, code, message),
            Some(Act::Body(text)) => return Answer { status: 200, headers: vec![], body: text.into() },
            _ => {}
        }
        let path = request.path.as_str();
        if let Some(rest) = path.strip_prefix("/api/models/") {
            return self.describe(rest);
        }
        if let Some(rest) = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) {
            return self.redirect(rest, port);
        }
        let stored = path.strip_prefix("/cached/").or(path.strip_prefix("/storage/"));
        let file = stored.and_then(|hash| self.files.iter().find(|(name, bytes)| etag(name, bytes) == hash));
        match file {
            Some((name, bytes)) => {
                let range = request.range.as_deref().filter(|_| !matches!(act, Some(Act::IgnoreRange)));
                let mut answer = part(&etag(name, bytes), bytes, range);
                match act {
                    Some(Act::Zeros) => answer.body.fill(0),
                    Some(Act::Flip(at)) => answer.body[at] ^= 1,
                    _ => {}
                }
                answer
            }
            None => Answer::error(404, "", ""),
        }
    }

    fn describe(&self, rest: &str) -> Answer {
        match rest.split_once("/revision/") {
            Some((REPO, "main" | "refs%2Fpr%2F1" | COMMIT)) => {
                let files: Vec<_> = self.files.keys().map(|f| serde_json::json!({"rfilename": f})).collect();
                let body = serde_json::json!({"id": REPO, "sha": COMMIT, "siblings": files, "gated": false});
                Answer { status: 200, headers: vec![], body: body.to_string().into() }
            }
            Some((REPO, _)) => Answer::error(404, "RevisionNotFound", "Invalid rev id"),
            _ => Answer::error(401, "RepoNotFound", "Repository not found"),
        }
    }

    fn redirect(&self, file: &str, port: u16) -> Answer {
        let Some(bytes) = self.files.get(file) else {
            return Answer::error(404, "EntryNotFound", "Entry not found");
        };
        let hash = etag(file, bytes);
        let commit = format!("X-Repo-Commit: {COMMIT}");
        if !is_large(file) {
            return Answer {
                status: 307,
                headers: vec![format!("Location: /cached/{hash}"), commit],
                body: vec![],
            };
        }
        let headers = vec![
            format!("Location: http://localhost:{port}/storage/{hash}"),
            format!("X-Linked-ETag: \"{hash}\""),
            format!("X-Linked-Size: {}", bytes.len()),
            commit,
        ];
        Answer { status: 302, headers, body: b"Found. Redirecting".to_vec() }
    }
}

/// Returns a file, or the part of it in a range `bytes=FROM-[TO]`.
fn part(etag: &str, bytes: &[u8], range: Option<&str>) -> Answer {
    let mut headers = vec![format!("ETag: W/\"{etag}\"")];
    let Some((from, to)) = range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) else {
        return Answer { status: 200, headers, body: bytes.to_vec() };
    };
    let from: usize = from.parse().unwrap();
    let end = to.parse::<usize>().map_or(bytes.len(), |to| bytes.len().min(to + 1));
    if from >= bytes.len() {
        return Answer::error(416, "", "");
    }
    headers.push(format!("Content-Range: bytes {from}-{}/{}", end - 1, bytes.len()));
    Answer { status: 206, headers, body: bytes[from..end].to_vec() }
}
