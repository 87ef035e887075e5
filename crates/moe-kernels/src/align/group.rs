//! Grouping: the slots of each local expert, and the rows that no local expert computes.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use super::{ExpertMap, check_ids, check_map};
use crate::arguments::{expect, expect_matrix, expect_rank3};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Groups slots by local expert (a stable counting sort).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T, K] u32, physical expert ids, [`NO_EXPERT`](crate::NO_EXPERT) = no expert |
/// | `expert_map` | \[P\] i32, local slot of each physical expert, -1 if it is on another rank; `None` = identity |
/// | `offsets` | out: [E_local + 1] u32; group of expert e is `slots[offsets[e]..offsets[e + 1]]` |
/// | `slots` | out: \[T*K\] u32 slot numbers t*K + k, ascending inside a group |
///
/// Slots of [`NO_EXPERT`](crate::NO_EXPERT) and of experts on other ranks are in no group. Entries of `slots` after
/// `offsets[E_local]` are not written. Output sizes depend only on T, K and E_local, so the op can be captured into a
/// graph.
///
/// # Errors
/// Wrong dtypes or dims. On the CPU also an id outside of `expert_map` (without a map: outside of 0..E_local), and a
/// map entry outside of -1..E_local; on CUDA these count as no expert.
pub fn group_slots_into(
    topk_ids: View,
    expert_map: Option<View>,
    offsets: ViewMut,
    slots: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    group("group_slots", topk_ids, expert_map, offsets, slots, None, ex)
}

/// [`group_slots_into`], which also writes the token of each grouped slot to `token_rows` \[T*K\] u32: the row that the
/// slot reads.
///
/// # Errors
/// The errors of [`group_slots_into`].
pub fn group_token_slots_into(
    topk_ids: View,
    expert_map: Option<View>,
    offsets: ViewMut,
    slots: ViewMut,
    token_rows: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "group_token_slots";
    expect(OP, "token_rows", &token_rows, DType::U32, &[topk_ids.elem_count()])?;
    group(OP, topk_ids, expert_map, offsets, slots, Some(token_rows), ex)
}

fn group(
    op: &'static str,
    topk_ids: View,
    expert_map: Option<View>,
    mut offsets: ViewMut,
    mut slots: ViewMut,
    token_rows: Option<ViewMut>,
    ex: &mut Exec,
) -> Result<()> {
    check_ids(op, topk_ids)?;
    check_map(op, expert_map)?;
    expect(op, "offsets", &offsets, DType::U32, &[offsets.elem_count()])?;
    expect(op, "slots", &slots, DType::U32, &[topk_ids.elem_count()])?;
    let Some(num_local) = offsets.elem_count().checked_sub(1) else {
        bail!("{op}: expected offsets with E_local + 1 elements, got none")
    };
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let slot_ids = crate::cuda::any::SlotIds { topk_ids, expert_map, num_local };
        return crate::cuda::any::group_slots(ex, op, slot_ids, offsets, slots, token_rows);
    }
    let _ = ex;
    let map = ExpertMap::new(op, expert_map, num_local)?;
    let offsets = offsets.cpu_mut::<u32>()?;
    let slots = slots.cpu_mut::<u32>()?;
    let used = sort(topk_ids.cpu()?, &map, offsets, slots)?;
    if let Some(mut token_rows) = token_rows {
        let top_k = topk_ids.dims()[1] as u32;
        let rows = token_rows.cpu_mut::<u32>()?.iter_mut();
        rows.zip(&slots[..used]).for_each(|(row, slot)| *row = slot / top_k);
    }
    Ok(())
}

/// The counting sort; returns the number of slots in groups.
fn sort(ids: &[u32], map: &ExpertMap, offsets: &mut [u32], slots: &mut [u32]) -> Result<usize> {
    offsets.fill(0);
    for &id in ids {
        if let Some(e) = map.local(id)? {
            offsets[e + 1] += 1;
        }
    }
    // offsets[e + 1] becomes the start of group e; filling the group then moves it to the group's end.
    let mut start = 0;
    for count in &mut offsets[1..] {
        start += std::mem::replace(count, start);
    }
    for (slot, &id) in ids.iter().enumerate() {
        if let Some(e) = map.local(id)? {
            slots[offsets[e + 1] as usize] = slot as u32;
            offsets[e + 1] += 1;
        }
    }
    Ok(start as usize)
}

/// Zeroes the rows of slots without a local expert. `out` is [T, K, H] f32; the other arguments are the arguments of
/// [`group_slots_into`] with `num_local` experts.
///
/// # Errors
/// The errors of [`group_slots_into`].
pub fn zero_absent_into(
    topk_ids: View,
    expert_map: Option<View>,
    num_local: usize,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "zero_absent";
    check_ids(OP, topk_ids)?;
    check_map(OP, expert_map)?;
    let (tokens, top_k) = expect_matrix(OP, "topk_ids", &topk_ids)?;
    let (_, _, hidden) = expect_rank3(OP, "out", &out)?;
    expect(OP, "out", &out, DType::F32, &[tokens, top_k, hidden])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let slot_ids = crate::cuda::any::SlotIds { topk_ids, expert_map, num_local };
        return crate::cuda::any::zero_absent(ex.cuda(OP)?, OP, slot_ids, out);
    }
    let map = ExpertMap::new(OP, expert_map, num_local)?;
    let rows = out.cpu_mut::<f32>()?.par_chunks_mut(hidden.max(1)).zip(topk_ids.cpu::<u32>()?);
    ex.install(|| {
        rows.try_for_each(|(row, &id)| {
            if map.local(id)?.is_none() {
                row.fill(0.0);
            }
            Ok(())
        })
    })
}

/// Numbers the used rows of a batched buffer [E_local, max_tokens, ..]. The numbers of expert e are e * max_tokens + r
/// for r below `expert_num_tokens[e]`.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `expert_num_tokens` | \[E_local\] u32 |
/// | `offsets` | out: [E_local + 1] u32; expert e's numbers are `numbers[offsets[e]..offsets[e + 1]]` |
/// | `numbers` | out: [E_local * max_tokens] u32; entries after `offsets[E_local]` are not written |
///
/// # Errors
/// Wrong dtypes or dims; row numbers that do not fit in u32. On the CPU also a count above `max_tokens`; CUDA uses
/// `max_tokens` instead.
pub fn number_rows_into(
    expert_num_tokens: View,
    max_tokens: usize,
    mut offsets: ViewMut,
    mut numbers: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "number_rows";
    let experts = expert_num_tokens.elem_count();
    expect(OP, "expert_num_tokens", &expert_num_tokens, DType::U32, &[experts])?;
    let Some(rows) = experts.checked_mul(max_tokens).filter(|&rows| u32::try_from(rows).is_ok()) else {
        bail!("{OP}: {experts} x {max_tokens} rows do not fit in u32")
    };
    for (name, view, len) in [("offsets", &offsets, experts + 1), ("numbers", &numbers, rows)] {
        expect(OP, name, view, DType::U32, &[len])?;
    }
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        let cuda = ex.cuda(OP)?;
        return crate::cuda::any::number_rows(cuda, OP, expert_num_tokens, max_tokens, offsets, numbers);
    }
    let _ = ex;
    let counts = expert_num_tokens.cpu::<u32>()?;
    if let Some((e, n)) = counts.iter().enumerate().find(|(_, n)| **n as usize > max_tokens) {
        bail!("{OP}: expert_num_tokens[{e}] is {n}; expected at most max_tokens = {max_tokens}")
    }
    let used = counts.iter().enumerate().flat_map(|(e, &n)| {
        let first = (e * max_tokens) as u32;
        first..first + n
    });
    numbers.cpu_mut::<u32>()?.iter_mut().zip(used).for_each(|(number, row)| *number = row);
    let mut end = 0;
    for (offset, n) in offsets.cpu_mut::<u32>()?.iter_mut().zip([0].iter().chain(counts)) {
        end += n;
        *offset = end;
    }
    Ok(())
}
