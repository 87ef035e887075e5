//! Token alignment: which slots each local expert computes, and in which order.
//!
//! A slot is one (token, k) pair, numbered t*K + k. Four layouts serve four kinds of kernels. [`group_slots_into`]
//! sorts slots by local expert without padding, for kernels that take a range per expert. [`align_tokens_into`] pads
//! each expert's slots to whole blocks, for kernels that take a block per tile. [`batch_rows_into`] gives each expert a
//! fixed number of rows, and [`list_slots_into`] gives each expert a list of slot numbers.

mod batches;
mod blocks;
mod group;
mod ids;
mod lists;
mod log2phy;
mod physical;
mod rows;

pub use batches::RowBatches;
pub use blocks::{AlignedSizes, AlignedTokens, MAX_ALIGN_BLOCK, align_tokens_into, max_aligned_sizes};
pub use group::{group_slots_into, group_token_slots_into, number_rows_into, zero_absent_into};
pub use ids::{contiguous_local_ids_into, mask_nonlocal_into};
pub use lists::list_slots_into;
pub use log2phy::{Log2Phy, Spread};
pub use physical::{PHYSICAL_IDS, physical_ids_into};
pub use rows::{batch_rows_into, copy_rows_into, fill_into, scale_rows_into, unbatch_rows_into};

use candle_core::{DType, Result, bail};

use crate::arguments::{expect, expect_dtype, expect_matrix};
use crate::routed::NO_EXPERT;
use crate::view::View;

/// The table from physical expert ids to local slots. Each entry is checked when it is used. Kernels cannot report an
/// error for an id: on CUDA an id without a local expert counts as no expert.
struct ExpertMap<'a> {
    op: &'static str,
    map: Option<&'a [i32]>,
    num_local: usize,
}

impl<'a> ExpertMap<'a> {
    /// Makes a map that [`check_map`] has accepted.
    fn new(op: &'static str, map: Option<View<'a>>, num_local: usize) -> Result<Self> {
        Ok(Self { op, map: map.map(|map| map.cpu()).transpose()?, num_local })
    }

    /// The local slot of an id; `None` if the id means no expert or the expert is on another rank.
    fn local(&self, id: u32) -> Result<Option<usize>> {
        if id == NO_EXPERT {
            return Ok(None);
        }
        let local = match self.map {
            None => i64::from(id),
            Some(map) => match map.get(id as usize) {
                Some(-1) => return Ok(None),
                Some(&local) => i64::from(local),
                None => bail!(
                    "{}: expert id {id} is out of range; expert_map holds {} physical experts",
                    self.op,
                    map.len()
                ),
            },
        };
        match usize::try_from(local) {
            Ok(local) if local < self.num_local => Ok(Some(local)),
            _ if self.map.is_some() => bail!(
                "{}: expert_map sends expert {id} to local slot {local}; expected -1 or 0..{}",
                self.op,
                self.num_local
            ),
            _ => bail!(
                "{}: expert id {id} is out of range; expected 0..{} (pass an expert_map if experts live elsewhere)",
                self.op,
                self.num_local
            ),
        }
    }
}

/// Fails unless the ids are [T, K] u32, and if a slot number, or the sentinel after the last one, would not fit in u32.
fn check_ids(op: &str, topk_ids: View) -> Result<()> {
    expect_dtype(op, "topk_ids", &topk_ids, DType::U32)?;
    expect_matrix(op, "topk_ids", &topk_ids)?;
    let slots = topk_ids.elem_count();
    if u32::try_from(slots).is_err() {
        bail!("{op}: {slots} slots do not fit in u32; split the tokens into chunks")
    }
    Ok(())
}

/// Fails unless the map is \[P\] i32.
fn check_map(op: &str, map: Option<View>) -> Result<()> {
    let Some(map) = map else { return Ok(()) };
    expect(op, "expert_map", &map, DType::I32, &[map.elem_count()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Exec;
    use crate::view::ViewMut;
    use proptest::prelude::*;

    pub(super) fn group(
        ids: &[u32],
        k: usize,
        map: Option<&[i32]>,
        local: usize,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut offsets = vec![7u32; local + 1];
        let mut slots = vec![9u32; ids.len()];
        let map = map.map(|m| View::new(m, &[m.len()])).transpose()?;
        let ids_view = View::new(ids, &[ids.len() / k, k])?;
        let n_off = offsets.len();
        let n_slots = slots.len();
        let out = (ViewMut::new(&mut offsets, &[n_off])?, ViewMut::new(&mut slots, &[n_slots])?);
        group_slots_into(ids_view, map, out.0, out.1, &mut Exec::cpu())?;
        Ok((offsets, slots))
    }

    /// Ids [T, K] over `physical` experts, some of them absent, and a map with gaps to local slots.
    pub(super) fn routing() -> impl Strategy<Value = (Vec<u32>, usize, Option<Vec<i32>>, usize)> {
        (1usize..5, 0usize..40, 1usize..12).prop_flat_map(|(k, t, physical)| {
            let id = prop_oneof![8 => 0..physical as u32, 1 => Just(NO_EXPERT)];
            let ids = proptest::collection::vec(id, t * k);
            let holes = proptest::collection::vec(any::<bool>(), physical);
            let order = Just((0..physical as i32).collect::<Vec<_>>()).prop_shuffle();
            (ids, holes, order, any::<bool>()).prop_map(move |(ids, holes, order, identity)| {
                if identity {
                    return (ids, k, None, physical);
                }
                let mut next = 0;
                let mut map = vec![-1; physical];
                for &p in order.iter().filter(|&&p| !holes[p as usize]) {
                    map[p as usize] = next;
                    next += 1;
                }
                (ids, k, Some(map), next as usize)
            })
        })
    }

    pub(super) fn local_of(id: u32, map: &Option<Vec<i32>>) -> Option<usize> {
        let local = match (id, map) {
            (NO_EXPERT, _) => -1,
            (id, None) => id as i32,
            (id, Some(map)) => map[id as usize],
        };
        usize::try_from(local).ok()
    }

    proptest! {
        #[test]
        fn groups_match_the_definition((ids, k, map, local) in routing()) {
            let (offsets, slots) = group(&ids, k, map.as_deref(), local).unwrap();
            let mut at = 0;
            prop_assert_eq!(offsets[0], 0);
            for e in 0..local {
                let want: Vec<u32> =
                    (0..ids.len()).filter(|&s| local_of(ids[s], &map) == Some(e)).map(|s| s as u32).collect();
                prop_assert_eq!(&slots[at..at + want.len()], &want[..]);
                at += want.len();
                prop_assert_eq!(offsets[e + 1] as usize, at);
            }
            prop_assert!(slots[at..].iter().all(|&s| s == 9), "entries after the last group were written");
        }
    }

    #[test]
    fn bad_ids_and_maps_are_named() {
        let message = |r: Result<(Vec<u32>, Vec<u32>)>| r.unwrap_err().to_string();
        let e = message(group(&[0, 3], 1, None, 3));
        assert!(e.contains("expert id 3 is out of range; expected 0..3"), "{e}");
        let e = message(group(&[5], 1, Some(&[0, -1]), 1));
        assert!(e.contains("expert id 5 is out of range; expert_map holds 2"), "{e}");
        let e = message(group(&[1], 1, Some(&[0, 4]), 1));
        assert!(e.contains("expert_map sends expert 1 to local slot 4; expected -1 or 0..1"), "{e}");
        let e = message(group(&[1], 1, Some(&[0, -2]), 1));
        assert!(e.contains("local slot -2"), "{e}");
    }

    #[test]
    fn outputs_of_a_wrong_size_are_refused() -> Result<()> {
        let ids = View::new(&[0u32, 1], &[1, 2])?;
        let mut off = [0u32; 3];
        let mut few = [0u32; 1];
        let offsets = ViewMut::new(&mut off, &[3])?;
        let slots = ViewMut::new(&mut few, &[1])?;
        let e = group_slots_into(ids, None, offsets, slots, &mut Exec::cpu()).unwrap_err().to_string();
        assert!(e.contains("expected slots with dims [2], got [1]"), "{e}");
        let offsets = ViewMut::new::<u32>(&mut [], &[0])?;
        let slots = ViewMut::new(&mut off[..2], &[2])?;
        let e = group_slots_into(ids, None, offsets, slots, &mut Exec::cpu()).unwrap_err().to_string();
        assert!(e.contains("E_local + 1 elements, got none"), "{e}");
        Ok(())
    }
}
