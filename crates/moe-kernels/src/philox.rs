//! Philox4x32-10: the counter-based generator of Salmon, Moraes, Dror, Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3" (SC 2011).
//!
//! A counter-based generator has no state: its output is a pure function of key and counter, whatever else was
//! generated before or at the same time. So the CPU and the GPU generate the same numbers.

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;
const ROUNDS: usize = 10;

/// The generator under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox4x32 {
    key: [u32; 2],
}

impl Philox4x32 {
    /// Keyed by `seed`, low word first.
    pub fn new(seed: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32] }
    }

    /// Four random words for a counter.
    pub fn block(&self, counter: [u32; 4]) -> [u32; 4] {
        let [mut c0, mut c1, mut c2, mut c3] = counter;
        let [mut k0, mut k1] = self.key;
        for _ in 0..ROUNDS {
            let p0 = M0 as u64 * c0 as u64;
            let p1 = M1 as u64 * c2 as u64;
            let next = [(p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32];
            [c0, c1, c2, c3] = next;
            (k0, k1) = (k0.wrapping_add(W0), k1.wrapping_add(W1));
        }
        [c0, c1, c2, c3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' Random123 library (`kat_vectors`, philox 4x32 10).
    #[test]
    fn known_answers() {
        let zero = Philox4x32::new(0).block([0; 4]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = Philox4x32::new(u64::MAX).block([u32::MAX; 4]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = Philox4x32::new(0x299f_31d0_a409_3822);
        let pi = pi.block([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
