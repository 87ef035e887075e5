//! Lists: the BatchedExperts layout, with slot numbers instead of rows.

use candle_core::{DType, Result};

use super::{ExpertMap, check_ids, check_map};
use crate::arguments::expect;
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Lists the slots of each local expert in a separate block.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids`, `expert_map` | as for [`group_slots_into`](super::group_slots_into) |
/// | `expert_num_tokens` | out: \[E_local\] u32 slots of each local expert |
/// | `expert_slots` | out: [E_local, T*K] u32 slot numbers t*K + k, ascending; see below |
///
/// A block has room for every slot, so no slot is left out, whatever the ids are. Entries after an expert's last slot
/// are not written. The sizes depend only on T, K and E_local, so the op can be captured into a graph.
///
/// # Errors
/// The errors of [`group_slots_into`](super::group_slots_into).
pub fn list_slots_into(
    topk_ids: View,
    expert_map: Option<View>,
    mut expert_num_tokens: ViewMut,
    mut expert_slots: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "list_slots";
    check_ids(OP, topk_ids)?;
    check_map(OP, expert_map)?;
    let num_local = expert_num_tokens.elem_count();
    let slots = topk_ids.elem_count();
    expect(OP, "expert_num_tokens", &expert_num_tokens, DType::U32, &[num_local])?;
    expect(OP, "expert_slots", &expert_slots, DType::U32, &[num_local, slots])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let slot_ids = crate::cuda::any::SlotIds { topk_ids, expert_map, num_local };
        return crate::cuda::any::list_slots(ex.cuda(OP)?, OP, slot_ids, expert_num_tokens, expert_slots);
    }
    let _ = ex;
    let map = ExpertMap::new(OP, expert_map, num_local)?;
    let counts = expert_num_tokens.cpu_mut::<u32>()?;
    let lists = expert_slots.cpu_mut::<u32>()?;
    counts.fill(0);
    for (slot, &id) in topk_ids.cpu::<u32>()?.iter().enumerate() {
        if let Some(e) = map.local(id)? {
            lists[e * slots + counts[e] as usize] = slot as u32;
            counts[e] += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::align::tests::{local_of, routing};

    fn list(ids: &[u32], k: usize, map: Option<&[i32]>, local: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut counts = vec![7u32; local];
        let mut lists = vec![9u32; local * ids.len()];
        let map = map.map(|m| View::new(m, &[m.len()])).transpose()?;
        let out = (ViewMut::new(&mut counts, &[local])?, ViewMut::new(&mut lists, &[local, ids.len()])?);
        list_slots_into(View::new(ids, &[ids.len() / k, k])?, map, out.0, out.1, &mut Exec::cpu())?;
        Ok((counts, lists))
    }

    proptest! {
        /// Some tokens name an expert several times.
        #[test]
        fn lists_match_the_definition((ids, k, map, local) in routing()) {
            let (counts, lists) = list(&ids, k, map.as_deref(), local).unwrap();
            for e in 0..local {
                let mut want: Vec<u32> =
                    (0..ids.len()).filter(|&s| local_of(ids[s], &map) == Some(e)).map(|s| s as u32).collect();
                prop_assert_eq!(counts[e] as usize, want.len());
                want.resize(ids.len(), 9);
                prop_assert_eq!(&lists[e * ids.len()..][..ids.len()], &want[..]);
            }
        }
    }

    #[test]
    fn bad_ids_and_outputs_of_a_wrong_size_are_named() -> Result<()> {
        let e = list(&[0, 3], 1, None, 3).unwrap_err().to_string();
        assert!(e.contains("list_slots: expert id 3 is out of range; expected 0..3"), "{e}");
        let mut counts = [0u32; 2];
        let mut lists = [0u32; 3];
        let out = (ViewMut::new(&mut counts, &[2])?, ViewMut::new(&mut lists, &[1, 3])?);
        let ids = View::new(&[0u32, 1], &[1, 2])?;
        let e = list_slots_into(ids, None, out.0, out.1, &mut Exec::cpu()).unwrap_err().to_string();
        assert!(e.contains("expected expert_slots with dims [2, 2], got [1, 3]"), "{e}");
        Ok(())
    }
}
