//! Which experts each rank holds: the settings of a run, and the file of a planned placement.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moe_comm::{ExpertPlacement, ParallelConfig, ReplicaChoice};
use moe_eplb::json::read_expert_rows;
use moe_layer::{ExpertPlacements, checksum};

use crate::error::{Context, Result, usage};

/// How experts are placed on the ranks. By default there is one copy of each expert, and it never moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementConfig {
    /// An expert map, as `cargo xtask eplb plan` writes one.
    pub expert_map: Option<PathBuf>,
    /// Slots beyond one per expert, all ranks together.
    pub num_redundant_experts: usize,
    /// Which copy of an expert computes a row.
    pub replicas: ReplicaChoice,
}

impl PlacementConfig {
    /// Checks that the ranks can hold experts in this way. `movable` says whether experts move during the run.
    ///
    /// # Errors
    /// A [`UsageError`](crate::UsageError) for settings that contradict each other or need more ranks.
    pub(crate) fn check(&self, parallel: &ParallelConfig, movable: bool) -> Result<()> {
        let asked = match (movable, &self.expert_map, self.num_redundant_experts) {
            (true, ..) => "`eplb`",
            (_, Some(_), _) => "`expert_map`",
            (_, _, 1..) => "`num_redundant_experts`",
            _ => return Ok(()),
        };
        let ranks = parallel.world_size()?;
        if !parallel.enable_expert_parallel || ranks < 2 {
            return Err(usage(format!(
                "{asked} needs experts spread over at least two ranks: add `enable_expert_parallel` and `tp` or `dp`"
            )));
        }
        if parallel.placement != ExpertPlacement::Linear {
            let name = parallel.placement;
            return Err(usage(format!("{asked} places experts itself; drop `placement` {name}")));
        }
        if self.expert_map.is_some() && self.num_redundant_experts > 0 {
            return Err(usage("`expert_map` says how many copies there are; drop `num_redundant_experts`"));
        }
        Ok(())
    }

    /// Returns the settings for the layers, after reading the file if there is one.
    ///
    /// # Errors
    /// A file that cannot be read or is no expert map.
    pub(crate) fn read(&self, movable: bool) -> Result<ExpertPlacements> {
        let table = self.expert_map.as_deref().map(read_table).transpose()?;
        Ok(ExpertPlacements {
            table,
            num_redundant_experts: self.num_redundant_experts,
            replicas: self.replicas,
            movable,
        })
    }

    /// These settings on another number of ranks, with as many redundant experts as give every rank the same number of
    /// slots, but no more than one copy of an expert on each rank.
    pub(crate) fn on_ranks(&self, ranks: usize, experts: usize, movable: bool) -> Self {
        let even = (experts + self.num_redundant_experts).next_multiple_of(ranks) - experts;
        let has_copies = movable || self.num_redundant_experts > 0;
        let num_redundant_experts = if has_copies { even.min(experts * (ranks - 1)) } else { 0 };
        Self { expert_map: None, num_redundant_experts, replicas: self.replicas }
    }

    /// The settings that must be the same on all ranks, as names and values.
    pub(crate) fn agreed(&self) -> [(&'static str, String); 3] {
        let file = self.expert_map.as_deref().map_or("none".to_string(), |path| match std::fs::read(path) {
            Ok(bytes) => format!("a file with the checksum {:016x}", checksum(&bytes)),
            Err(e) => format!("a file that cannot be read ({e})"),
        });
        [
            ("`expert_map`", file),
            ("`num_redundant_experts`", self.num_redundant_experts.to_string()),
            ("`replicas`", self.replicas.to_string()),
        ]
    }
}

fn read_table(path: &Path) -> Result<Arc<[Vec<Vec<u32>>]>> {
    let describe = || format!("`expert_map` {}", path.display());
    let text = std::fs::read(path).with_context(describe)?;
    let document = serde_json::from_slice(&text).with_context(describe)?;
    Ok(read_expert_rows(&document).with_context(describe)?.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const EP: ParallelConfig = ParallelConfig {
        tp: 2,
        dp: 1,
        enable_expert_parallel: true,
        backend: moe_comm::EpBackendChoice::Auto,
        placement: ExpertPlacement::Linear,
        deepep_mode: moe_comm::DeepEpMode::Auto,
    };

    #[test]
    fn what_cannot_be_placed_is_refused_by_flag() {
        let redundant = PlacementConfig { num_redundant_experts: 2, ..PlacementConfig::default() };
        let map = PlacementConfig { expert_map: Some("a.json".into()), ..PlacementConfig::default() };
        let both = PlacementConfig { num_redundant_experts: 2, ..map.clone() };
        let none = PlacementConfig::default();
        let alone = ParallelConfig { tp: 1, ..EP };
        let turns = ParallelConfig { placement: ExpertPlacement::RoundRobin, ..EP };
        assert!(none.check(&alone, false).is_ok());
        for config in [&redundant, &map] {
            assert!(config.check(&EP, true).is_ok());
        }
        for (config, parallel, movable, said) in [
            (&none, &alone, true, "`eplb` needs experts spread"),
            (&redundant, &alone, false, "`num_redundant_experts` needs"),
            (&map, &ParallelConfig { enable_expert_parallel: false, ..EP }, false, "`expert_map` needs"),
            (&map, &turns, false, "drop `placement` round_robin"),
            (&both, &EP, false, "drop `num_redundant_experts`"),
        ] {
            let error = config.check(parallel, movable).unwrap_err();
            assert!(
                error.downcast_ref::<crate::UsageError>().is_some() && error.to_string().contains(said),
                "{error}"
            );
        }
    }

    #[test]
    fn fewer_ranks_have_equal_numbers_of_slots() {
        let copies = |redundant, ranks, movable| {
            let config = PlacementConfig { num_redundant_experts: redundant, ..PlacementConfig::default() };
            config.on_ranks(ranks, 16, movable).num_redundant_experts
        };
        assert_eq!(
            [copies(4, 3, true), copies(5, 2, true), copies(0, 3, true), copies(0, 3, false)],
            [5, 6, 2, 0]
        );
        // A rank has at most one copy of each expert.
        assert_eq!([copies(40, 3, true), copies(4, 1, false), copies(4, 3, false)], [32, 0, 5]);
    }

    #[test]
    fn maps_are_read_with_ranks_of_different_sizes() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let text = r#"{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list":
            [{"device_id": 1, "device_expert": [2]}, {"device_id": 0, "device_expert": [0, 1]}]}]}"#;
        file.write_all(text.as_bytes()).unwrap();
        let config = PlacementConfig { expert_map: Some(file.path().into()), ..PlacementConfig::default() };
        assert_eq!(config.read(false).unwrap().table.unwrap()[..], [vec![vec![0, 1], vec![2]]]);
        assert!(config.agreed()[0].1.contains("checksum"));
        let missing = PlacementConfig { expert_map: Some("/no/such.json".into()), ..config.clone() };
        let error = format!("{:#}", missing.read(false).unwrap_err());
        assert!(error.contains("`expert_map` /no/such.json"), "{error}");
        std::fs::write(file.path(), "{}").unwrap();
        let error = format!("{:#}", config.read(false).unwrap_err());
        assert!(error.contains("layer_list is not an array"), "{error}");
    }
}
