//! The machine: devices in nodes, slots on devices, experts in groups.

use crate::error::{Error, Result, expect_below, expect_multiple, expect_some};

/// How many experts are spread over how many slots, devices and nodes.
///
/// Slots are numbered through: slot `s` lives on device `s / slots_per_device`, and devices are
/// numbered through the nodes in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    experts: usize,
    devices: usize,
    slots_per_device: usize,
    nodes: usize,
    groups: usize,
}

impl Topology {
    /// `experts` logical experts in `slots` physical slots on `devices` devices of one node.
    ///
    /// # Errors
    /// If a size is zero, the slots do not divide over the devices, or there are fewer slots than
    /// experts. More slots per device than experts is accepted here, because only policies that
    /// forbid duplicates need to refuse it.
    pub fn new(experts: usize, slots: usize, devices: usize) -> Result<Self> {
        expect_some(&[("experts", experts), ("slots", slots), ("devices", devices)])?;
        // Slot and expert ids are stored as u16 while searching.
        expect_below("expert count", experts, usize::from(u16::MAX))?;
        expect_below("slot count", slots, usize::from(u16::MAX))?;
        expect_multiple(("slots", slots), ("devices", devices))?;
        if slots < experts {
            return Err(Error::TooFewSlots { slots, experts });
        }
        Ok(Self { experts, devices, slots_per_device: slots / devices, nodes: 1, groups: 1 })
    }

    /// Spreads the devices over `nodes` nodes and declares `groups` groups of experts that
    /// group-limited routing prefers to keep inside one node.
    ///
    /// # Errors
    /// If a number is zero, the devices do not divide over the nodes, or the experts over the groups.
    pub fn with_nodes(self, nodes: usize, groups: usize) -> Result<Self> {
        expect_some(&[("nodes", nodes), ("groups", groups)])?;
        expect_multiple(("devices", self.devices), ("nodes", nodes))?;
        expect_multiple(("experts", self.experts), ("groups", groups))?;
        Ok(Self { nodes, groups, ..self })
    }

    /// Logical experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Devices.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Physical slots of one device.
    pub fn slots_per_device(&self) -> usize {
        self.slots_per_device
    }

    /// Physical slots in all.
    pub fn slots(&self) -> usize {
        self.devices * self.slots_per_device
    }

    /// Slots beyond one per expert.
    pub fn redundant(&self) -> usize {
        self.slots() - self.experts
    }

    /// Nodes.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Expert groups.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Node of a device.
    pub fn node_of(&self, device: usize) -> usize {
        device / (self.devices / self.nodes)
    }

    /// Refuses shapes in which some device must hold an expert twice.
    pub(crate) fn check_no_forced_duplicates(&self) -> Result<()> {
        if self.slots_per_device > self.experts {
            return Err(Error::DeviceTooWide {
                slots_per_device: self.slots_per_device,
                experts: self.experts,
            });
        }
        Ok(())
    }
}
