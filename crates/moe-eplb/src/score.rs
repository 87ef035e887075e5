//! How balanced a placement is: peak device load over mean device load (PAR), 1.0 is perfect.

use std::borrow::Cow;

use crate::loads::{Loads, sum_steps};
use crate::placement::Placement;

/// Over what the peak is taken.
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
/// # Panics
/// If `experts` or `devices` is 0, the slots do not divide evenly over the devices, a device has no slot, or a slot holds no
/// expert below `experts`.
pub fn layer_par(loads: &[f64], slots: &[u32], experts: usize, devices: usize, objective: Objective) -> f64 {
    assert!(
        experts > 0 && devices > 0 && slots.len() >= devices && slots.len().is_multiple_of(devices),
        "PAR of {} slots on {devices} devices with {experts} experts: expected as many slots, at least 1, on each device",
        slots.len()
    );
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
/// # Panics
/// If the placement has fewer layers than the loads.
pub fn par(loads: &Loads, placement: &Placement, objective: Objective) -> Vec<f64> {
    let devices = placement.slots() / placement.slots_per_device();
    (0..loads.layers())
        .map(|l| layer_par(loads.layer(l), placement.layer(l), loads.experts(), devices, objective))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_device_counts() {
        let par = layer_par(&[3.0, 1.0, 2.0, 2.0], &[0, 1, 0, 1], 2, 2, Objective::Episode);
        assert_eq!(par, 1.0);
        assert_eq!(layer_par(&[3.0, 1.0], &[0, 1], 2, 2, Objective::Episode), 1.5);
        assert!(layer_par(&[], &[0, 1], 2, 2, Objective::Episode).is_nan());
    }

    /// As three devices of one slot they would give a number, and a wrong one.
    #[test]
    #[should_panic(expected = "PAR of 3 slots on 2 devices")]
    fn slots_that_no_device_has_are_refused() {
        layer_par(&[3.0, 1.0], &[0, 1, 0], 2, 2, Objective::Episode);
    }

    #[test]
    #[should_panic(expected = "on 0 devices")]
    fn no_device_is_refused() {
        layer_par(&[3.0, 1.0], &[0, 1], 2, 0, Objective::Episode);
    }
}
