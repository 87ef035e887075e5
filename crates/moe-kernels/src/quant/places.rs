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

/// Some bits of a code.
struct Place {
    /// The byte of the panel that contains them.
    byte: usize,
    /// The number of their first bit in that byte.
    shift: usize,
    /// The number of the lowest of these bits in the code.
    from: usize,
    /// The number of bits.
    bits: usize,
}

/// The places of the bits of column `i` of a lane. If the upper bits are stored separately, the second place is theirs.
fn places(scheme: QuantScheme, i: usize, lane: usize) -> [Option<Place>; 2] {
    let bits = scheme.bits();
    let first = i / STEP * step_bytes(scheme);
    let i = i % STEP;
    if bits == 8 {
        let byte = first + (i / 4 * LANES + lane) * 4 + [0, 2, 1, 3][i % 4];
        return [Some(Place { byte, shift: 0, from: 0, bits }), None];
    }
    let bit = 4 * (i / 2) + 16 * (i % 2);
    let lower = Place { byte: first + 4 * lane + bit / 8, shift: bit % 8, from: 0, bits: 4 };
    // The upper nibbles have columns 0, 2, 4, 6, the lower ones columns 1, 3, 5, 7.
    let upper = match bits {
        5 => Some((lane, i / 2 + 4 * (1 - i % 2))),
        6 => Some((2 * lane + i / 4, 2 * (i / 2 % 2) + 4 * (1 - i % 2))),
        _ => None,
    };
    let upper =
        upper.map(|(byte, shift)| Place { byte: first + NIBBLES + byte, shift, from: 4, bits: bits - 4 });
    [Some(lower), upper]
}

/// The code of column `i` of a lane; `i` counts padding, too.
pub(super) fn get(scheme: QuantScheme, panel: &[u8], i: usize, lane: usize) -> u8 {
    let part = |at: Place| (panel[at.byte] >> at.shift & mask(at.bits)) << at.from;
    places(scheme, i, lane).into_iter().flatten().map(part).fold(0, |code, part| code | part)
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
        5 => upper[lane] = (0..STEP).fold(0, |bits, i| bits | above(i, i / 2 + 4 * (1 - i % 2))),
        6 => {
            let byte = |first: usize| {
                let shift = |i: usize| 2 * (i / 2) + 4 * (1 - i % 2);
                (0..STEP / 2).fold(0, |bits, i| bits | above(first + i, shift(i)))
            };
            upper.as_chunks_mut().0[lane] = [byte(0), byte(STEP / 2)];
        }
        _ => {}
    }
}

fn mask(bits: usize) -> u8 {
    u8::MAX >> (8 - bits)
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
            for (lane, i) in (0..LANES).flat_map(|lane| (0..3 * STEP).map(move |i| (lane, i))) {
                assert_eq!(get(scheme, &panel, i, lane), code(lane, i), "{bits} {lane} {i}");
            }
        }
    }
}
