//! Which expert sits in which slot, and the maps that engines read.

use crate::error::{Error, Result, entries, expect_below, expect_len};
use crate::topology::Topology;

/// The expert of every physical slot, `phy2log` `[layers, slots]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    layers: usize,
    experts: usize,
    slots: usize,
    slots_per_device: usize,
    phy2log: Vec<u32>,
}

impl Placement {
    /// Takes over a table; see [`Placement::check`] for what it does not verify.
    ///
    /// # Errors
    /// If the size does not fit or an expert id is out of range.
    pub fn from_phy2log(topology: &Topology, layers: usize, phy2log: Vec<u32>) -> Result<Self> {
        expect_len("phy2log", entries("phy2log", &[layers, topology.slots()])?, phy2log.len())?;
        let placement = Self::of(topology, layers, phy2log);
        placement.check_ids(topology.experts())?;
        Ok(placement)
    }

    /// The usual start: all experts in order, then copies of experts 0, 1, ...
    ///
    /// # Errors
    /// If a table of that many layers does not fit into memory.
    pub fn initial(topology: &Topology, layers: usize) -> Result<Self> {
        let entries = entries("phy2log", &[layers, topology.slots()])?;
        let row = (0..topology.slots()).map(|s| (s % topology.experts()) as u32);
        Ok(Self::of(topology, layers, row.cycle().take(entries).collect()))
    }

    fn of(topology: &Topology, layers: usize, phy2log: Vec<u32>) -> Self {
        Self {
            layers,
            experts: topology.experts(),
            slots: topology.slots(),
            slots_per_device: topology.slots_per_device(),
            phy2log,
        }
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Logical experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Slots of one layer.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Slots of one device.
    pub fn slots_per_device(&self) -> usize {
        self.slots_per_device
    }

    /// The whole table `[layers, slots]`.
    pub fn phy2log(&self) -> &[u32] {
        &self.phy2log
    }

    /// One layer's slots.
    ///
    /// # Panics
    /// If `layer` is out of range.
    pub fn layer(&self, layer: usize) -> &[u32] {
        &self.phy2log[layer * self.slots..][..self.slots]
    }

    /// Takes over one layer of `other`, which must have the same shape.
    pub(crate) fn copy_layer(&mut self, other: &Self, layer: usize) {
        let range = layer * self.slots..(layer + 1) * self.slots;
        self.phy2log[range.clone()].copy_from_slice(&other.phy2log[range]);
    }

    /// Verifies that moving `layers` to their rows of `next` leaves a working placement.
    pub(crate) fn check_successor(&self, next: &Self, layers: &[usize]) -> Result<()> {
        next.moved_from(self)?;
        let mut listed = vec![false; self.layers];
        for &layer in layers {
            match listed.get_mut(layer) {
                None => return Err(Error::OutOfRange { what: "layer", got: layer, limit: self.layers }),
                Some(true) => return Err(Error::Setting { what: "layers", must: "listed once" }),
                Some(seen) => *seen = true,
            }
            next.check_layer(layer)?;
        }
        Ok(())
    }

    /// Copies of every expert, `logcnt` `[layers, experts]`.
    pub fn logcnt(&self) -> Vec<u32> {
        let mut counts = vec![0; self.layers * self.experts];
        for layer in 0..self.layers {
            for &e in self.layer(layer) {
                counts[layer * self.experts + e as usize] += 1;
            }
        }
        counts
    }

    /// Slots of every expert, `log2phy` `[layers, experts, width]` padded with -1, and the width
    /// (the largest copy count of any layer). Copies are listed in slot order.
    pub fn log2phy(&self) -> (Vec<i32>, usize) {
        let width = self.logcnt().into_iter().max().unwrap_or(0) as usize;
        let mut map = vec![-1; self.layers * self.experts * width];
        let mut filled = vec![0; self.layers * self.experts];
        for layer in 0..self.layers {
            for (slot, &e) in self.layer(layer).iter().enumerate() {
                let row = layer * self.experts + e as usize;
                map[row * width + filled[row]] = slot as i32;
                filled[row] += 1;
            }
        }
        (map, width)
    }

    /// Verifies what an engine relies on: every expert has a copy, none twice on a device.
    ///
    /// # Errors
    /// Names the first missing or doubled expert.
    pub fn check(&self) -> Result<()> {
        (0..self.layers).try_for_each(|layer| self.check_layer(layer))
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        check_layer(layer, self.layer(layer), self.experts, self.slots_per_device)
    }

    pub(crate) fn check_ids(&self, limit: usize) -> Result<()> {
        self.phy2log.iter().try_for_each(|&e| expect_below("expert", e as usize, limit))
    }

    /// (device, expert) pairs that `old` does not have: the experts that must be transferred.
    /// Order inside a device does not count.
    ///
    /// # Errors
    /// If the two tables differ in shape.
    pub fn moved_from(&self, old: &Self) -> Result<usize> {
        expect_len("layers of the old placement", self.layers, old.layers)?;
        expect_len("experts of the old placement", self.experts, old.experts)?;
        expect_len("slots of the old placement", self.slots, old.slots)?;
        expect_len("slots of its devices", self.slots_per_device, old.slots_per_device)?;
        Ok((0..self.layers)
            .map(|l| moved_in_layer(old.layer(l), self.layer(l), self.experts, self.slots_per_device))
            .sum())
    }
}

/// (device, expert) pairs of `new` that `old` lacks.
pub(crate) fn moved_in_layer(old: &[u32], new: &[u32], experts: usize, k: usize) -> usize {
    let mut held = vec![0usize; experts];
    let mut moved = 0;
    for (device, (o, n)) in old.chunks_exact(k).zip(new.chunks_exact(k)).enumerate() {
        // Stamps mark what this device had; a counted expert is un-stamped, duplicates move again.
        for &e in o {
            held[e as usize] = device + 1;
        }
        for &e in n {
            if held[e as usize] == device + 1 {
                held[e as usize] = 0;
            } else {
                moved += 1;
            }
        }
    }
    moved
}

/// Fails if an expert of layer `layer` is missing or on a device twice.
pub(crate) fn check_layer(layer: usize, slots: &[u32], experts: usize, k: usize) -> Result<()> {
    let mut seen_on = vec![0usize; experts];
    for (device, row) in slots.chunks_exact(k).enumerate() {
        for &e in row {
            if std::mem::replace(&mut seen_on[e as usize], device + 1) == device + 1 {
                return Err(Error::DuplicateExpert { layer, device, expert: e as usize });
            }
        }
    }
    match seen_on.iter().position(|&d| d == 0) {
        Some(expert) => Err(Error::MissingExpert { layer, expert }),
        None => Ok(()),
    }
}
