//! Parallel settings, geometry, placement and shards, as tables and properties.

use moe_comm::{
    DeepEpMode, EpBackend, EpBackendChoice, ExpertLayout, ExpertPlacement, MAX_WORLD_SIZE, ParallelConfig,
    partition,
};
use moe_kernels::row_parallel_segments;
use proptest::prelude::*;

fn config(tp: usize, dp: usize, ep: bool) -> ParallelConfig {
    ParallelConfig { tp, dp, enable_expert_parallel: ep, ..Default::default() }
}

fn with_backend(tp: usize, dp: usize, ep: bool, backend: &str) -> ParallelConfig {
    ParallelConfig { backend: backend.parse().unwrap(), ..config(tp, dp, ep) }
}

/// (tp, dp, ep) and per rank (tp_rank, dp_rank, moe_tp size and rank, ep size and rank).
type Row = (usize, usize, bool, &'static [(usize, usize, usize, usize, usize, usize)]);

#[test]
fn coordinates() {
    let table: [Row; 6] = [
        (1, 1, false, &[(0, 0, 1, 0, 1, 0)]),
        (1, 1, true, &[(0, 0, 1, 0, 1, 0)]),
        (2, 1, false, &[(0, 0, 2, 0, 1, 0), (1, 0, 2, 1, 1, 0)]),
        (2, 1, true, &[(0, 0, 1, 0, 2, 0), (1, 0, 1, 0, 2, 1)]),
        // Data-parallel ranks are independent without expert parallelism ...
        (2, 2, false, &[(0, 0, 2, 0, 1, 0), (1, 0, 2, 1, 1, 0), (0, 1, 2, 0, 1, 0), (1, 1, 2, 1, 1, 0)]),
        // ... and share the experts with it.
        (2, 2, true, &[(0, 0, 1, 0, 4, 0), (1, 0, 1, 0, 4, 1), (0, 1, 1, 0, 4, 2), (1, 1, 1, 0, 4, 3)]),
    ];
    for (tp, dp, ep, ranks) in table {
        for (rank, &expected) in ranks.iter().enumerate() {
            let g = config(tp, dp, ep).geometry(rank).unwrap();
            let got = (g.tp_rank, g.dp_rank, g.moe_tp_size, g.moe_tp_rank, g.ep_size, g.ep_rank);
            assert_eq!(got, expected, "tp {tp}, dp {dp}, ep {ep}, rank {rank}");
            assert_eq!((g.rank, g.world_size, g.tp_size, g.dp_size), (rank, tp * dp, tp, dp));
        }
    }
    assert_eq!(ParallelConfig::default().geometry(0).unwrap(), moe_comm::Geometry::default());
}

#[test]
fn auto_picks_by_the_geometry() {
    use EpBackend::*;
    for (tp, dp, ep, expected) in [
        (1, 1, false, Disabled),
        (4, 2, false, Disabled),
        (1, 1, true, Disabled),
        (4, 1, true, LocalAllreduce),
        (1, 2, true, AllgatherReducescatter),
        (2, 2, true, AllgatherReducescatter),
    ] {
        assert_eq!(config(tp, dp, ep).resolve_backend(), Ok(expected), "tp {tp}, dp {dp}, ep {ep}");
        assert_eq!(config(tp, dp, ep).geometry(0).unwrap().backend, expected);
    }
}

/// The reference refuses deepep, dp > 1 with expert parallelism, and ep != tp; this crate allows them.
#[test]
fn explicit_backends() {
    use EpBackend::*;
    for (tp, dp, ep, name, expected) in [
        (2, 1, false, "disabled", Disabled),
        (2, 1, true, "local_allreduce", LocalAllreduce),
        (1, 1, true, "local_allreduce", LocalAllreduce),
        (2, 1, true, "allgather_reducescatter", AllgatherReducescatter),
        (2, 2, true, "ag_rs", AllgatherReducescatter),
        (1, 4, true, "deepep", DeepEp),
        (4, 1, true, "deepep", DeepEp),
    ] {
        assert_eq!(with_backend(tp, dp, ep, name).resolve_backend(), Ok(expected), "{name}");
    }
}

#[test]
fn names_and_aliases() {
    use EpBackend::*;
    let table: [(EpBackend, &[&str]); 4] = [
        (Disabled, &["disabled", "", "0", "none", "off", "standard", " Disabled "]),
        (
            LocalAllreduce,
            &["local_allreduce", "local_all_reduce", "tp_ep", "vllm_tp", "dp1", "local-allreduce"],
        ),
        (AllgatherReducescatter, &["allgather_reducescatter", "naive", "ag_rs", "all_gather_reduce_scatter"]),
        (DeepEp, &["deepep", "deep_ep", "DeepEP", "deep-ep"]),
    ];
    for (backend, names) in table {
        for name in names {
            assert_eq!(name.parse(), Ok(EpBackendChoice::Explicit(backend)), "{name:?}");
        }
        assert_eq!(backend.to_string().parse(), Ok(EpBackendChoice::from(backend)));
    }
    assert_eq!("Auto".parse(), Ok(EpBackendChoice::Auto));
    assert_eq!(EpBackendChoice::default().to_string(), "auto");
    for placement in ExpertPlacement::ALL {
        assert_eq!(placement.to_string().parse(), Ok(placement));
    }
    for mode in DeepEpMode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert_eq!("high-throughput".parse(), Ok(DeepEpMode::HighThroughput));
    assert_eq!(
        "nccl".parse::<EpBackendChoice>().unwrap_err().to_string(),
        "unknown MoE backend \"nccl\"; expected one of auto, disabled, local_allreduce, allgather_reducescatter, deepep"
    );
    assert_eq!(
        "random".parse::<ExpertPlacement>().unwrap_err().to_string(),
        "unknown expert placement \"random\"; expected one of linear, round_robin"
    );
    assert_eq!(
        "fast".parse::<DeepEpMode>().unwrap_err().to_string(),
        "unknown DeepEP mode \"fast\"; expected one of auto, high_throughput, low_latency"
    );
}

#[test]
fn settings_that_are_refused() {
    let refused = |config: ParallelConfig| config.geometry(0).unwrap_err().to_string();
    let table = [
        (config(0, 1, false), "tp must be at least 1, got 0"),
        (config(1, 0, true), "dp must be at least 1, got 0"),
        (
            config(MAX_WORLD_SIZE, 2, false),
            "dp 2 x tp 65536 is more than 65536 ranks, the most that is supported",
        ),
        (
            with_backend(2, 1, false, "deepep"),
            "the MoE backend deepep needs expert parallelism; add `enable_expert_parallel`, or choose auto or disabled",
        ),
        (
            with_backend(2, 2, true, "off"),
            "expert parallelism is enabled but the MoE backend is disabled; drop `enable_expert_parallel`, or choose \
             auto, local_allreduce, allgather_reducescatter or deepep",
        ),
        (
            with_backend(1, 2, true, "dp1"),
            "the MoE backend local_allreduce needs the same tokens on every rank, so dp must be 1, got 2; choose \
             auto, allgather_reducescatter or deepep",
        ),
        (
            ParallelConfig { deepep_mode: DeepEpMode::LowLatency, ..config(1, 2, true) },
            "the DeepEP mode low_latency has no effect on the MoE backend allgather_reducescatter; choose deepep, or \
             the mode auto",
        ),
    ];
    for (config, expected) in table {
        assert_eq!(refused(config), expected);
    }
    let error = config(usize::MAX, 2, false).world_size().unwrap_err().to_string();
    assert!(error.ends_with("is more than 65536 ranks, the most that is supported"), "{error}");
    assert_eq!(
        config(2, 2, true).geometry(4).unwrap_err().to_string(),
        "rank 4 is outside of a world of 4 (dp x tp) ranks"
    );
    let candle: moe_comm::candle::Error = config(0, 1, false).world_size().unwrap_err().into();
    assert_eq!(crate::support::text(candle), "tp must be at least 1, got 0");
}

#[test]
fn placements() {
    use ExpertPlacement::{Linear, RoundRobin};
    let locals = |p: usize, ep: usize, placement| -> Vec<Vec<u32>> {
        (0..ep).map(|r| ExpertLayout::new(p, ep, r, placement).unwrap().local_experts).collect()
    };
    assert_eq!(locals(8, 2, Linear), [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    assert_eq!(locals(8, 3, Linear), [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7]]);
    assert_eq!(locals(8, 3, RoundRobin), [vec![0, 3, 6], vec![1, 4, 7], vec![2, 5]]);
    assert_eq!(locals(2, 4, Linear), [vec![0], vec![1], vec![], vec![]]);
    assert_eq!(locals(2, 4, RoundRobin), [vec![0], vec![1], vec![], vec![]]);

    let layout = ExpertLayout::new(5, 2, 1, RoundRobin).unwrap();
    assert_eq!(layout.expert_map, Some(vec![-1, 0, -1, 1, -1]));
    assert_eq!(layout.owners, [0, 1, 0, 1, 0]);
    let one = ExpertLayout::new(3, 1, 0, Linear).unwrap();
    assert_eq!((one.expert_map.clone(), one.num_experts(), one.num_local_experts()), (None, 3, 3));

    // Only expert parallelism distributes experts.
    let round_robin = |ep| ParallelConfig { placement: RoundRobin, ..config(2, 2, ep) }.geometry(3).unwrap();
    assert_eq!(round_robin(true).expert_layout(6).unwrap().local_experts, [3]);
    assert_eq!(round_robin(false).expert_layout(6).unwrap().num_local_experts(), 6);

    let error = |p, ep, rank| ExpertLayout::new(p, ep, rank, Linear).unwrap_err().to_string();
    assert_eq!(error(0, 2, 0), "the number of experts must be between 1 and 2147483647, got 0");
    assert_eq!(
        error(usize::MAX, 2, 0),
        format!("the number of experts must be between 1 and 2147483647, got {}", usize::MAX)
    );
    assert_eq!(error(4, 0, 0), "ep must be at least 1, got 0");
    assert_eq!(error(4, 2, 2), "rank 2 is outside of a world of 2 (dp x tp) ranks");
}

#[test]
fn expert_intermediate_sizes() {
    let shard = |tp, dp, ep, rank, size| config(tp, dp, ep).geometry(rank).unwrap().expert_intermediate(size);
    let got = shard(2, 2, false, 3, 768).unwrap();
    assert_eq!((got.range, got.segments, got.local_segments, got.size), (384..768, 8, 4..8, 768));
    // With expert parallelism an expert is never cut, so any size is allowed.
    let got = shard(3, 2, true, 4, 99).unwrap();
    assert_eq!((got.range, got.segments, got.local_segments), (0..99, 1, 0..1));
    assert_eq!(
        shard(4, 1, false, 0, 30).unwrap_err().to_string(),
        "the experts' intermediate size 30 is not divisible by tp 4; choose a tp that divides it, or enable expert \
         parallelism (`enable_expert_parallel`)"
    );
    assert_eq!(
        shard(3, 1, false, 0, 96).unwrap_err().to_string(),
        "the experts' intermediate size 96 is added up in 8 segments, which tp 3 does not divide; choose a tp that \
         divides 8, or enable expert parallelism (`enable_expert_parallel`)"
    );
}

#[test]
fn dense_shards() {
    let g = config(4, 2, true).geometry(6).unwrap();
    assert_eq!(g.row_shard("the intermediate size", 16).unwrap().local_segments, 4..6);
    let error = g.row_shard("the intermediate size", 12).unwrap();
    assert_eq!((error.segments, error.range), (4, 6..9));
    let error =
        config(6, 1, true).geometry(0).unwrap().row_shard("the attention width", 36).unwrap_err().to_string();
    assert_eq!(
        error,
        "the attention width 36 is added up in 4 segments, which tp 6 does not divide; choose a tp that divides 4"
    );
    let error = g.row_shard("the intermediate size", 18).unwrap_err().to_string();
    assert_eq!(error, "the intermediate size 18 is not divisible by tp 4; choose a tp that divides it");
    let rows: Vec<_> = (0..4).map(|r| config(4, 1, false).geometry(r).unwrap().vocab_shard(10)).collect();
    assert_eq!(rows, [0..3, 3..6, 6..8, 8..10]);
}

#[test]
fn attention_heads() {
    let heads = |tp, rank, q, kv| config(tp, 1, false).geometry(rank).unwrap().attention_heads(q, kv);
    let table = [
        // Columns: tp, rank, query heads, KV heads; then the rank's query heads, its KV heads, and the number of
        // replicas.
        (1, 0, 32, 4, 0..32, 0..4, 1),
        (2, 1, 32, 4, 16..32, 2..4, 1),
        (4, 3, 32, 4, 24..32, 3..4, 1),
        (8, 5, 32, 4, 20..24, 2..3, 2),
        (8, 7, 16, 1, 14..16, 0..1, 8),
    ];
    for (tp, rank, q, kv, q_range, kv_range, replicas) in table {
        let got = heads(tp, rank, q, kv).unwrap();
        assert_eq!((got.heads, got.kv_heads, got.kv_replicas), (q_range, kv_range, replicas), "tp {tp}");
    }
    assert_eq!(
        heads(4, 0, 12, 6).unwrap_err().to_string(),
        "6 KV heads can neither be split over tp 4 nor replicated; choose a tp that divides 6 or is a multiple of it"
    );
    assert_eq!(
        heads(4, 0, 6, 2).unwrap_err().to_string(),
        "the number of query heads 6 is not divisible by tp 4; choose a tp that divides it"
    );
    for kv in [0, 5] {
        let expected =
            format!("8 query heads cannot be grouped over {kv} KV heads; the latter must divide the former");
        assert_eq!(heads(2, 0, 8, kv).unwrap_err().to_string(), expected);
    }
}

proptest! {
    #[test]
    fn a_partition_covers_everything_once(len in 0..200usize, parts in 1..20usize) {
        let runs: Vec<_> = (0..parts).map(|i| partition(len, parts, i)).collect();
        prop_assert_eq!(runs.iter().cloned().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
        let sizes: Vec<usize> = runs.iter().map(|r| r.len()).collect();
        prop_assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[parts - 1] <= 1);
        prop_assert_eq!(partition(len, parts, parts + 3), len..len);
    }

    #[test]
    fn every_expert_has_one_owner(p in 1..64usize, ep in 1..80usize, round_robin: bool) {
        let placement = if round_robin { ExpertPlacement::RoundRobin } else { ExpertPlacement::Linear };
        let mut seen = vec![0; p];
        for rank in 0..ep {
            let layout = ExpertLayout::new(p, ep, rank, placement).unwrap();
            prop_assert!((p / ep..=p.div_ceil(ep)).contains(&layout.num_local_experts()));
            for (slot, &expert) in layout.local_experts.iter().enumerate() {
                seen[expert as usize] += 1;
                prop_assert_eq!(layout.owners[expert as usize] as usize, rank);
                if let Some(map) = &layout.expert_map {
                    prop_assert_eq!(map[expert as usize], slot as i32);
                }
            }
            let mapped = layout.expert_map.iter().flatten().filter(|&&slot| slot >= 0).count();
            prop_assert!(ep == 1 || mapped == layout.num_local_experts());
        }
        prop_assert_eq!(seen, vec![1; p]);
    }

    /// A query head's KV head is always on the query head's rank.
    #[test]
    fn kv_heads_follow_their_query_heads(tp in 1..17usize, kv in 1..17usize, group in 1..9usize) {
        let q = kv * group;
        for rank in 0..tp {
            let Ok(shard) = config(tp, 1, false).geometry(rank).unwrap().attention_heads(q, kv) else {
                prop_assert!(q % tp != 0 || (kv % tp != 0 && tp % kv != 0));
                continue;
            };
            prop_assert_eq!(shard.heads.len() * tp, q);
            prop_assert_eq!(shard.kv_heads.len() * tp, kv * shard.kv_replicas);
            for head in shard.heads {
                prop_assert!(shard.kv_heads.contains(&(head / group)));
            }
        }
    }

    /// Ranks hold whole segments of equal length, and together all of them.
    #[test]
    fn row_shards_are_whole_segments(tp in 1..17usize, k in 1..200usize) {
        let segments = row_parallel_segments(k);
        let mut end = (0, 0);
        for rank in 0..tp {
            match config(tp, 1, false).geometry(rank).unwrap().row_shard("K", k) {
                Err(_) => prop_assert!(!segments.is_multiple_of(tp)),
                Ok(shard) => {
                    prop_assert_eq!((shard.range.start, shard.local_segments.start), end);
                    prop_assert_eq!(shard.range.len(), shard.local_segments.len() * (k / segments));
                    end = (shard.range.end, shard.local_segments.end);
                }
            }
        }
        prop_assert!(!segments.is_multiple_of(tp) || end == (k, segments));
    }
}
