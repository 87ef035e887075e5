//! Which physical experts this rank holds.

use candle_core::{Device, Result};
use moe_kernels::{Buffer, Exec, View};

use crate::error::refuse;

/// The experts of this rank: their number, and the local slot of each physical expert.
#[derive(Debug)]
pub struct LocalExperts {
    num_local: usize,
    expert_map: Option<Buffer>,
}

impl LocalExperts {
    /// All experts are on this rank, and the physical id is the local slot.
    pub fn all(num_experts: usize) -> Self {
        Self { num_local: num_experts, expert_map: None }
    }

    /// `expert_map` \[P\] holds the local slot in `0..num_local` of each physical expert, or -1 if another rank holds
    /// it. Any placement is allowed, and a local slot may stay unused.
    ///
    /// # Errors
    /// An entry outside of -1..num_local; two experts in one slot.
    pub fn from_map(expert_map: &[i32], num_local: usize) -> Result<Self> {
        let mut slots: Vec<(i32, usize)> = Vec::new();
        for (expert, &slot) in expert_map.iter().enumerate().filter(|(_, slot)| **slot != -1) {
            if usize::try_from(slot).map_or(true, |slot| slot >= num_local) {
                refuse!(
                    ExpertMap,
                    "expert_map sends expert {expert} to local slot {slot}; expected -1 or 0..{num_local}"
                )
            }
            slots.push((slot, expert));
        }
        slots.sort_unstable();
        for pair in slots.windows(2) {
            if let [(a, first), (b, second)] = *pair
                && a == b
            {
                refuse!(ExpertMap, "expert_map sends experts {first} and {second} to one local slot, {a}")
            }
        }
        let expert_map = Buffer::from_vec(expert_map.to_vec(), &[expert_map.len()])?;
        Ok(Self { num_local, expert_map: Some(expert_map) })
    }

    /// The same experts, with the map on the device of the experts and the rows. `from_map` makes the map on the CPU.
    pub fn on(self, device: &Device) -> Result<Self> {
        let Some(map) = self.expert_map.as_ref().filter(|_| !device.is_cpu()) else { return Ok(self) };
        let expert_map = Some(Exec::on(device)?.buffer_from_host(map.view())?);
        Ok(Self { expert_map, ..self })
    }

    /// Number of local slots E_local.
    pub fn num_local(&self) -> usize {
        self.num_local
    }

    /// Number of physical experts P: the ids that a router may choose are `0..P`.
    pub fn num_experts(&self) -> usize {
        self.expert_map.as_ref().map_or(self.num_local, |map| map.view().elem_count())
    }

    /// The local slot of each physical expert, \[P\] i32, -1 if another rank holds it. `None` means that all are on
    /// this rank.
    pub fn expert_map(&self) -> Option<View<'_>> {
        self.expert_map.as_ref().map(Buffer::view)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_with_holes_are_taken_and_bad_ones_named() -> Result<()> {
        let experts = LocalExperts::from_map(&[-1, 2, -1, 0], 4)?;
        assert_eq!((experts.num_local(), experts.num_experts()), (4, 4));
        assert_eq!(LocalExperts::from_map(&[-1, 0, -1], 1)?.num_experts(), 3);
        assert_eq!(LocalExperts::all(5).num_experts(), 5);
        assert_eq!(experts.expert_map().unwrap().cpu::<i32>()?, &[-1, 2, -1, 0]);
        let message = |map, n| LocalExperts::from_map(map, n).unwrap_err().to_string();
        assert!(message(&[0, 4], 4).contains("expert 1 to local slot 4; expected -1 or 0..4"));
        assert!(message(&[-2], 4).contains("local slot -2"));
        assert!(message(&[1, -1, 1], 2).contains("experts 0 and 2 to one local slot, 1"));
        Ok(())
    }
}
