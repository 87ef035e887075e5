//! Migration: turns the current placement into a new one, one copy at a time.
//!
//! Every transfer overwrites one slot with a copy of an expert that another slot holds. The planner
//! orders them such that no expert ever loses its last complete copy, not even while a transfer is
//! under way. Where slots wait for each other in a circle, the circle is cut by parking one expert
//! in a spare slot (or in a redundant slot, restored afterwards), so one spare slot per device is
//! always enough.

mod check;
mod plan;

pub use check::check_migration;
pub use plan::plan_migration;

use crate::error::{Result, entries, expect_below};
use crate::placement::Placement;
use crate::topology::Topology;

/// A physical place for one expert's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Device that owns the memory.
    pub device: u32,
    /// Slot on the device; from `slots_per_device` on it is a spare.
    pub slot: u32,
}

/// One copy of an expert's weights into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Layer of the expert.
    pub layer: u32,
    /// Logical expert.
    pub expert: u32,
    /// The place from which it is read.
    pub from: Place,
    /// The place that it overwrites.
    pub to: Place,
}

impl Transfer {
    /// Whether the transfer uses no link.
    pub fn is_local(&self) -> bool {
        self.from.device == self.to.device
    }
}

/// What every slot of one layer holds: regular slots and spares, device by device. `None` is a slot
/// without a complete expert, such as one whose transfer was interrupted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    width: usize,
    regular: usize,
    slots: Vec<Option<u32>>,
}

impl Contents {
    /// The slots of a placement's layer, with `spares` empty spare slots on every device.
    ///
    /// # Errors
    /// If the placement has no such layer, or that many spare slots do not fit into memory.
    pub fn of(placement: &Placement, layer: usize, spares: usize) -> Result<Self> {
        expect_below("layer", layer, placement.layers())?;
        let regular = placement.slots_per_device();
        let width = regular.saturating_add(spares);
        let mut slots = Vec::with_capacity(entries("slots", &[placement.slots() / regular, width])?);
        for row in placement.layer(layer).chunks_exact(regular) {
            slots.extend(row.iter().map(|&e| Some(e)));
            slots.extend(std::iter::repeat_n(None, spares));
        }
        Ok(Self { width, regular, slots })
    }

    /// What a slot holds.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn get(&self, place: Place) -> Result<Option<u32>> {
        Ok(self.slots[self.index(place)?])
    }

    /// Declares what a slot holds.
    ///
    /// # Errors
    /// If there is no such slot.
    pub fn set(&mut self, place: Place, expert: Option<u32>) -> Result<()> {
        let index = self.index(place)?;
        self.slots[index] = expert;
        Ok(())
    }

    /// Experts in the regular slots, in slot order.
    pub fn regular(&self) -> impl Iterator<Item = Option<u32>> + '_ {
        self.slots.chunks_exact(self.width).flat_map(|row| &row[..self.regular]).copied()
    }

    fn devices(&self) -> usize {
        self.slots.len() / self.width
    }

    fn place(&self, index: usize) -> Place {
        Place { device: (index / self.width) as u32, slot: (index % self.width) as u32 }
    }

    fn index(&self, place: Place) -> Result<usize> {
        let device = place.device as usize;
        let slot = place.slot as usize;
        expect_below("device", device, self.devices())?;
        expect_below("slot", slot, self.width)?;
        Ok(device * self.width + slot)
    }

    /// Target of every slot, `None` for spares.
    fn spread_target(&self, target: &[u32]) -> Vec<Option<u32>> {
        let mut spread = vec![None; self.slots.len()];
        for (rows, goal) in spread.chunks_exact_mut(self.width).zip(target.chunks_exact(self.regular)) {
            rows.iter_mut().zip(goal).for_each(|(slot, &e)| *slot = Some(e));
        }
        spread
    }
}

/// An ordered list of transfers. Executing them one after another is always safe; a runtime may
/// overlap transfers that touch different slots and experts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Migration {
    /// The transfers in the order of their execution.
    pub transfers: Vec<Transfer>,
}

/// One device's part of a transfer.
// This enum is exhaustive: a device must do each operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Copy a slot to another on this device.
    Copy(Transfer),
    /// Send a slot to another device.
    Send(Transfer),
    /// Receive into a slot from another device.
    Receive(Transfer),
}

/// What a migration puts on the links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies inside a device.
    pub local: usize,
    /// Transfers between devices of one node.
    pub in_node: usize,
    /// Transfers between nodes.
    pub cross_node: usize,
}

impl Migration {
    /// What `device` has to do, in order: the sends and receives of all devices match pairwise.
    pub fn operations(&self, device: u32) -> Vec<Operation> {
        let mine = |t: &Transfer| match (t.from.device == device, t.to.device == device) {
            (true, true) => Some(Operation::Copy(*t)),
            (true, false) => Some(Operation::Send(*t)),
            (false, true) => Some(Operation::Receive(*t)),
            (false, false) => None,
        };
        self.transfers.iter().filter_map(mine).collect()
    }

    /// How far the transfers go.
    pub fn traffic(&self, topology: &Topology) -> Traffic {
        let mut traffic = Traffic::default();
        for t in &self.transfers {
            let node = |p: Place| topology.node_of(p.device as usize);
            if t.is_local() {
                traffic.local += 1;
            } else if node(t.from) == node(t.to) {
                traffic.in_node += 1;
            } else {
                traffic.cross_node += 1;
            }
        }
        traffic
    }
}
