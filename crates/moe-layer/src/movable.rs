//! The data about a layer's experts that all ranks share, so that any expert can move: the number of bytes of an expert
//! and the checksums.

use std::sync::Mutex;

use moe_comm::{Communicator, ExpertMap, all_gather_bytes};
use moe_experts::ExpertWeights;
use moe_kernels::Exec;
use moe_kernels::candle::{Error, Result};

use crate::error::refuse;
use crate::layer_move::LayerMove;

/// The data that moves need in addition to the weights.
pub(crate) struct Movable {
    /// The checksum of each logical expert when it was loaded, \[E\].
    pub checksums: Vec<u64>,
    /// Bytes of a slot, on every rank.
    pub slot_len: usize,
    /// The running move.
    pub current: Mutex<Option<LayerMove>>,
}

impl Movable {
    /// Collects the data from all ranks. This is a collective of `ep`.
    ///
    /// # Errors
    /// Weights that cannot move; ranks whose experts have different forms; ranks that hold different copies of one
    /// expert.
    pub fn new(
        layer: usize,
        map: &ExpertMap,
        weights: &ExpertWeights,
        ep: &dyn Communicator,
    ) -> Result<Self> {
        let failed = |e: Error| e.context(format!("layer {layer}: its experts cannot move"));
        let own = LocalExperts {
            slot_len: weights.slot_len().map_err(failed)?,
            form: weights.slot_form()?,
            checksums: weights.checksums()?,
        };
        let all = all_gather_bytes(ep, &own.to_bytes(), &mut Exec::on(weights.device())?)?;
        let all: Vec<LocalExperts> = all.iter().map(|bytes| LocalExperts::of_bytes(bytes)).collect();
        let (slot_len, checksums) = agree(map, &all).map_err(failed)?;
        Ok(Self { checksums, slot_len: slot_len.unwrap_or(own.slot_len), current: Mutex::new(None) })
    }
}

/// The properties of the experts on a rank.
#[derive(Clone, Debug, PartialEq)]
struct LocalExperts {
    slot_len: usize,
    form: String,
    /// The checksum of each slot.
    checksums: Vec<u64>,
}

impl LocalExperts {
    /// Writes the length, the number of checksums, the checksums, and then the form.
    fn to_bytes(&self) -> Vec<u8> {
        let words = [self.slot_len as u64, self.checksums.len() as u64];
        let words = words.iter().chain(&self.checksums).flat_map(|word| word.to_le_bytes());
        words.chain(self.form.bytes()).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let word = |i: usize| bytes.as_chunks::<8>().0.get(i).copied().map_or(0, u64::from_le_bytes);
        let count = word(1) as usize;
        let form = bytes.get(8 * (2 + count)..).unwrap_or_default();
        Self {
            slot_len: word(0) as usize,
            form: String::from_utf8_lossy(form).into_owned(),
            checksums: (2..2 + count).map(word).collect(),
        }
    }
}

/// Returns the length of a slot, if any rank has slots, and the checksum of each expert, from the properties of all
/// ranks.
fn agree(map: &ExpertMap, ranks: &[LocalExperts]) -> Result<(Option<usize>, Vec<u64>)> {
    let mut first: Option<(usize, &LocalExperts)> = None;
    let mut checksums = vec![None; map.num_experts()];
    // The length of a rank without slots is not compared.
    for (rank, held) in ranks.iter().enumerate().filter(|(rank, _)| !map.experts(*rank).is_empty()) {
        let (other, like) = *first.get_or_insert((rank, held));
        if like.slot_len != held.slot_len {
            refuse!(
                Placement,
                "an expert is {} bytes on rank {other}, but {} on rank {rank}",
                like.slot_len,
                held.slot_len
            )
        }
        if like.form != held.form {
            refuse!(
                Placement,
                "rank {other} keeps {}, but rank {rank} {}: the values of their experts ask for it; run without `eplb`, \
                 or requantise with scales in f16",
                like.form,
                held.form
            )
        }
        for (&expert, &sum) in map.experts(rank).iter().zip(&held.checksums) {
            match checksums[expert as usize].replace((rank, sum)) {
                Some((other, before)) if before != sum => refuse!(
                    Placement,
                    "ranks {other} and {rank} hold different copies of expert {expert} (checksums {before:016x} and {sum:016x}); \
                     do both read the same checkpoint?"
                ),
                _ => {}
            }
        }
    }
    let checksums = checksums.into_iter().flatten().map(|(_, sum)| sum).collect();
    Ok((first.map(|(_, held)| held.slot_len), checksums))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(checksums: &[u64]) -> LocalExperts {
        LocalExperts {
            slot_len: 40,
            form: "scales of f16 for 16 of 16 rows".to_string(),
            checksums: checksums.to_vec(),
        }
    }

    #[test]
    fn ranks_that_hold_the_same_agree() {
        // Expert 1 has two copies, rank 1 has no slot.
        let map = ExpertMap::new(3, &[vec![0, 1], vec![], vec![1, 2]]).unwrap();
        let nothing = LocalExperts { slot_len: 7, form: String::new(), checksums: Vec::new() };
        let ranks = [held(&[5, 6]), nothing, held(&[6, u64::MAX])];
        for held in &ranks {
            assert_eq!(LocalExperts::of_bytes(&held.to_bytes()), *held);
        }
        assert_eq!(agree(&map, &ranks).unwrap(), (Some(40), vec![5, 6, u64::MAX]));
    }

    #[test]
    fn ranks_that_differ_are_named() {
        let map = ExpertMap::new(2, &[vec![0, 1], vec![1]]).unwrap();
        let refused = |other: LocalExperts| agree(&map, &[held(&[5, 6]), other]).unwrap_err().to_string();
        let copies = refused(held(&[9]));
        assert!(copies.contains("ranks 0 and 1 hold different copies of expert 1"), "{copies}");
        let longer = refused(LocalExperts { slot_len: 44, ..held(&[6]) });
        assert!(longer.contains("40 bytes on rank 0, but 44 on rank 1"), "{longer}");
        let wider = refused(LocalExperts { form: "scales of f32".to_string(), ..held(&[6]) });
        assert!(
            wider.contains("rank 0 keeps scales of f16 for 16 of 16 rows, but rank 1 scales of f32"),
            "{wider}"
        );
    }
}
