//! Listens on addresses, and connects to other ranks.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::socket::handshake::Patience;

/// Pause between two attempts to connect to a rank.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens at every address that `name` has on this host, and at no other address.
///
/// # Errors
/// A name without an address on this host, or a port that is in use; the message says what to change.
pub(super) fn listen(name: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let unknown = |e: io::Error| {
        let why = e.to_string();
        // A resolver's error may continue with lines of advice.
        let why = why.lines().next().unwrap_or_default();
        io::Error::new(e.kind(), format!("MASTER_ADDR {name} has no address here: {why}"))
    };
    let addresses = resolve(name, port).map_err(unknown)?;
    let mut listeners = Vec::new();
    let mut elsewhere = Vec::new();
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(e) if e.kind() == ErrorKind::AddrNotAvailable => elsewhere.push(address.ip().to_string()),
            Err(e) => {
                let what = format!(
                    "cannot listen on port {port} (MASTER_PORT) of {}: {e}; choose another one",
                    address.ip()
                );
                return Err(io::Error::new(e.kind(), what));
            }
        }
    }
    if listeners.is_empty() {
        let what = format!(
            "MASTER_ADDR {name} means {}, which is no address of this host, where rank 0 is; name one that it has, or 0.0.0.0 for \
             all of them",
            elsewhere.join(" and ")
        );
        return Err(io::Error::new(ErrorKind::AddrNotAvailable, what));
    }
    Ok(listeners)
}

/// Every address of a name, without repetitions.
pub(super) fn resolve(name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut seen = BTreeSet::new();
    let bare = name.trim_matches(['[', ']']);
    let all = match bare.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => (name, port).to_socket_addrs()?.collect(),
    };
    Ok(all.into_iter().filter(|address| seen.insert(*address)).collect())
}

/// Connects to the first address that answers, until the deadline. The outer error comes from `alive`.
pub(super) fn reach(
    resolve: impl Fn() -> io::Result<Vec<SocketAddr>>,
    patience: &Patience,
) -> Result<io::Result<TcpStream>> {
    loop {
        let mut last = io::Error::other("its name has no address");
        match resolve() {
            Ok(addresses) => {
                for address in addresses {
                    let left = patience.until.saturating_duration_since(Instant::now());
                    let attempt = left.clamp(Duration::from_millis(1), Duration::from_secs(5));
                    match TcpStream::connect_timeout(&address, attempt) {
                        // If nothing listens on the port, the system may give the port to this connection itself, which
                        // then connects to itself.
                        Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => {
                            return Ok(Ok(stream));
                        }
                        Ok(_) => last = ErrorKind::ConnectionRefused.into(),
                        Err(e) => last = e,
                    }
                }
            }
            Err(e) => last = e,
        }
        (patience.alive)()?;
        if Instant::now() + PAUSE >= patience.until {
            return Ok(Err(last));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(name: &str) -> Vec<IpAddr> {
        listen(name, 0).unwrap().iter().map(|listener| listener.local_addr().unwrap().ip()).collect()
    }

    #[test]
    fn rank_0_listens_at_the_address_that_is_named_alone() {
        assert_eq!(ips("127.0.0.1"), ["127.0.0.1".parse::<IpAddr>().unwrap()]);
        assert!(ips("localhost").iter().all(IpAddr::is_loopback));
        assert!(ips("0.0.0.0")[0].is_unspecified(), "only where that is asked for");
        // 192.0.2.0/24 is reserved for documentation, so no host has this address.
        let error = listen("192.0.2.1", 0).unwrap_err().to_string();
        assert!(
            error.contains("MASTER_ADDR 192.0.2.1") && error.contains("no address of this host"),
            "{error}"
        );
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = listen("127.0.0.1", taken.local_addr().unwrap().port()).unwrap_err().to_string();
        assert!(error.contains("(MASTER_PORT)") && error.contains("choose another one"), "{error}");
    }
}
