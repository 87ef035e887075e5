//! The message in which a rank describes its buffer, and the rule that decides whether ranks can share memory.
//!
//! All ranks see the same answers and apply the same rule, so either all share memory or none does.
#![cfg_attr(not(feature = "nccl"), allow(dead_code))] // without CUDA only its tests use it

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// A description of a rank's buffer, by which other ranks find it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// Identity of the host.
    pub host: String,
    /// Identity of the process.
    pub process: u64,
    /// UUID of the GPU.
    pub device: [u8; 16],
    /// Address of the buffer in its process.
    pub address: u64,
    /// The driver's handle (64 bytes) by which other processes open the buffer, or why there is none. Ranks of the same
    /// process need no handle.
    pub handle: Result<Vec<u8>, String>,
}

/// A rank's offer, or why it has none.
pub(crate) type Answer = Result<Offer, String>;

/// Why the ranks cannot share memory, if they cannot.
pub(crate) fn refusal(answers: &[Answer]) -> Option<String> {
    let mut offers: Vec<&Offer> = Vec::with_capacity(answers.len());
    for (rank, answer) in answers.iter().enumerate() {
        let offer = match answer {
            Ok(offer) => offer,
            Err(reason) => return Some(format!("rank {rank} has none to share: {reason}")),
        };
        if let Some(other) = offers.iter().position(|other| other.host != offer.host) {
            return Some(format!("ranks {other} and {rank} are on different hosts"));
        }
        // Two kernels on one GPU that wait for each other may never run at the same time.
        if let Some(other) = offers.iter().position(|other| other.device == offer.device) {
            return Some(format!("ranks {other} and {rank} use the same GPU"));
        }
        offers.push(offer);
    }
    None
}

/// Identity of the host: the boot id of its operating system. `NCCL_HOSTID` replaces it, as for NCCL; it can tell GPUs
/// of one host apart.
///
/// # Errors
/// A system that gives no boot id; `NCCL_P2P_DISABLE` is set, which forbids peer memory to NCCL as well.
pub(crate) fn host_id(lookup: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    if lookup("NCCL_P2P_DISABLE").is_some_and(|value| value != "0") {
        return Err("NCCL_P2P_DISABLE is set".to_string());
    }
    if let Some(id) = lookup("NCCL_HOSTID").filter(|id| !id.is_empty()) {
        return Ok(id);
    }
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    let id = std::fs::read_to_string(BOOT).map_err(|e| format!("cannot read {BOOT}: {e}"))?;
    Ok(id.trim().to_string())
}

/// A random identity of this process. Process numbers are not enough, because each container on a host has its own.
pub(crate) fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| RandomState::new().hash_one("process"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(host: &str, device: u8) -> Answer {
        let handle = Ok(vec![device; 64]);
        Ok(Offer { host: host.to_string(), process: 7, device: [device; 16], address: 0x7f00_0000, handle })
    }

    #[test]
    fn ranks_of_one_host_with_a_gpu_each_share() {
        assert_eq!(refusal(&[offer("a", 0), offer("a", 1), offer("a", 2)]), None);
    }

    #[test]
    fn a_refusal_names_the_ranks() {
        let cases = [
            ([offer("a", 0), offer("a", 1), offer("b", 2)], "ranks 0 and 2 are on different hosts"),
            ([offer("a", 0), offer("a", 1), offer("a", 1)], "ranks 1 and 2 use the same GPU"),
            ([offer("a", 0), Err("no".to_string()), offer("b", 0)], "rank 1 has none to share: no"),
        ];
        for (answers, expected) in cases {
            assert_eq!(refusal(&answers).as_deref(), Some(expected));
        }
    }

    #[test]
    fn answers_survive_the_way() {
        for answer in [offer("a", 3), Err("no driver".to_string())] {
            let bytes = postcard::to_allocvec(&answer).unwrap();
            assert_eq!(postcard::from_bytes::<Answer>(&bytes).unwrap(), answer);
        }
    }

    #[test]
    fn variables_of_nccl_count() {
        let with = |name: &'static str, value: &'static str| {
            host_id(move |asked| (asked == name).then(|| value.to_string()))
        };
        assert_eq!(with("NCCL_HOSTID", "left").as_deref(), Ok("left"));
        assert!(with("NCCL_P2P_DISABLE", "1").is_err());
        assert_eq!(with("NCCL_P2P_DISABLE", "0"), with("NCCL_HOSTID", ""));
    }
}
