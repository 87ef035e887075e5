//! The planner: which transfer next, from where, and what to do when slots wait in a circle.

use super::{Contents, Migration, Transfer};
use crate::error::{Error, Result, expect_below, expect_len};
use crate::topology::Topology;

/// Plans the transfers that turn `start` into `target` for one layer.
///
/// `start` may be any state in which every expert has a complete copy, such as one left by an
/// interrupted migration. At most one spare slot is occupied at any time. Sources on the same device
/// come first, then in the same node, then the device that has sent least so far.
///
/// # Errors
/// If shapes do not fit, an expert has no complete copy to start from, or slots wait in a circle and
/// there is neither a spare slot nor a redundant copy to break it.
pub fn plan_migration(
    topology: &Topology,
    layer: usize,
    start: &Contents,
    target: &[u32],
) -> Result<Migration> {
    expect_len("target", topology.slots(), target.len())?;
    expect_len("devices of the start", topology.devices(), start.devices())?;
    expect_len("slots of its devices", topology.slots_per_device(), start.regular)?;
    expect_below("layer", layer, u32::MAX as usize)?;
    let experts = topology.experts();
    let mut copies = vec![0usize; experts];
    let mut held = start.slots.iter().flatten().chain(target);
    held.try_for_each(|&e| expect_below("expert", e as usize, experts))?;
    start.slots.iter().flatten().for_each(|&e| copies[e as usize] += 1);
    if let Some(expert) = copies.iter().position(|&c| c == 0) {
        return Err(Error::MissingExpert { layer, expert });
    }
    if let Some(expert) = (0..experts).find(|&e| !target.contains(&(e as u32))) {
        return Err(Error::MissingExpert { layer, expert });
    }
    let mut planner = Planner {
        topology,
        layer: layer as u32,
        goal: start.spread_target(target),
        now: start.clone(),
        copies,
        sent: vec![0; topology.devices()],
        transfers: Vec::new(),
    };
    planner.empty_spares();
    planner.run()?;
    Ok(Migration { transfers: planner.transfers })
}

struct Planner<'a> {
    topology: &'a Topology,
    layer: u32,
    /// Target of every slot; `None` for spares.
    goal: Vec<Option<u32>>,
    now: Contents,
    /// The number of complete copies of every expert, in all slots.
    copies: Vec<usize>,
    /// Transfers that each device has sent to others.
    sent: Vec<usize>,
    transfers: Vec<Transfer>,
}

impl Planner<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            // Safe transfers free further slots, so sweep until none is left.
            let mut progress = true;
            while progress {
                progress = false;
                for slot in 0..self.goal.len() {
                    if self.is_pending(slot) && self.is_expendable(slot) {
                        self.fetch(slot)?;
                        progress = true;
                    }
                }
            }
            match (0..self.goal.len()).find(|&slot| self.is_pending(slot)) {
                Some(slot) => self.break_circle(slot)?,
                None => return Ok(()),
            }
        }
    }

    fn is_pending(&self, slot: usize) -> bool {
        self.goal[slot].is_some() && self.goal[slot] != self.now.slots[slot]
    }

    /// Whether overwriting the slot loses nothing.
    fn is_expendable(&self, slot: usize) -> bool {
        self.now.slots[slot].is_none_or(|e| self.copies[e as usize] > 1)
    }

    /// Fills a pending slot with its target.
    fn fetch(&mut self, slot: usize) -> Result<()> {
        match self.goal[slot] {
            Some(expert) => self.copy(expert, slot),
            None => Ok(()),
        }
    }

    /// Copies `expert` into `slot` from the nearest holder.
    fn copy(&mut self, expert: u32, slot: usize) -> Result<()> {
        let width = self.now.width;
        let device = slot / width;
        let node = self.topology.node_of(device);
        let distance = |source: usize| {
            let d = source / width;
            if d == device { 0 } else { 1 + usize::from(self.topology.node_of(d) != node) }
        };
        let holders = (0..self.goal.len()).filter(|&s| s != slot && self.now.slots[s] == Some(expert));
        let nearest = holders.min_by_key(|&s| (distance(s), self.sent[s / width], s));
        let Some(source) = nearest else {
            return Err(Error::MissingExpert { layer: self.layer as usize, expert: expert as usize });
        };
        if source / width != device {
            self.sent[source / width] += 1;
        }
        if let Some(old) = self.now.slots[slot].replace(expert) {
            self.copies[old as usize] -= 1;
        }
        self.copies[expert as usize] += 1;
        let from = self.now.place(source);
        let to = self.now.place(slot);
        self.transfers.push(Transfer { layer: self.layer, expert, from, to });
        // If an expert was just parked, its other copy must survive until the slot that was parked is overwritten.
        if self.goal[slot].is_some() {
            self.empty_spares();
        }
        Ok(())
    }

    /// Empties spare slots whose expert is also in another slot. If they counted as copies, the other copies could be
    /// overwritten, and the spares would stay occupied.
    fn empty_spares(&mut self) {
        for slot in (0..self.goal.len()).filter(|&slot| self.goal[slot].is_none()) {
            if let Some(e) = self.now.slots[slot].filter(|&e| self.copies[e as usize] > 1) {
                self.copies[e as usize] -= 1;
                self.now.slots[slot] = None;
            }
        }
    }

    /// All pending slots hold last copies. Each of these experts is wanted by another pending slot, so the path from a
    /// slot to the slot that wants its expert ends in a circle. If the expert of one slot in the circle is parked, that
    /// slot can be overwritten, and then each slot before it in turn.
    fn break_circle(&mut self, start: usize) -> Result<()> {
        let circle = self.circle_from(start)?;
        let first = circle[0];
        let last = circle[circle.len() - 1];
        let parked = self.now.slots[last];
        let Some(expert) = parked else { return self.fetch(last) };
        let park = self.parking(first / self.now.width)?;
        self.copy(expert, park)?;
        for &slot in circle.iter().rev() {
            self.fetch(slot)?;
        }
        Ok(())
    }

    /// Slots `s0, s1, ..` such that each wants what its predecessor holds, and `s0` what the last
    /// holds.
    fn circle_from(&self, start: usize) -> Result<Vec<usize>> {
        let mut path = vec![start];
        loop {
            let held = self.now.slots[path[path.len() - 1]];
            let wants = |&slot: &usize| self.is_pending(slot) && self.goal[slot] == held;
            let Some(next) = (0..self.goal.len()).find(wants) else {
                let expert = held.unwrap_or_default() as usize;
                return Err(Error::MissingExpert { layer: self.layer as usize, expert });
            };
            if let Some(begin) = path.iter().position(|&slot| slot == next) {
                return Ok(path.split_off(begin));
            }
            path.push(next);
        }
    }

    /// A slot to park an expert in: a free spare, best on `device` where it will be needed, else a
    /// regular slot with a redundant copy (which becomes pending and is restored later).
    fn parking(&self, device: usize) -> Result<usize> {
        let width = self.now.width;
        let node = self.topology.node_of(device);
        let rank = |slot: usize| {
            let d = slot / width;
            let far = usize::from(d != device) + usize::from(self.topology.node_of(d) != node);
            (self.goal[slot].is_some(), far, slot)
        };
        let free = (0..self.goal.len()).filter(|&slot| self.is_expendable(slot));
        free.min_by_key(|&slot| rank(slot)).ok_or(Error::UnsafePlan {
            transfer: self.transfers.len(),
            reason: "no spare slot to break a circle",
        })
    }
}
