//! Expert ids as one rank sees them. Ids of experts that it does not compute become [`NO_EXPERT`], so that combine
//! never reads a row that was not written.

use candle_core::{DType, Result, bail};

use super::{ExpertMap, check_ids, check_map};
use crate::arguments::expect;
use crate::exec::Exec;
use crate::routed::NO_EXPERT;
use crate::view::{View, ViewMut};

/// Replaces the ids of experts on other ranks by [`NO_EXPERT`].
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T, K] u32, physical expert ids |
/// | `expert_map` | \[P\] i32, local slot of each physical expert, -1 if it is on another rank |
/// | `out` | [T, K] u32: the id where the expert is local, else `NO_EXPERT` |
///
/// # Errors
/// Wrong dtypes or dims; an id outside of `expert_map`; a map entry below -1.
pub fn mask_nonlocal_into(topk_ids: View, expert_map: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    const OP: &str = "mask_nonlocal";
    check_ids(OP, topk_ids)?;
    check_map(OP, Some(expert_map))?;
    expect(OP, "out", &out, DType::U32, topk_ids.dims())?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::mask_nonlocal(ex.cuda(OP)?, OP, topk_ids, expert_map, out);
    }
    let _ = ex;
    let ids = topk_ids.cpu::<u32>()?;
    let map = ExpertMap::new(OP, Some(expert_map), i32::MAX as usize)?;
    for (out, &id) in out.cpu_mut::<u32>()?.iter_mut().zip(ids) {
        *out = if map.local(id)?.is_some() { id } else { NO_EXPERT };
    }
    Ok(())
}

/// Local slots of contiguously placed experts: rank r holds the physical experts
/// `r * num_local .. (r + 1) * num_local`.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T, K] u32, physical expert ids |
/// | `out` | [T, K] u32: the local slot if the expert is on `rank`, else `NO_EXPERT` |
///
/// # Errors
/// Wrong dtypes or dims; a rank whose first expert does not fit in u32.
pub fn contiguous_local_ids_into(
    topk_ids: View,
    rank: usize,
    num_local: usize,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "contiguous_local_ids";
    check_ids(OP, topk_ids)?;
    expect(OP, "out", &out, DType::U32, topk_ids.dims())?;
    let Some(first) = rank.checked_mul(num_local).and_then(|first| u32::try_from(first).ok()) else {
        bail!("{OP}: rank {rank} with {num_local} local experts does not fit in u32 ids")
    };
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::any::local_ids(ex.cuda(OP)?, OP, topk_ids, first, num_local, out);
    }
    let _ = ex;
    let ids = topk_ids.cpu::<u32>()?;
    for (out, &id) in out.cpu_mut::<u32>()?.iter_mut().zip(ids) {
        let slot = id.checked_sub(first).filter(|&slot| id != NO_EXPERT && (slot as usize) < num_local);
        *out = slot.unwrap_or(NO_EXPERT);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::align::tests::{local_of, routing};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn masking_keeps_local_ids((ids, k, map, _) in routing()) {
            let Some(map) = map else { return Ok(()) };
            let mut out = vec![5u32; ids.len()];
            let dims = [ids.len() / k, k];
            mask_nonlocal_into(
                View::new(&ids, &dims).unwrap(),
                View::new(&map, &[map.len()]).unwrap(),
                ViewMut::new(&mut out, &dims).unwrap(),
                &mut Exec::cpu(),
            ).unwrap();
            let map = Some(map);
            let want: Vec<u32> =
                ids.iter().map(|&id| if local_of(id, &map).is_some() { id } else { NO_EXPERT }).collect();
            prop_assert_eq!(out, want);
        }
    }

    #[test]
    fn contiguous_placement_is_an_offset() -> Result<()> {
        let ids = [0u32, 3, 4, 5, 6, NO_EXPERT];
        let run = |rank, num_local| {
            let mut out = [9u32; 6];
            let ids = View::new(&ids, &[2, 3])?;
            let out_view = ViewMut::new(&mut out, &[2, 3])?;
            contiguous_local_ids_into(ids, rank, num_local, out_view, &mut Exec::cpu())?;
            Ok::<_, candle_core::Error>(out)
        };
        const N: u32 = NO_EXPERT;
        assert_eq!(run(2, 2)?, [N, N, 0, 1, N, N]);
        assert_eq!(run(0, 4)?, [0, 3, N, N, N, N]);
        assert_eq!(run(7, 0)?, [N; 6]);
        // Even the largest id is not an expert here.
        assert_eq!(run(0, u32::MAX as usize + 1)?[5], N);
        let e = run(usize::MAX, 2).unwrap_err().to_string();
        assert!(e.contains("rank 18446744073709551615 with 2 local experts"), "{e}");
        Ok(())
    }
}
