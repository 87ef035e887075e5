//! A half-filled placement that greedy packers fill copy by copy.

/// Experts per device while slots are being filled; no device gets an expert twice.
pub(crate) struct Table {
    k: usize,
    rows: Vec<Vec<u16>>,
}

impl Table {
    pub(crate) fn new(devices: usize, k: usize) -> Self {
        Self { k, rows: (0..devices).map(|_| Vec::with_capacity(k)).collect() }
    }

    /// A full table to take experts out of.
    pub(crate) fn from_slots(slots: &[u32], k: usize) -> Self {
        let row = |row: &[u32]| row.iter().map(|&e| e as u16).collect();
        Self { k, rows: slots.chunks_exact(k).map(row).collect() }
    }

    /// Load of every device if each expert were split over the given copies.
    pub(crate) fn loads<const W: usize>(&self, row: &[[f32; W]], copies: &[u16]) -> Vec<[f32; W]> {
        let mut loads = vec![[0.0; W]; self.rows.len()];
        for (load, experts) in loads.iter_mut().zip(&self.rows) {
            for &e in experts {
                let share = 1.0 / f32::from(copies[usize::from(e)]);
                for t in 0..W {
                    load[t] += row[usize::from(e)][t] * share;
                }
            }
        }
        loads
    }

    /// Takes `expert` off a device that holds it.
    pub(crate) fn remove(&mut self, device: usize, expert: usize) {
        self.rows[device].retain(|&e| usize::from(e) != expert);
    }

    pub(crate) fn devices(&self) -> usize {
        self.rows.len()
    }

    #[inline]
    pub(crate) fn has_room(&self, device: usize) -> bool {
        self.rows[device].len() < self.k
    }

    #[inline]
    pub(crate) fn holds(&self, device: usize, expert: usize) -> bool {
        self.rows[device].contains(&(expert as u16))
    }

    #[inline]
    pub(crate) fn push(&mut self, device: usize, expert: usize) {
        self.rows[device].push(expert as u16);
    }

    /// Makes room for a copy of `expert` if every device with room already holds it. A full device that does not hold
    /// `expert` passes one of its experts to a device with room, and takes `expert` instead. Such a pair exists,
    /// because the full device has more experts than the device with room, which also holds `expert`. Returns the
    /// receiving device, the full one and the expert that was passed on.
    pub(crate) fn displace(&mut self, expert: usize) -> Option<(usize, usize, usize)> {
        let room = (0..self.rows.len()).find(|&d| self.has_room(d))?;
        for full in (0..self.rows.len()).filter(|&d| !self.holds(d, expert)) {
            if let Some(i) = self.rows[full].iter().position(|e| !self.rows[room].contains(e)) {
                let passed = self.rows[full][i];
                self.rows[full][i] = expert as u16;
                self.rows[room].push(passed);
                return Some((room, full, usize::from(passed)));
            }
        }
        None
    }

    /// The expert of every slot; call when all rows are full.
    pub(crate) fn into_slots(self) -> Vec<u16> {
        self.rows.concat()
    }
}
