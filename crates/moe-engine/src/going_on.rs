//! Going on with the ranks that are left, where replicas share experts: they form the world again and load the model as
//! it is cut over fewer ranks.
//!
//! The whole model is loaded again, because a rank's experts are packed, and its layers hold the communicators of the
//! old world. The old model is dropped first, so that no rank ever holds both.

use std::time::Instant;

use candle_core::DType;
use moe_layer::hf::NUM_EXPERTS;

use crate::error::{Context, Result, bail, ensure};
use crate::footprint::{Footprint, gib};
use crate::loss::Loss;
use crate::parallel::{Hosts, Ranks};
use crate::run::{Opened, Run};
use crate::run_config::RunConfig;

impl Run {
    /// Whether the ranks that are left may go on after the error of this process's rank.
    pub(crate) fn may_go_on(&self) -> bool {
        self.processes.as_ref().is_some_and(|processes| processes.may_regroup())
    }

    /// Loads the model again on the ranks that are left. This process holds nothing of the old one.
    ///
    /// # Errors
    /// The ranks that are left cannot hold the model, or no rank was lost. All of them then end.
    pub(crate) fn go_on(&mut self, opened: &Opened) -> Result<(Ranks, serde_json::Value, Loss)> {
        let gone_on = self.regroup_and_load(opened);
        if let (Err(e), Some(processes)) = (&gone_on, &self.processes) {
            processes.fail(&format!("{e:#}"));
        }
        gone_on
    }

    fn regroup_and_load(&mut self, opened: &Opened) -> Result<(Ranks, serde_json::Value, Loss)> {
        let mut why = Vec::new();
        loop {
            let Some(mut processes) = self.processes.take() else { bail!("there are no other processes") };
            let regrouped = processes.regroup(|hosts| self.check_left(opened, hosts));
            let ranks = processes.world_size();
            let replicas = processes.replicas;
            self.processes = Some(processes);
            why.extend(regrouped?);
            self.config = self.config_of(opened, ranks)?;
            let start = Instant::now();
            match self.load(opened) {
                // Another rank was lost.
                Err(_) if self.may_go_on() => {}
                loaded => {
                    let (ranks, backend) = loaded?;
                    let left = [self.config.parallel.dp, replicas];
                    return Ok((ranks, backend, Loss { why, left, loading: start.elapsed() }));
                }
            }
        }
    }

    fn config_of(&self, opened: &Opened, ranks: usize) -> Result<RunConfig> {
        let experts = opened.config().opt_size(&NUM_EXPERTS, 1..=1 << 20).context("the number of experts")?;
        self.config.with_replicas(ranks / self.config.parallel.tp, experts.unwrap_or(1))
    }

    /// Checks that the ranks that are left can hold the model.
    fn check_left(&self, opened: &Opened, hosts: &Hosts) -> Result<()> {
        if self.config.skip_memory_check {
            return Ok(());
        }
        let ranks = hosts.values().map(|(_, ranks)| ranks.len()).sum();
        let config = self.config_of(opened, ranks)?;
        for (free, ranks) in hosts.values() {
            let need = opened.footprint(self, &config, ranks)?;
            check_room(&need, *free, ranks.len())?;
        }
        Ok(())
    }
}

/// Checks that a host has room for the weights of its ranks.
fn check_room(need: &Footprint, free: Option<u64>, ranks: usize) -> Result<()> {
    let need = need.weights + need.copies;
    let free = free.unwrap_or(u64::MAX);
    ensure!(
        need <= free,
        "the run cannot go on without a lost rank: with its experts the {ranks} ranks that are left on a host need {} of \
         memory, and {} are free; a rerun continues the output, with more memory or as many ranks as before (with \
         `skip_memory_check` the run loads them all the same)",
        gib(need),
        gib(free)
    );
    Ok(())
}

impl Opened {
    fn config(&self) -> &model_runtime::Config {
        match self {
            Self::Checkpoint(checkpoint) => &checkpoint.config,
            Self::Random(config) => config,
        }
    }

    fn footprint(&self, run: &Run, config: &RunConfig, ranks: &[usize]) -> Result<Footprint> {
        let raw = self.config();
        let quantisation = match self {
            Self::Checkpoint(checkpoint) => checkpoint.quantisation.clone(),
            Self::Random(raw) => config.held(raw.quantisation()?)?,
        };
        let dtype = match self {
            Self::Checkpoint(checkpoint) => config.dtype.map_or_else(|| checkpoint.dtype(), Ok)?,
            Self::Random(raw) => {
                config.dtype.map_or_else(|| raw.dtype(), |dtype| Ok(Some(dtype)))?.unwrap_or(DType::F32)
            }
        };
        let model = run.families.parse(raw)?;
        Footprint::of(model.as_ref(), raw, quantisation.as_ref(), config, ranks.iter().copied(), dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_told_in_numbers() {
        let need = Footprint { weights: 3 << 30, copies: 1 << 30, ..Footprint::default() };
        assert!(check_room(&need, Some(4 << 30), 2).is_ok() && check_room(&need, None, 2).is_ok());
        let error = check_room(&need, Some((4 << 30) - 1), 2).unwrap_err().to_string();
        assert!(error.contains("2 ranks that are left on a host need 4.00 GiB"), "{error}");
        assert!(error.contains("a rerun continues the output"), "{error}");
        assert!(error.contains("`skip_memory_check`"), "{error}");
    }
}
