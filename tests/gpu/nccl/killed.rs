//! The process of a rank is killed in each phase of a move of experts between GPUs. The other rank soon ends with an
//! error that names it, and the same run without a kill completes.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moe_comm::{
    Collectives, Communicator, Join, NcclComm, SocketComm, SocketTimeouts, Window, broadcast_bytes,
    launch_from_env,
};
use moe_kernels::Exec;
use moe_layer::MoveStatus;

use super::context;
use super::faulty::{Fault, Faulty};
use super::moves::{block, cases, model, renamed, shift, window};
use crate::common::Rng;

/// The moment at which the second rank ends: before any bytes are sent; instead of sending; when all bytes have arrived
/// and nothing is agreed; when the other rank may already use the new placement; or never.
const PHASES: [&str; 5] = ["begins", "carries", "checks", "installs", "lives"];

#[test]
fn a_rank_that_is_killed_in_any_phase_ends_the_other_by_name_and_a_rerun_completes() {
    for by_nccl in [false, true] {
        for phase in PHASES {
            let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
            let start = |rank: usize| {
                let rank = rank.to_string();
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "nccl::killed::a_rank_of_it", "--ignored", "--nocapture"])
                    .envs([("RANK", rank.as_str()), ("LOCAL_RANK", &rank), ("WORLD_SIZE", "2")])
                    .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())])
                    .envs([("KILLED_PHASE", phase), ("KILLED_BY_NCCL", if by_nccl { "1" } else { "0" })])
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            };
            let ranks = [start(0), start(1)].map(|rank| rank.wait_with_output().unwrap());
            let name = format!("{phase}, NCCL {by_nccl}: {ranks:?}");
            let passed = ranks.map(|rank| {
                rank.status.success() && String::from_utf8_lossy(&rank.stdout).contains("1 passed")
            });
            assert_eq!(passed, [true, phase == "lives"], "{name}");
        }
    }
}

#[test]
#[ignore = "a rank of a_rank_that_is_killed_in_any_phase_ends_the_other_by_name_and_a_rerun_completes, which starts it"]
fn a_rank_of_it() {
    let variable = |name| std::env::var(name).unwrap();
    let phase = variable("KILLED_PHASE");
    let by_nccl = variable("KILLED_BY_NCCL") == "1";
    let launch = launch_from_env(|name| std::env::var(name).ok()).unwrap().unwrap();
    let limit = Duration::from_secs(30);
    let timeouts = SocketTimeouts { rendezvous: limit, collective: limit };
    let hosts = SocketComm::connect(Join { timeouts, ..Join::new(&launch, Vec::new()) }).unwrap();
    let mut ex = context(launch.local_rank).unwrap();
    let id = broadcast_bytes(&hosts, 0, &NcclComm::unique_id().unwrap()).unwrap();
    let gpus = Arc::new(NcclComm::with_timeout(id.try_into().unwrap(), launch.rank, 2, &ex, limit).unwrap());
    // Exchanges by NCCL would wait for the dead rank.
    gpus.end_with(hosts.watcher()).unwrap();
    let case = cases()[0].clone().by_nccl(by_nccl);
    let (block, _) = block(&case, &model(&case, &mut Rng::seeded(1)), &gpus, &mut ex).unwrap();
    let placed = block.placed_experts().unwrap();
    let inner = window(&case, placed.landing_bytes().unwrap(), &gpus, &mut ex).unwrap();
    let window: Arc<dyn Window> = match PHASES.into_iter().find(|end| launch.rank == 1 && *end == phase) {
        Some(end) => Arc::new(Faulty::new(inner, Fault::End(end))),
        None => Arc::from(inner),
    };
    let before = placed.map();
    let start = Instant::now();
    let target = renamed(&before, &mut Rng::seeded(2));
    // The messages between hosts are in host memory, as in an engine.
    let moved = shift(placed, (&target, usize::MAX), &window, &hosts, &mut Exec::cpu());
    if phase == "lives" {
        assert_eq!(moved.unwrap(), MoveStatus::Moved);
        ex.synchronize().unwrap();
        return hosts.barrier(&mut Exec::cpu()).unwrap();
    }
    // A rank that has agreed already uses the new placement, and learns of the death in its next call.
    let error = match moved {
        Ok(status) => {
            assert_eq!((phase.as_str(), status), ("installs", MoveStatus::Moved));
            hosts.barrier(&mut Exec::cpu()).unwrap_err()
        }
        Err(error) => {
            assert_eq!(placed.map().phy2log(), before.phy2log());
            error
        }
    };
    let text = error.to_string();
    assert!(text.contains("rank 1 died"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // This ends the work that waits on the device, as engines do.
    gpus.abort(&text);
}
