//! Token alignment, ids as one rank sees them, and the BatchedExperts layout.

use std::ptr::null_mut;

use candle_core::{DType, Result};

use super::{CudaExec, Dtype, count, ffi, int};
use crate::align::RowBatches;
use crate::cuda::args::{AnyBatchRowsArgs, AnyGroupSlotsArgs};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

// SAFETY of every call below: as in `rows`; a bad id, slot or count is skipped by the kernels.

/// Ids [T, K], the map that sends them to local experts, and the number of those.
#[derive(Clone, Copy)]
pub(crate) struct SlotIds<'a> {
    pub(crate) topk_ids: View<'a>,
    pub(crate) expert_map: Option<View<'a>>,
    pub(crate) num_local: usize,
}

impl SlotIds<'_> {
    /// Number of ids that the map knows.
    fn num_ids(&self) -> usize {
        self.expert_map.map_or(self.num_local, |map| map.elem_count())
    }
}

/// `in_rows` is the token of each slot, where it is wanted.
pub(crate) fn group_slots(
    ex: &Exec,
    op: &str,
    slot_ids: SlotIds,
    mut offsets: ViewMut,
    mut slots: ViewMut,
    mut in_rows: Option<ViewMut>,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let slot_count = int(op, slot_ids.topk_ids.elem_count())?;
    let top_k = int(op, slot_ids.topk_ids.dims()[1])?;
    let (num_ids, num_local) = (int(op, slot_ids.num_ids())?, int(op, slot_ids.num_local)?);
    // SAFETY: computes a number.
    let words = unsafe { ffi::moe_any_group_slots_workspace(num_local) };
    let mut workspace = match usize::try_from(words) {
        Ok(words) if words > 0 => Some(ex.scratch(DType::U32, &[words])?),
        _ => None,
    };
    let workspace = match &mut workspace {
        Some(workspace) => cuda.write(op, "workspace", &mut workspace.view_mut())?,
        None => null_mut(),
    };
    let ids = cuda.read(op, "topk_ids", slot_ids.topk_ids)?;
    let map = cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?;
    let (offsets, slots) = (cuda.write(op, "offsets", &mut offsets)?, cuda.write(op, "slots", &mut slots)?);
    let in_rows = in_rows.as_mut().map_or(Ok(null_mut()), |rows| cuda.write(op, "in_rows", rows))?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_group_slots(
            &AnyGroupSlotsArgs {
                topk_ids: ids,
                expert_map: map,
                count: slot_count,
                top_k,
                num_ids,
                num_local,
                offsets,
                slots,
                in_rows,
                workspace,
            },
            stream,
        )
    })
}

pub(crate) fn list_slots(
    cuda: &CudaExec,
    op: &str,
    slot_ids: SlotIds,
    mut counts: ViewMut,
    mut lists: ViewMut,
) -> Result<()> {
    let (num_ids, num_local) = (int(op, slot_ids.num_ids())?, int(op, slot_ids.num_local)?);
    let slots = int(op, slot_ids.topk_ids.elem_count())?;
    let ids = cuda.read(op, "topk_ids", slot_ids.topk_ids)?;
    let map = cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?;
    let counts = cuda.write(op, "expert_num_tokens", &mut counts)?;
    let (lists, stream) = (cuda.write(op, "expert_slots", &mut lists)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_list_slots(ids, map, slots, num_ids, num_local, counts, lists, stream)
    })
}

pub(crate) fn zero_absent(cuda: &CudaExec, op: &str, slot_ids: SlotIds, mut out: ViewMut) -> Result<()> {
    let (num_ids, num_local) = (int(op, slot_ids.num_ids())?, int(op, slot_ids.num_local)?);
    let slots = slot_ids.topk_ids.elem_count();
    let width = int(op, out.elem_count().checked_div(slots).unwrap_or(0))?;
    let (slots, ids) = (int(op, slots)?, cuda.read(op, "topk_ids", slot_ids.topk_ids)?);
    let map = cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_zero_absent(ids, map, slots, num_ids, num_local, width, out, stream)
    })
}

pub(crate) fn mask_nonlocal(
    cuda: &CudaExec,
    op: &str,
    ids: View,
    expert_map: View,
    mut out: ViewMut,
) -> Result<()> {
    let (n, num_ids) = (count(op, ids.elem_count())?, int(op, expert_map.elem_count())?);
    let (ids, map) = (cuda.read(op, "topk_ids", ids)?, cuda.read(op, "expert_map", expert_map)?);
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_mask_nonlocal(ids, map, n, num_ids, out, stream) })
}

pub(crate) fn local_ids(
    cuda: &CudaExec,
    op: &str,
    ids: View,
    first: u32,
    num_local: usize,
    mut out: ViewMut,
) -> Result<()> {
    let (n, num_local) = (count(op, ids.elem_count())?, u32::try_from(num_local).unwrap_or(u32::MAX));
    let (ids, out, stream) = (cuda.read(op, "topk_ids", ids)?, cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_local_ids(ids, first, num_local, n, out, stream) })
}

pub(crate) fn batch_rows(
    cuda: &CudaExec,
    op: &str,
    rows: View,
    batches: &RowBatches,
    mut out: ViewMut,
    mut counts: ViewMut,
) -> Result<()> {
    let (dtype, top_k) = (Dtype::of(op, rows.dtype())?, int(op, batches.top_k.max(1))?);
    let &[experts, max_tokens, width] = out.dims() else { return Ok(()) };
    let (experts, max_tokens, width) = (int(op, experts)?, int(op, max_tokens)?, int(op, width)?);
    let (num_slots, rows) = (int(op, batches.slots.elem_count())?, cuda.read(op, "rows", rows)?);
    let offsets = cuda.read(op, "offsets", batches.offsets)?;
    let slots = cuda.read(op, "slots", batches.slots)?;
    let out = cuda.write(op, "out", &mut out)?;
    let (counts, stream) = (cuda.write(op, "expert_num_tokens", &mut counts)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_batch_rows(
            &AnyBatchRowsArgs {
                rows,
                offsets,
                slots,
                out,
                counts,
                dtype,
                num_slots,
                top_k,
                experts,
                max_tokens,
                width,
            },
            stream,
        )
    })
}

pub(crate) fn unbatch_rows(
    cuda: &CudaExec,
    op: &str,
    rows: View,
    batches: &RowBatches,
    mut out: ViewMut,
) -> Result<()> {
    let dtype = Dtype::of(op, rows.dtype())?;
    let &[experts, max_tokens, width] = rows.dims() else { return Ok(()) };
    let (experts, max_tokens, width) = (int(op, experts)?, int(op, max_tokens)?, int(op, width)?);
    let (num_slots, rows) = (int(op, batches.slots.elem_count())?, cuda.read(op, "rows", rows)?);
    let offsets = cuda.read(op, "offsets", batches.offsets)?;
    let slots = cuda.read(op, "slots", batches.slots)?;
    let (out, stream) = (cuda.write(op, "out", &mut out)?, cuda.raw()?);
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_unbatch_rows(
            &AnyBatchRowsArgs {
                rows,
                offsets,
                slots,
                out,
                counts: null_mut(),
                dtype,
                num_slots,
                top_k: 1,
                experts,
                max_tokens,
                width,
            },
            stream,
        )
    })
}

pub(crate) fn number_rows(
    cuda: &CudaExec,
    op: &str,
    counts: View,
    max_tokens: usize,
    mut offsets: ViewMut,
    mut numbers: ViewMut,
) -> Result<()> {
    let (experts, max_tokens) = (int(op, counts.elem_count())?, int(op, max_tokens)?);
    let (counts, stream) = (cuda.read(op, "expert_num_tokens", counts)?, cuda.raw()?);
    let offsets = cuda.write(op, "offsets", &mut offsets)?;
    let numbers = cuda.write(op, "numbers", &mut numbers)?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_number_rows(counts, experts, max_tokens, offsets, numbers, stream) })
}
