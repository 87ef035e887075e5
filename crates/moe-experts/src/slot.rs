//! The weights of one slot as bytes, and a checksum of them: what moves when an expert changes its rank.

use candle_core::{Result, Tensor, bail};
use moe_kernels::Weight;
use rayon::prelude::*;

use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Bytes of one slot.
    ///
    /// # Errors
    /// Weights on a device; experts with act-order, which have no common form.
    pub fn slot_len(&self) -> Result<usize> {
        self.packs()?.iter().map(Weight::expert_len).sum()
    }

    /// The weights of a slot in the order of the packs, `slot_len` bytes. The same expert has the same bytes on every rank, if
    /// the ranks' packs have one dtype and are packed for one instruction set.
    ///
    /// # Errors
    /// As [`slot_len`](Self::slot_len); a slot that there is not.
    pub fn slot_bytes(&self, slot: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.slot_len()?);
        for pack in self.packs()? {
            bytes.extend(pack.expert_bytes(slot)?);
        }
        Ok(bytes)
    }

    /// Puts another expert into a slot, of all clones at once: nothing may compute with them meanwhile.
    ///
    /// # Errors
    /// As [`slot_bytes`](Self::slot_bytes); another number of bytes, with nothing changed.
    pub fn write_slot(&self, slot: usize, bytes: &[u8]) -> Result<()> {
        let (packs, len) = (self.packs()?, self.slot_len()?);
        if bytes.len() != len || slot >= self.shape().num_local_experts {
            bail!(
                "expert weights: expected {len} bytes for one of {} slots, got {} for slot {slot}",
                self.shape().num_local_experts,
                bytes.len()
            )
        }
        let mut rest = bytes;
        for pack in packs {
            let (own, tail) = rest.split_at(pack.expert_len()?);
            pack.write_expert(slot, own)?;
            rest = tail;
        }
        Ok(())
    }

    /// The [`checksum`] of every slot.
    ///
    /// # Errors
    /// As [`slot_bytes`](Self::slot_bytes).
    pub fn checksums(&self) -> Result<Vec<u64>> {
        let slots = 0..self.shape().num_local_experts;
        slots.into_par_iter().map(|slot| Ok(checksum(&self.slot_bytes(slot)?))).collect()
    }

    /// All packs as matrices [E_local, N, K]; a bias is one of a single row.
    fn packs(&self) -> Result<Vec<Weight>> {
        let bias = |bias: Option<&Tensor>| bias.map(|bias| Weight::new(bias.unsqueeze(1)?)).transpose();
        let biases = [bias(self.w13_bias())?, bias(self.w2_bias())?];
        Ok([self.w13().clone(), self.w2().clone()].into_iter().chain(biases.into_iter().flatten()).collect())
    }
}

/// A checksum of bytes that names an expert's weights: any change of one word of eight bytes changes it, and others almost surely
/// (four chains of multiply and rotate, so that it runs at the speed of memory).
pub fn checksum(bytes: &[u8]) -> u64 {
    const LANES: usize = 4;
    const FACTORS: [u64; LANES] =
        [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63];
    let mut lanes = FACTORS;
    let mut add = |words: &[u64; LANES]| {
        for ((lane, word), factor) in lanes.iter_mut().zip(words).zip(FACTORS) {
            *lane = (*lane ^ word).wrapping_mul(factor).rotate_left(29);
        }
    };
    let (blocks, tail) = bytes.as_chunks::<{ 8 * LANES }>();
    let words = |block: &[u8; 8 * LANES]| {
        let mut words = [0; LANES];
        words
            .iter_mut()
            .zip(block.as_chunks::<8>().0)
            .for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
        words
    };
    blocks.iter().for_each(|block| add(&words(block)));
    let mut last = [0; 8 * LANES];
    last[..tail.len()].copy_from_slice(tail);
    add(&words(&last));
    lanes
        .into_iter()
        .fold(bytes.len() as u64, |sum, lane| (sum ^ lane).wrapping_mul(FACTORS[0]).rotate_left(31))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use moe_kernels::CpuIsa;

    use super::*;

    fn weights(seed: f32, isa: CpuIsa) -> ExpertWeights {
        let pack = |dims: &[usize], salt: f32| {
            let len = dims.iter().product::<usize>();
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.73 + seed + salt).sin()).collect();
            Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
        };
        let biases = (Some(pack(&[3, 64], 3.0)), Some(pack(&[3, 16], 4.0)));
        let packs = ExpertWeights::new(pack(&[3, 64, 16], 1.0), pack(&[3, 16, 32], 2.0), biases.0, biases.1);
        packs.unwrap().packed(Some(isa)).unwrap()
    }

    #[test]
    fn a_slot_moves_with_its_biases() -> Result<()> {
        for isa in [CpuIsa::Scalar, CpuIsa::Avx2] {
            let (from, to) = (weights(0.0, isa), weights(9.0, isa));
            let (clone, kept) = (to.clone(), [to.slot_bytes(0)?, to.slot_bytes(1)?]);
            let bytes = from.slot_bytes(1)?;
            assert_eq!(bytes.len(), 2 * (64 * 16 + 16 * 32 + 64 + 16));
            assert_eq!(from.slot_len()?, bytes.len());
            to.write_slot(2, &bytes)?;
            assert_eq!(clone.slot_bytes(2)?, bytes);
            assert_eq!([clone.slot_bytes(0)?, clone.slot_bytes(1)?], kept);
            assert_eq!(checksum(&clone.slot_bytes(2)?), checksum(&bytes));
            let refused = to.write_slot(2, &bytes[1..]).unwrap_err().to_string();
            assert!(refused.contains(&format!("expected {} bytes", bytes.len())), "{refused}");
            assert!(to.write_slot(3, &bytes).is_err() && to.slot_bytes(3).is_err());
        }
        Ok(())
    }

    #[test]
    fn a_checksum_sees_every_bit_the_length_and_the_order() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37 % 251) as u8).collect();
        for len in [0, 1, 7, 8, 31, 32, 33, 64, 200] {
            let sum = checksum(&bytes[..len]);
            for bit in 0..len * 8 {
                let mut other = bytes[..len].to_vec();
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(checksum(&other), sum, "bit {bit} of {len} bytes");
            }
            let mut longer = bytes[..len].to_vec();
            longer.push(0);
            assert_ne!(checksum(&longer), sum);
        }
        let mut swapped = bytes.clone();
        swapped[..64].rotate_left(32);
        assert_ne!(checksum(&swapped), checksum(&bytes));
    }
}
