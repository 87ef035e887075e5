//! Which experts each rank holds: what a run asks for, and the file of a planned placement.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use moe_comm::{ExpertPlacement, ParallelConfig, ReplicaChoice};
use moe_eplb::json::read_expert_rows;
use moe_layer::{ExpertPlacements, checksum};

use crate::device::DeviceChoice;
use crate::usage;

/// How experts are placed on the ranks. The default is one copy of each, for ever.
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
    /// Whether ranks can hold experts so; `movable`: they may move.
    ///
    /// # Errors
    /// A [`UsageError`](crate::UsageError).
    pub(crate) fn check(&self, parallel: &ParallelConfig, device: DeviceChoice, movable: bool) -> Result<()> {
        let asked = match (movable, &self.expert_map, self.num_redundant_experts) {
            (true, ..) => "--enable-eplb",
            (_, Some(_), _) => "--expert-map",
            (_, _, 1..) => "--num-redundant-experts",
            _ => return Ok(()),
        };
        let ranks = parallel.world_size()?;
        if !parallel.enable_expert_parallel || ranks < 2 {
            return Err(usage(format!(
                "{asked} needs experts spread over at least two ranks: add --enable-expert-parallel and --tp or --dp"
            )));
        }
        if movable && device != DeviceChoice::Cpu {
            return Err(usage(format!(
                "{asked}: experts move on the CPU only; add --device cpu, or drop it"
            )));
        }
        if parallel.placement != ExpertPlacement::Linear {
            let name = parallel.placement;
            return Err(usage(format!(
                "{asked} places experts itself; drop --expert-placement-strategy {name}"
            )));
        }
        if self.expert_map.is_some() && self.num_redundant_experts > 0 {
            return Err(usage("--expert-map says how many copies there are; drop --num-redundant-experts"));
        }
        Ok(())
    }

    /// The settings of the layers; reads the file.
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
            fault: None,
        })
    }

    /// What must be the same on all ranks, as names and values.
    pub(crate) fn agreed(&self) -> [(&'static str, String); 3] {
        let file = self.expert_map.as_deref().map_or("none".to_string(), |path| match std::fs::read(path) {
            Ok(bytes) => format!("a file with the checksum {:016x}", checksum(&bytes)),
            Err(e) => format!("a file that cannot be read ({e})"),
        });
        [
            ("--expert-map", file),
            ("--num-redundant-experts", self.num_redundant_experts.to_string()),
            ("--expert-replicas", self.replicas.to_string()),
        ]
    }
}

fn read_table(path: &Path) -> Result<Arc<[Vec<Vec<u32>>]>> {
    let describe = || format!("--expert-map {}", path.display());
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
        assert!(none.check(&alone, DeviceChoice::Cpu, false).is_ok());
        for config in [&redundant, &map] {
            assert!(config.check(&EP, DeviceChoice::Cpu, true).is_ok());
        }
        for (config, parallel, device, movable, said) in [
            (&none, &alone, DeviceChoice::Cpu, true, "--enable-eplb needs experts spread"),
            (&redundant, &alone, DeviceChoice::Cpu, false, "--num-redundant-experts needs"),
            (
                &map,
                &ParallelConfig { enable_expert_parallel: false, ..EP },
                DeviceChoice::Cpu,
                false,
                "--expert-map needs",
            ),
            (&map, &EP, DeviceChoice::Cuda(None), true, "move on the CPU only"),
            (&map, &turns, DeviceChoice::Cpu, false, "drop --expert-placement-strategy round_robin"),
            (&both, &EP, DeviceChoice::Cpu, false, "drop --num-redundant-experts"),
        ] {
            let error = config.check(parallel, device, movable).unwrap_err();
            assert!(
                error.downcast_ref::<crate::UsageError>().is_some() && error.to_string().contains(said),
                "{error}"
            );
        }
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
        assert!(error.contains("--expert-map /no/such.json"), "{error}");
        std::fs::write(file.path(), "{}").unwrap();
        let error = format!("{:#}", config.read(false).unwrap_err());
        assert!(error.contains("layer_list is not an array"), "{error}");
    }
}
