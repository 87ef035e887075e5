//! The weights of one slot as bytes, and their checksums. These bytes are sent when an expert moves to another rank.

use candle_core::{Result, Tensor};
use moe_kernels::{Weight, checksum};
use rayon::prelude::*;

use crate::error::refuse;
use crate::weights::ExpertWeights;

impl ExpertWeights {
    /// Returns the number of bytes of one slot.
    ///
    /// # Errors
    /// Experts with act-order, whose slots have different forms.
    pub fn slot_len(&self) -> Result<usize> {
        self.packs()?.iter().map(Weight::expert_len).sum()
    }

    /// Returns what slots of two ranks must have in common in addition to their length: the forms that
    /// [`Weight::expert_form`] returns.
    ///
    /// # Errors
    /// The errors of [`slot_len`](Self::slot_len).
    pub fn slot_form(&self) -> Result<String> {
        let forms: Vec<String> = self.packs()?.iter().map(Weight::expert_form).collect();
        Ok(forms.join("; "))
    }

    /// Returns the weights of a slot in the order of the packs, `slot_len` bytes. An expert has the same bytes on every
    /// rank, if the ranks' packs have one dtype and are packed for one instruction set.
    ///
    /// # Errors
    /// The errors of [`slot_len`](Self::slot_len); a slot that does not exist; weights on a device.
    pub fn slot_bytes(&self, slot: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.slot_len()?);
        for pack in self.packs()? {
            bytes.extend(pack.expert_bytes(slot)?);
        }
        Ok(bytes)
    }

    /// Replaces the expert in a slot, for all clones. No computation may use them during this call.
    ///
    /// # Errors
    /// The errors of [`slot_bytes`](Self::slot_bytes); another number of bytes. Nothing is changed then.
    pub fn write_slot(&self, slot: usize, bytes: &[u8]) -> Result<()> {
        let packs = self.packs()?;
        let len = self.slot_len()?;
        if bytes.len() != len || slot >= self.shape().num_local_experts {
            refuse!(
                Weights,
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

    /// Returns the [`checksum`] of every slot.
    ///
    /// # Errors
    /// The errors of [`slot_len`](Self::slot_len).
    pub fn checksums(&self) -> Result<Vec<u64>> {
        #[cfg(feature = "cuda")]
        if self.device().is_cuda() {
            return self.device_checksums();
        }
        let slots = 0..self.shape().num_local_experts;
        slots.into_par_iter().map(|slot| Ok(checksum(&self.slot_bytes(slot)?))).collect()
    }

    /// Returns all packs as matrices [E_local, N, K]. A bias is a matrix with a single row.
    pub(crate) fn packs(&self) -> Result<Vec<Weight>> {
        let bias = |bias: Option<&Tensor>| bias.map(|bias| Weight::new(bias.unsqueeze(1)?)).transpose();
        let biases = [bias(self.w13_bias())?, bias(self.w2_bias())?];
        Ok([self.w13().clone(), self.w2().clone()].into_iter().chain(biases.into_iter().flatten()).collect())
    }
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
            let from = weights(0.0, isa);
            let to = weights(9.0, isa);
            let clone = to.clone();
            let kept = [to.slot_bytes(0)?, to.slot_bytes(1)?];
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
}
