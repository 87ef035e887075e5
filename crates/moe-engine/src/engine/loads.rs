//! The expert counts of steps, over all data-parallel ranks.

use super::StepLoad;
use super::dp::DpEngine;
use crate::error::Result;
use crate::heat::Stage;

impl DpEngine<'_> {
    /// The expert counts of the last step, if experts are counted. In lockstep it is one count for all ranks together,
    /// otherwise one count for each step of a rank.
    pub fn take_step_loads(&mut self) -> Vec<StepLoad> {
        std::mem::take(&mut self.step_loads)
    }

    /// Writes the expert counts that have arrived to the trace and returns them. In lockstep the counts of all ranks
    /// are added up.
    pub(super) fn keep_loads(&mut self) -> Result<Vec<StepLoad>> {
        let mut loads: Vec<StepLoad> =
            self.arrived.iter_mut().flat_map(|rank| std::mem::take(&mut rank.loads)).collect();
        if !self.peers.is_empty() || self.steps > 0 {
            if self.lockstep {
                let all = loads.into_iter().reduce(|mut all, part| {
                    all.decode_rows += part.decode_rows;
                    all.prefill_rows += part.prefill_rows;
                    all.counts.add(&part.counts);
                    all
                });
                loads = all.into_iter().collect();
            }
            // Each rank counts its own steps.
            loads.iter_mut().zip(self.steps..).for_each(|(load, step)| load.step = step);
            self.steps += loads.len() as u64;
        }
        for load in &loads {
            if let Some(trace) = &mut self.trace {
                let stage = if load.prefill_rows > 0 { Stage::Prefill } else { Stage::Decode };
                trace.write(load.step, stage, &load.counts)?;
            }
        }
        Ok(loads)
    }
}
