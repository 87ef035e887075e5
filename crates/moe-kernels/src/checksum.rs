//! A checksum that identifies the bytes of an expert's weights. It is the same number on the CPU and on a device.
//!
//! It is the sum of a hash of each word of eight bytes (little endian, the last one padded with zeros) and its index.
//! So words can be added in any order, by any number of threads.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use crate::arguments::{expect, expect_dtype};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

const PLACE: u64 = 0x9e37_79b9_7f4a_7c15;
const FACTOR: u64 = 0xbf58_476d_1ce4_e5b9;

/// The hash of word `index`. Two different words at the same index have different hashes.
fn hashed(index: u64, word: u64) -> u64 {
    let x = word ^ index.wrapping_add(1).wrapping_mul(PLACE);
    let x = (x ^ (x >> 32)).wrapping_mul(FACTOR);
    x ^ (x >> 29)
}

/// The sum of the hashes of words, the first of which has index `first`.
fn sum(first: u64, bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    let last = (!tail.is_empty()).then_some(last);
    let words = words.iter().chain(last.as_ref()).zip(first..);
    words.fold(0, |sum, (word, index)| sum.wrapping_add(hashed(index, u64::from_le_bytes(*word))))
}

/// A checksum of bytes. Any change within one word of eight bytes changes it, and other changes almost surely do.
pub fn checksum(bytes: &[u8]) -> u64 {
    checksum_of_sum(bytes.len(), sum(0, bytes) as i64)
}

/// The [`checksum`] of `len` bytes for which [`word_sum_into`] returned `word_sum`.
pub fn checksum_of_sum(len: usize, word_sum: i64) -> u64 {
    hashed(len as u64, word_sum as u64)
}

/// The part of a [`checksum`] that reads the bytes.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `bytes` | \[N\] u8; on a device its address is a multiple of 16 bytes |
/// | `out` | \[1\] i64: the sum of the words' hashes, modulo 2^64 |
///
/// # Errors
/// Wrong dtypes or dims; on a device a view with another address.
pub fn word_sum_into(bytes: View<'_>, mut out: ViewMut<'_>, ex: &Exec) -> Result<()> {
    const OP: &str = "word_sum";
    expect_dtype(OP, "bytes", &bytes, DType::U8)?;
    expect(OP, "out", &out, DType::I64, &[1])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::word_sum(ex.cuda(OP)?, OP, bytes, out);
    }
    /// Bytes that a thread processes at a time: whole words.
    const TURN: usize = 1 << 16;
    let bytes = bytes.cpu::<u8>()?;
    let turns = bytes.par_chunks(TURN).enumerate();
    let turn = |(i, turn): (usize, &[u8])| sum((i * TURN / 8) as u64, turn);
    let all = ex.install(|| turns.map(turn).reduce(|| 0, u64::wrapping_add));
    match out.cpu_mut::<i64>()? {
        [out] => *out = all as i64,
        _ => bail!("{OP}: expected one sum"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_sees_every_bit_the_length_and_the_order() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37 % 251) as u8).collect();
        for len in [0, 1, 7, 8, 31, 32, 33, 64, 200] {
            let sum = checksum(&bytes[..len]);
            for bit in 0..len * 8 {
                let mut other = bytes[..len].to_vec();
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(checksum(&other), sum, "bit {bit} of {len} bytes");
                // If the same bit is flipped in two words, the changes do not cancel.
                if bit + 64 < len * 8 {
                    other[bit / 8 + 8] ^= 1 << (bit % 8);
                    assert_ne!(checksum(&other), sum, "bits {bit} and {} of {len} bytes", bit + 64);
                }
            }
            let mut longer = bytes[..len].to_vec();
            longer.push(0);
            assert_ne!(checksum(&longer), sum);
        }
        let mut swapped = bytes.clone();
        swapped[..64].rotate_left(32);
        assert_ne!(checksum(&swapped), checksum(&bytes));
    }

    #[test]
    fn turns_of_threads_give_the_sum_of_all() -> Result<()> {
        for len in [0, 5, 1 << 16, (3 << 16) + 13] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 % 253) as u8).collect();
            let mut out = [7i64];
            word_sum_into(View::new(&bytes, &[len])?, ViewMut::new(&mut out, &[1])?, &Exec::cpu())?;
            assert_eq!(checksum_of_sum(len, out[0]), checksum(&bytes), "{len} bytes");
        }
        Ok(())
    }
}
