//! The random number of an output position.

use moe_kernels::Philox4x32;

/// 64 random bits for output position `position` of the request with this seed: Philox4x32-10
/// with the seed as key and (position, 0) as counter, low words first; the result is words 1, 0.
///
/// The number depends only on seed and position, so a request samples the same tokens with any other requests in the
/// batch, and after a preemption.
pub fn random_bits(seed: u64, position: u64) -> u64 {
    let counter = [position as u32, (position >> 32) as u32, 0, 0];
    let [low, high, ..] = Philox4x32::new(seed).block(counter);
    (high as u64) << 32 | low as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_first_two_words() {
        // The first known answer of Philox4x32-10 (Random123).
        assert_eq!(random_bits(0, 0), 0xe169c58d_6627e8d5);
        assert_ne!(random_bits(0, 1), random_bits(0, 1 << 32));
        assert_ne!(random_bits(1, 0), random_bits(1 << 32, 0));
    }
}
