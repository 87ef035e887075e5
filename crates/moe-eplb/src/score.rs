//! How balanced a placement is: peak device load over mean device load (PAR), 1.0 is perfect.

use std::borrow::Cow;

use crate::error::{Error, Result, expect_below, expect_len, expect_multiple, expect_some};
use crate::loads::{Loads, check_loads, sum_steps};
use crate::placement::Placement;

/// The loads over which the peak is taken.
// This enum is exhaustive: every policy must say how it minimises a new objective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Objective {
    /// The peak of the loads summed over the window.
    Aggregate,
    /// The mean over episodes of each episode's own peak: what a server waits for.
    #[default]
    Episode,
}

impl Objective {
    /// The episodes `[steps, experts]` whose peaks count: all of `loads`, or their sum as one.
    pub(crate) fn episodes(self, loads: &[f64], experts: usize) -> Cow<'_, [f64]> {
        match self {
            Self::Episode => loads.into(),
            Self::Aggregate => sum_steps(loads, experts).into(),
        }
    }
}

/// PAR of one layer: `loads` `[steps, experts]`, `slots` the expert of every slot. A step without
/// load counts as perfectly balanced; without any step the result is NaN.
///
/// # Errors
/// No expert or device; slots that do not divide evenly over the devices, or none; a slot with an expert that does not
/// exist; loads that are no multiple of the experts; a load that is NaN, infinite or negative; loads whose sum is more
/// than an f32 holds; an expert with load and without a slot.
pub fn layer_par(
    loads: &[f64],
    slots: &[u32],
    experts: usize,
    devices: usize,
    objective: Objective,
) -> Result<f64> {
    expect_some(&[("experts", experts), ("devices", devices), ("slots", slots.len())])?;
    expect_multiple(("slots", slots.len()), ("devices", devices))?;
    expect_multiple(("loads", loads.len()), ("experts", experts))?;
    slots.iter().try_for_each(|&e| expect_below("expert", e as usize, experts))?;
    check_loads(loads, experts)?;
    expect_placed(0, loads, slots, experts)?;
    Ok(known_par(loads, slots, experts, devices, objective))
}

/// Fails if an expert has load but no slot: its load would be missing from the peak.
fn expect_placed(layer: usize, loads: &[f64], slots: &[u32], experts: usize) -> Result<()> {
    let mut placed = vec![false; experts];
    slots.iter().for_each(|&e| placed[e as usize] = true);
    let lost = loads.iter().enumerate().find(|(i, load)| **load > 0.0 && !placed[i % experts]);
    lost.map_or(Ok(()), |(i, _)| Err(Error::MissingExpert { layer, expert: i % experts }))
}

/// This is [`layer_par`] for arguments that are known to fit.
pub(crate) fn known_par(
    loads: &[f64],
    slots: &[u32],
    experts: usize,
    devices: usize,
    objective: Objective,
) -> f64 {
    let loads = objective.episodes(loads, experts);
    let mut copies = vec![0.0f64; experts];
    for &e in slots {
        copies[e as usize] += 1.0;
    }
    let k = slots.len() / devices;
    let mut unit = vec![0.0; experts];
    let mut sum = 0.0;
    for step in loads.chunks_exact(experts) {
        let total: f64 = step.iter().sum();
        for ((unit, load), copies) in unit.iter_mut().zip(step).zip(&copies) {
            *unit = load / copies;
        }
        let device_load = |row: &[u32]| row.iter().map(|&e| unit[e as usize]).sum::<f64>();
        let peak = slots.chunks_exact(k).map(device_load).fold(0.0, f64::max);
        sum += if total > 0.0 { peak * devices as f64 / total } else { 1.0 };
    }
    sum / (loads.len() / experts) as f64
}

/// PAR of every layer.
///
/// # Errors
/// A placement of another number of layers or experts than the loads; an expert with load and without a slot.
pub fn par(loads: &Loads, placement: &Placement, objective: Objective) -> Result<Vec<f64>> {
    let experts = loads.experts();
    expect_len("layers of the placement", loads.layers(), placement.layers())?;
    expect_len("experts of the placement", experts, placement.experts())?;
    let devices = placement.slots() / placement.slots_per_device();
    let of = |l| {
        expect_placed(l, loads.layer(l), placement.layer(l), experts)?;
        Ok(known_par(loads.layer(l), placement.layer(l), experts, devices, objective))
    };
    (0..loads.layers()).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_device_counts() -> Result<()> {
        let par = layer_par(&[3.0, 1.0, 2.0, 2.0], &[0, 1, 0, 1], 2, 2, Objective::Episode)?;
        assert_eq!(par, 1.0);
        assert_eq!(layer_par(&[3.0, 1.0], &[0, 1], 2, 2, Objective::Episode)?, 1.5);
        assert!(layer_par(&[], &[0, 1], 2, 2, Objective::Episode)?.is_nan());
        Ok(())
    }

    /// Three slots on two devices would count as three devices with one slot each, and give a wrong number.
    #[test]
    fn arguments_that_do_not_fit_are_named() {
        let said = |loads: &[f64], slots: &[u32], experts, devices| {
            layer_par(loads, slots, experts, devices, Objective::Episode).unwrap_err().to_string()
        };
        assert_eq!(said(&[3.0, 1.0], &[0, 1, 0], 2, 2), "3 slots cannot be divided evenly over 2 devices");
        assert_eq!(said(&[3.0, 1.0], &[0, 1], 2, 0), "devices must be at least 1");
        assert_eq!(said(&[3.0, 1.0], &[], 2, 2), "slots must be at least 1");
        assert_eq!(said(&[3.0, 1.0], &[0, 2], 2, 2), "expert 2 is out of range 0..2");
        assert_eq!(said(&[3.0, 1.0], &[0, 0], 2, 2), "layer 0: expert 1 has no copy");
        let bad = "load of step 0, layer 0, expert 1 is NaN; loads must be finite and >= 0";
        assert_eq!(said(&[3.0, f64::NAN], &[0, 1], 2, 2), bad);
        assert_eq!(said(&[3.0], &[0, 1], 2, 2), "1 loads cannot be divided evenly over 2 experts");
    }
}
