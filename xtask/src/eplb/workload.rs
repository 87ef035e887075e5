//! Workload files: seeded synthetic loads in three windows (see tests/bench/eplb/eplb_workloads.py).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use moe_eplb::{Loads, Topology};
use serde_json::Value;

/// One workload, cut into its windows.
pub struct Workload {
    pub name: String,
    pub topology: Topology,
    /// Every episode.
    pub all: Loads,
    pub profile: Loads,
    pub heldout: Option<Loads>,
    pub drift: Option<Loads>,
}

/// The workload files of a folder, by name.
pub fn files(dir: &Path, only: &[String]) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().replace("__", "/");
        let wanted = only.is_empty() || only.iter().any(|o| stem.contains(o.as_str()));
        if wanted && path.extension().is_some_and(|e| e == "json") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        bail!("no workload file in {}; eplb_workloads.py --out DIR makes them", dir.display());
    }
    Ok(files)
}

/// Reads one file.
pub fn read(path: &Path) -> Result<Workload> {
    let parse = || -> Result<Workload> {
        let value: Value = serde_json::from_slice(&std::fs::read(path)?)?;
        let number = |key: &str| -> Result<usize> {
            value[key].as_u64().map(|v| v as usize).with_context(|| format!("no number `{key}`"))
        };
        let topology = Topology::new(number("experts")?, number("slots")?, number("devices")?)?
            .with_nodes(number("nodes")?, number("groups")?)?;
        let episodes = value["loads"].as_array().context("no array `loads`")?;
        let window = |name: &str| -> Result<Option<Loads>> {
            let bounds = &value["windows"][name];
            let (Some(low), Some(high)) = (bounds[0].as_u64(), bounds[1].as_u64()) else { return Ok(None) };
            let part = episodes.get(low as usize..high as usize).context("window beyond the loads")?;
            loads(part, topology.experts()).map(Some)
        };
        Ok(Workload {
            name: value["name"].as_str().context("no string `name`")?.to_owned(),
            topology,
            all: loads(episodes, topology.experts())?,
            profile: window("profile")?.context("no window `profile`")?,
            heldout: window("heldout")?,
            drift: window("drift")?,
        })
    };
    parse().with_context(|| format!("bad workload {}", path.display()))
}

/// `loads[episode][layer][expert]` of one window.
fn loads(episodes: &[Value], experts: usize) -> Result<Loads> {
    let mut values = Vec::new();
    let mut layers = 0;
    for episode in episodes {
        let rows = episode.as_array().context("an episode is not an array")?;
        layers = rows.len();
        for row in rows {
            let row = row.as_array().context("a layer is not an array")?;
            values.extend(row.iter().map(|v| v.as_f64().unwrap_or(f64::NAN)));
        }
    }
    Ok(Loads::episodes(episodes.len(), layers, experts, &values)?)
}
