//! Token alignment, ids as one rank sees them, and the BatchedExperts layout.

use std::ptr::null_mut;

use candle_core::{DType, Result};

use super::{CudaExec, Dtype, count, ffi, int};
use crate::align::{Log2Phy, RowBatches};
use crate::arguments::expect_rank3;
use crate::cuda::args::{AnyBatchRowsArgs, AnyGroupSlotsArgs, CopiesArgs};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

// SAFETY of every call below: as in `rows`; a bad id, slot or count is skipped by the kernels.

/// Ids [T, K], the map that sends them to local experts, and the number of local experts.
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
    let num_local = int(op, slot_ids.num_local)?;
    // SAFETY: computes a number.
    let words = unsafe { ffi::moe_any_group_slots_workspace(num_local) };
    let mut workspace = match usize::try_from(words) {
        Ok(words) if words > 0 => Some(ex.scratch(DType::U32, &[words])?),
        _ => None,
    };
    let args = AnyGroupSlotsArgs {
        topk_ids: cuda.read(op, "topk_ids", slot_ids.topk_ids)?,
        expert_map: cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?,
        count: int(op, slot_ids.topk_ids.elem_count())?,
        top_k: int(op, slot_ids.topk_ids.dims()[1])?,
        num_ids: int(op, slot_ids.num_ids())?,
        num_local,
        offsets: cuda.write(op, "offsets", &mut offsets)?,
        slots: cuda.write(op, "slots", &mut slots)?,
        in_rows: cuda.write_or_null(op, "in_rows", in_rows.as_mut())?,
        workspace: match &mut workspace {
            Some(workspace) => cuda.write(op, "workspace", &mut workspace.view_mut())?,
            None => null_mut(),
        },
    };
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_group_slots(&args, cuda.raw()?) })
}

pub(crate) fn list_slots(
    cuda: &CudaExec,
    op: &str,
    slot_ids: SlotIds,
    mut counts: ViewMut,
    mut lists: ViewMut,
) -> Result<()> {
    let num_ids = int(op, slot_ids.num_ids())?;
    let num_local = int(op, slot_ids.num_local)?;
    let slots = int(op, slot_ids.topk_ids.elem_count())?;
    let ids = cuda.read(op, "topk_ids", slot_ids.topk_ids)?;
    let map = cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?;
    let counts = cuda.write(op, "expert_num_tokens", &mut counts)?;
    let lists = cuda.write(op, "expert_slots", &mut lists)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_list_slots(ids, map, slots, num_ids, num_local, counts, lists, stream)
    })
}

pub(crate) fn zero_absent(cuda: &CudaExec, op: &str, slot_ids: SlotIds, mut out: ViewMut) -> Result<()> {
    let num_ids = int(op, slot_ids.num_ids())?;
    let num_local = int(op, slot_ids.num_local)?;
    let slots = slot_ids.topk_ids.elem_count();
    let width = int(op, out.elem_count().checked_div(slots).unwrap_or(0))?;
    let slots = int(op, slots)?;
    let ids = cuda.read(op, "topk_ids", slot_ids.topk_ids)?;
    let map = cuda.read_or_null(op, "expert_map", slot_ids.expert_map)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_zero_absent(ids, map, slots, num_ids, num_local, width, out, stream)
    })
}

pub(crate) fn physical_ids(
    cuda: &CudaExec,
    op: &str,
    topk_ids: View,
    log2phy: &Log2Phy,
    mut out: ViewMut,
) -> Result<()> {
    let n = count(op, topk_ids.elem_count())?;
    let top_k = int(op, topk_ids.dims()[1])?;
    let experts = int(op, log2phy.ids.dims()[0])?;
    let CopiesArgs { log2phy, width, hashed, first_row } = CopiesArgs::of(op, Some(log2phy), cuda)?;
    let ids = cuda.read(op, "topk_ids", topk_ids)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
    // SAFETY: see above.
    cuda.check(op, unsafe {
        ffi::moe_any_physical_ids(ids, log2phy, n, top_k, experts, width, first_row, hashed, out, stream)
    })
}

pub(crate) fn mask_nonlocal(
    cuda: &CudaExec,
    op: &str,
    ids: View,
    expert_map: View,
    mut out: ViewMut,
) -> Result<()> {
    let n = count(op, ids.elem_count())?;
    let num_ids = int(op, expert_map.elem_count())?;
    let ids = cuda.read(op, "topk_ids", ids)?;
    let map = cuda.read(op, "expert_map", expert_map)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
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
    let n = count(op, ids.elem_count())?;
    let num_local = u32::try_from(num_local).unwrap_or(u32::MAX);
    let ids = cuda.read(op, "topk_ids", ids)?;
    let out = cuda.write(op, "out", &mut out)?;
    let stream = cuda.raw()?;
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
    let args =
        batches_args(cuda, op, expect_rank3(op, "out", &out)?, (rows, &mut out), batches, Some(&mut counts))?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_batch_rows(&args, cuda.raw()?) })
}

pub(crate) fn unbatch_rows(
    cuda: &CudaExec,
    op: &str,
    rows: View,
    batches: &RowBatches,
    mut out: ViewMut,
) -> Result<()> {
    let args = batches_args(cuda, op, expect_rank3(op, "rows", &rows)?, (rows, &mut out), batches, None)?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_unbatch_rows(&args, cuda.raw()?) })
}

/// Arguments of both ways, with the dims of the BatchedExperts side.
fn batches_args(
    cuda: &CudaExec,
    op: &str,
    (experts, max_tokens, width): (usize, usize, usize),
    (rows, out): (View, &mut ViewMut),
    batches: &RowBatches,
    counts: Option<&mut ViewMut>,
) -> Result<AnyBatchRowsArgs> {
    Ok(AnyBatchRowsArgs {
        rows: cuda.read(op, "rows", rows)?,
        offsets: cuda.read(op, "offsets", batches.offsets)?,
        slots: cuda.read(op, "slots", batches.slots)?,
        out: cuda.write(op, "out", out)?,
        counts: cuda.write_or_null(op, "expert_num_tokens", counts)?,
        dtype: Dtype::of(op, rows.dtype())?,
        num_slots: int(op, batches.slots.elem_count())?,
        top_k: int(op, batches.top_k.max(1))?,
        experts: int(op, experts)?,
        max_tokens: int(op, max_tokens)?,
        width: int(op, width)?,
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
    let experts = int(op, counts.elem_count())?;
    let max_tokens = int(op, max_tokens)?;
    let counts = cuda.read(op, "expert_num_tokens", counts)?;
    let stream = cuda.raw()?;
    let offsets = cuda.write(op, "offsets", &mut offsets)?;
    let numbers = cuda.write(op, "numbers", &mut numbers)?;
    // SAFETY: see above.
    cuda.check(op, unsafe { ffi::moe_any_number_rows(counts, experts, max_tokens, offsets, numbers, stream) })
}
