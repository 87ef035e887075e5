//! The placement under search: slots, copies, device loads, and the moves that change them.

/// One layer being searched. `W` lanes hold the episodes (1 for the aggregate objective).
#[derive(Clone)]
pub(crate) struct State<const W: usize> {
    pub(crate) devices: usize,
    pub(crate) slots_per_device: usize,
    /// Machine words of one expert's host set.
    words: usize,
    /// Load of a whole expert, per lane.
    pub(crate) row: Vec<[f32; W]>,
    /// Load of one copy: `row / copies`.
    pub(crate) unit: Vec<[f32; W]>,
    pub(crate) copies: Vec<u16>,
    pub(crate) load: Vec<[f32; W]>,
    /// Expert in each physical slot.
    pub(crate) slot: Vec<u16>,
    /// Bit set of the devices that hold an expert.
    hosts: Vec<u64>,
    /// The host sets of the placement that is being replaced, if moves are counted.
    old_hosts: Vec<u64>,
}

impl<const W: usize> State<W> {
    pub(crate) fn new(row: Vec<[f32; W]>, devices: usize, slot: Vec<u16>) -> Self {
        let words = devices.div_ceil(64);
        let mut state = Self {
            devices,
            slots_per_device: slot.len() / devices,
            words,
            unit: row.clone(),
            copies: vec![0; row.len()],
            load: vec![[0.0; W]; devices],
            hosts: vec![0; row.len() * words],
            old_hosts: Vec::new(),
            row,
            slot: Vec::new(),
        };
        state.set_slots(&slot);
        state
    }

    /// Replaces the whole placement.
    pub(crate) fn set_slots(&mut self, slot: &[u16]) {
        self.slot = slot.to_vec();
        self.copies.fill(0);
        self.hosts.fill(0);
        for (p, &e) in slot.iter().enumerate() {
            let device = p / self.slots_per_device;
            self.copies[usize::from(e)] += 1;
            self.hosts[usize::from(e) * self.words + device / 64] |= 1 << (device % 64);
        }
        for e in 0..self.row.len() {
            self.refresh_unit(e);
        }
        self.refresh_loads();
    }

    /// From now on `moves` counts the (device, expert) pairs that `slot` does not have.
    pub(crate) fn count_moves_from(&mut self, slot: &[u32]) {
        self.old_hosts = vec![0; self.hosts.len()];
        for (p, &e) in slot.iter().enumerate() {
            let device = p / self.slots_per_device;
            self.old_hosts[e as usize * self.words + device / 64] |= 1 << (device % 64);
        }
    }

    /// Pairs (device, expert) that the old placement lacks.
    pub(crate) fn moves(&self) -> usize {
        let fresh = |(new, old): (&u64, &u64)| (new & !old).count_ones() as usize;
        self.hosts.iter().zip(&self.old_hosts).map(fresh).sum()
    }

    /// 1 if placing `expert` on `device` is a transfer, else 0. Needs `count_moves_from`.
    #[inline]
    pub(crate) fn is_fresh(&self, expert: usize, device: usize) -> i32 {
        i32::from(self.old_hosts[expert * self.words + device / 64] >> (device % 64) & 1 == 0)
    }

    #[inline]
    pub(crate) fn on(&self, expert: usize, device: usize) -> bool {
        self.hosts[expert * self.words + device / 64] >> (device % 64) & 1 == 1
    }

    #[inline]
    fn flip(&mut self, expert: usize, device: usize) {
        self.hosts[expert * self.words + device / 64] ^= 1 << (device % 64);
    }

    /// Calls `visit` for every device that holds `a` or `b`, ascending.
    #[inline]
    pub(crate) fn for_hosts(&self, a: usize, b: usize, mut visit: impl FnMut(usize)) {
        for word in 0..self.words {
            let mut bits = self.hosts[a * self.words + word] | self.hosts[b * self.words + word];
            while bits != 0 {
                visit(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    #[inline]
    pub(crate) fn expert(&self, slot: usize) -> usize {
        usize::from(self.slot[slot])
    }

    fn refresh_unit(&mut self, expert: usize) {
        self.unit[expert] = self.unit_at(expert, self.copies[expert]);
    }

    /// Load of one copy of `expert` if it had `copies` copies.
    #[inline]
    pub(crate) fn unit_at(&self, expert: usize, copies: u16) -> [f32; W] {
        let share = 1.0 / f32::from(copies.max(1));
        self.row[expert].map(|v| v * share)
    }

    /// Sums the device loads afresh, which also drops the rounding of incremental updates.
    pub(crate) fn refresh_loads(&mut self) {
        for (load, experts) in self.load.iter_mut().zip(self.slot.chunks_exact(self.slots_per_device)) {
            *load = [0.0; W];
            for &e in experts {
                let unit = &self.unit[usize::from(e)];
                for t in 0..W {
                    load[t] += unit[t];
                }
            }
        }
    }

    /// Largest device load of every lane.
    pub(crate) fn peaks(&self) -> [f32; W] {
        let mut peak = [0f32; W];
        for load in &self.load {
            for t in 0..W {
                peak[t] = if load[t] > peak[t] { load[t] } else { peak[t] };
            }
        }
        peak
    }

    /// Exchanges the experts of two slots on different devices and stores the two new loads.
    #[inline]
    pub(crate) fn swap(&mut self, pa: usize, pb: usize, load_a: [f32; W], load_b: [f32; W]) {
        let a = pa / self.slots_per_device;
        let b = pb / self.slots_per_device;
        let x = self.expert(pa);
        let y = self.expert(pb);
        self.load[a] = load_a;
        self.load[b] = load_b;
        self.slot.swap(pa, pb);
        self.flip(x, a);
        self.flip(y, b);
        self.flip(x, b);
        self.flip(y, a);
    }

    /// Gives slot `p` to `x`: one copy more of `x`, one less of the expert that sat there.
    /// The caller stores the device loads (see [`State::replaced_load`]).
    pub(crate) fn replace(&mut self, p: usize, x: usize) {
        let device = p / self.slots_per_device;
        let y = self.expert(p);
        self.copies[x] += 1;
        self.copies[y] -= 1;
        self.refresh_unit(x);
        self.refresh_unit(y);
        self.slot[p] = x as u16;
        self.flip(y, device);
        self.flip(x, device);
    }

    /// Load of device `d` after slot `p` (held by `y`) goes to `x`, given the new copy loads.
    #[inline]
    pub(crate) fn replaced_load(
        &self,
        d: usize,
        p: usize,
        x: usize,
        new_x: &[f32; W],
        y: usize,
        new_y: &[f32; W],
    ) -> [f32; W] {
        let mut load = self.load[d];
        if d == p / self.slots_per_device {
            for t in 0..W {
                load[t] += new_x[t] - self.unit[y][t];
            }
            return load;
        }
        if self.on(x, d) {
            for t in 0..W {
                load[t] += new_x[t] - self.unit[x][t];
            }
        }
        if self.on(y, d) {
            for t in 0..W {
                load[t] += new_y[t] - self.unit[y][t];
            }
        }
        load
    }
}
