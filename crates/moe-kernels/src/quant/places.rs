//! The places of the codes of a step in a panel.
//!
//! A step has 8 columns of 16 rows. A word of nibbles has columns 2j and 2j + 1 of its row, at bit 4j of its low half
//! and of its high half. Codes of 8 bits take two words; the first one has columns 0 to 3 in the order 0, 2, 1, 3. So
//! one shift and one mask give vectors of pairs of consecutive columns.
//!
//! Codes of 5 and 6 bits are 16 words of nibbles, followed by the upper bits of each row: one byte, or two. Shifts,
//! which are the same for all rows, spread a vector of these bits, so that the upper bits for each byte of nibbles are
//! at its bit 4 (`Simd::fives` and `Simd::sixes`).

use super::STEP;
use crate::cpu::simd::LANES;
use crate::scheme::QuantScheme;

/// Bytes of the words of nibbles of a step.
const NIBBLES: usize = 4 * LANES;

/// Bytes of a step of a panel.
pub(super) fn step_bytes(scheme: QuantScheme) -> usize {
    STEP * LANES * scheme.bits() / 8
}

/// Returns the codes of the 8 columns of step `step` of a lane.
pub(super) fn get_step(scheme: QuantScheme, panel: &[u8], step: usize, lane: usize) -> [u8; STEP] {
    let len = step_bytes(scheme);
    let step = &panel[step * len..][..len];
    if scheme.bits() == 8 {
        let words = step.as_chunks::<4>().0;
        let [low, high] = [words[lane], words[LANES + lane]].map(|[a, c, b, d]| [a, b, c, d]);
        return std::array::from_fn(|i| if i < STEP / 2 { low[i] } else { high[i - STEP / 2] });
    }
    let (lower, upper) = step.split_at(NIBBLES);
    let lower = lower.as_chunks::<4>().0[lane];
    let upper = |i: usize| match scheme.bits() {
        5 => upper[lane] >> fifth(i) & 1,
        6 => upper[2 * lane + i / 4] >> fifth_and_sixth(i) & 3,
        _ => 0,
    };
    // The bytes have columns 0, 2 | 4, 6 | 1, 3 | 5, 7.
    let nibble = |i: usize| lower[i / 4 + 2 * (i % 2)] >> (4 * (i / 2 % 2)) & 0xf;
    std::array::from_fn(|i| nibble(i) | upper(i) << 4)
}

/// The place of the fifth bit of column `i` of a step in the byte of its row.
fn fifth(i: usize) -> usize {
    // The upper nibbles have columns 0, 2, 4, 6, the lower ones columns 1, 3, 5, 7.
    i / 2 + 4 * (1 - i % 2)
}

/// The place of the upper two bits of column `i` of a step in one of the two bytes of its row.
fn fifth_and_sixth(i: usize) -> usize {
    2 * (i / 2 % 2) + 4 * (1 - i % 2)
}

/// Sets the 8 columns of step `step` of a lane in a panel, which contains zeros there.
pub(super) fn put_step(scheme: QuantScheme, panel: &mut [u8], step: usize, lane: usize, q: &[u8; STEP]) {
    let len = step_bytes(scheme);
    let step = &mut panel[step * len..][..len];
    if scheme.bits() == 8 {
        let words = step.as_chunks_mut().0;
        words[lane] = [q[0], q[2], q[1], q[3]];
        words[LANES + lane] = [q[4], q[6], q[5], q[7]];
        return;
    }
    let (lower, upper) = step.split_at_mut(NIBBLES);
    // The bytes have columns 0, 2 | 4, 6 | 1, 3 | 5, 7.
    let pairs = [[0, 2], [4, 6], [1, 3], [5, 7]];
    lower.as_chunks_mut().0[lane] = pairs.map(|[a, b]| q[a] & 0xf | q[b] << 4);
    let above = |i: usize, shift: usize| (q[i] >> 4) << shift;
    match scheme.bits() {
        5 => upper[lane] = (0..STEP).fold(0, |bits, i| bits | above(i, fifth(i))),
        6 => {
            let byte = |first: usize| {
                (first..first + STEP / 2).fold(0, |bits, i| bits | above(i, fifth_and_sixth(i)))
            };
            upper.as_chunks_mut().0[lane] = [byte(0), byte(STEP / 2)];
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::QuantGroup;

    #[test]
    fn a_step_is_read_as_it_was_put() {
        for bits in [4, 5, 6, 8] {
            let scheme = QuantScheme::int(bits, QuantGroup::Channel);
            let code = |lane: usize, i: usize| ((lane * 37 + i * 91 + 5) % 256) as u8 & scheme.largest_code();
            let mut panel = vec![0; 3 * step_bytes(scheme)];
            for lane in 0..LANES {
                for step in 0..3 {
                    let codes = std::array::from_fn(|i| code(lane, step * STEP + i));
                    put_step(scheme, &mut panel, step, lane, &codes);
                }
            }
            for (lane, step) in (0..LANES).flat_map(|lane| (0..3).map(move |step| (lane, step))) {
                let want = std::array::from_fn(|i| code(lane, step * STEP + i));
                assert_eq!(get_step(scheme, &panel, step, lane), want, "{bits} {lane} {step}");
            }
        }
    }
}
