//! Ranks that are processes: the driver's handles of their buffers are sent over sockets.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use candle_core::DType;
use moe_comm::{Join, PeerAllReduce, SocketComm, SocketTimeouts, launch_from_env};
use moe_kernels::{Buffer, Exec};

use super::{context, worlds};

/// Runs this program once per rank, each as one rank of a group.
#[test]
fn a_group_of_processes() {
    for n in worlds() {
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let start = |rank: usize| {
            let rank = rank.to_string();
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "nccl::processes::a_rank_of_it", "--ignored", "--nocapture"])
                .envs([("RANK", rank.as_str()), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &n.to_string())])
                .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let ranks: Vec<_> = (0..n).map(start).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            // A run without tests also succeeds, so the test itself must have passed.
            assert!(output.status.success() && text.contains("1 passed"), "rank {rank} of {n}: {text}");
        }
    }
}

#[test]
#[ignore = "a rank of a_group_of_processes, which starts it"]
fn a_rank_of_it() {
    let launch = launch_from_env(|name| std::env::var(name).ok()).unwrap().unwrap();
    let rank = launch.rank;
    let n = launch.world_size;
    let limit = Duration::from_secs(30);
    let timeouts = SocketTimeouts { rendezvous: limit, collective: limit };
    let comm = SocketComm::connect(Join { timeouts, ..Join::new(&launch, Vec::new()) }).unwrap();
    let mut ex = context(launch.local_rank).unwrap();
    // Two groups of the same ranks; the first ends before the second is used.
    for _ in 0..2 {
        let group = PeerAllReduce::new(&comm, &mut Exec::cpu(), Duration::from_secs(10), &ex).unwrap();
        let group = group.unwrap_or_else(|why| panic!("these GPUs cannot share memory: {why}"));
        for round in 0..300 {
            let len = [1, 2048, 131_072][round % 3];
            let values = (0..len).map(|i| (i % 11 + rank * (round + 1)) as f32).collect();
            let mut data = ex.zeros(DType::F32, &[len]).unwrap();
            let host = Buffer::from_vec(values, &[len]).unwrap();
            ex.copy_from_host(host.view(), data.view_mut()).unwrap();
            group.all_reduce_into(data.view_mut(), &mut ex).unwrap();
            let got = ex.to_host(data.view()).unwrap().view().to_f32_vec().unwrap();
            group.check().unwrap();
            let expected = (0..len).map(|i| (n * (i % 11) + n * (n - 1) / 2 * (round + 1)) as f32);
            assert!(got.into_iter().eq(expected), "round {round}");
        }
    }
}
