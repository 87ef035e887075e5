//! What a server answers that a download asks: the answers as they come over the connection, one after each NUL.
//! Refused with a reason, or a folder in the cache whose files have the hashes that the server named.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use moe_cli::hub;

/// The answers that are left, the next one last.
static ANSWERS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
/// The address of the server.
static ENDPOINT: OnceLock<String> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let endpoint = ENDPOINT.get_or_init(serve);
    let answers = bytes.split(|&byte| byte == 0).rev().map(<[u8]>::to_vec);
    *ANSWERS.lock().expect("answers") = answers.collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = folder.path().join("cache");
    match hub::resolve_from("org/name", endpoint, &cache) {
        Ok(snapshot) => {
            assert!(snapshot.starts_with(&cache));
            let report = hub::check_snapshot(&snapshot);
            // A server may announce no hash; then only the form of a file can be wrong.
            let of_hash = |fault: &&String| fault.contains(": expected SHA") || fault.contains(": missing");
            let wrong: Vec<_> = report.faults.iter().filter(of_hash).collect();
            assert!(wrong.is_empty(), "{wrong:?}");
        }
        Err(e) => assert!(!format!("{e:#}").is_empty()),
    }
    let entries = std::fs::read_dir(folder.path()).expect("the folder");
    let names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(names.iter().all(|name| name == "cache"), "written outside of the cache: {names:?}");
});

/// Starts the server, and returns its address.
fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that goes away early is no fault of the server.
            let _ = stream.and_then(answer);
        }
    });
    endpoint
}

/// Reads a request and sends the next answer; after the last one it closes connections at once.
fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let length = stream.read(&mut piece)?;
        if length == 0 {
            return Ok(());
        }
        request.extend_from_slice(&piece[..length]);
    }
    let next = ANSWERS.lock().expect("answers").pop();
    stream.write_all(&next.unwrap_or_default())?;
    stream.shutdown(Shutdown::Both)
}
