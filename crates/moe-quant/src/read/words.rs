//! Integers packed into words of 32 bits, little-endian in the file.

/// The place in its word at which AWQ's `gemm` packing stores each of 8 consecutive outputs.
pub(super) const AWQ_PLACE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Words of a packed tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a> {
    words: &'a [[u8; 4]],
    bits: u32,
}

impl<'a> Words<'a> {
    pub fn new(bytes: &'a [u8], bits: u8) -> Self {
        Self { words: bytes.as_chunks::<4>().0, bits: u32::from(bits) }
    }

    pub fn word(self, index: usize) -> u32 {
        u32::from_le_bytes(self.words[index])
    }

    /// Returns the integer at a place of a word. Place 0 has the lowest bits.
    pub fn part(self, word: u32, place: u32) -> u8 {
        ((word >> (place * self.bits)) & ((1 << self.bits) - 1)) as u8
    }

    /// Unpacks all integers of a word.
    pub fn unpack(self, word: u32, to: &mut [u8]) {
        if self.bits == 8 {
            return to.copy_from_slice(&word.to_le_bytes());
        }
        let x = u64::from(word);
        let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
        let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
        to.copy_from_slice(&((x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes());
    }

    /// Adds one to every integer of a word, with a carry into the next integer. Version 1 of GPTQ subtracts one from
    /// the whole word, so a zero point of 0 has borrowed from its neighbour.
    pub fn plus_one(self, word: u32) -> u32 {
        word.wrapping_add(ones(self.bits as u8))
    }
}

/// Returns a word in which every integer is one.
pub(super) fn ones(bits: u8) -> u32 {
    u32::MAX / ((1 << bits) - 1)
}
