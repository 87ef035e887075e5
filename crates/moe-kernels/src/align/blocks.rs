//! Block alignment: each expert's slots are padded to whole blocks, with one expert per block.
//!
//! This is vLLM's `moe_align_block_size`. A block-tiled grouped GEMM launches one tile row per block, reads the block's
//! expert once and needs no search. The number of slots bounds the sizes of the outputs, so buffers are made for the
//! maximum before a graph is captured, and the kernel stops at the count on the device. These ops run on the CPU; CUDA
//! kernels that work by blocks do their own alignment.

use candle_core::{DType, Result, bail};

use super::{ExpertMap, check_ids, check_map};
use crate::arguments::expect;
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// The largest block size.
pub const MAX_ALIGN_BLOCK: usize = 256;

/// The block expert id that means: nothing to compute.
const SKIP: i32 = -1;

/// Upper bounds for the element counts of the outputs of an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlignedSizes {
    /// Elements of `sorted_token_ids`, a multiple of 4 (whole 16-byte stores).
    pub sorted_token_ids: usize,
    /// Elements of `expert_ids`: one per block.
    pub expert_ids: usize,
}

/// The outputs of an alignment. Buffers may be larger than the maximum, and all of each buffer is written.
#[derive(Debug)]
pub struct AlignedTokens<'a> {
    /// [>= max] u32: slot numbers grouped by expert. The sentinel (the number of slots) is padding.
    pub sorted_token_ids: ViewMut<'a>,
    /// [>= max] i32: the local expert of each block; -1 = skip the block.
    pub expert_ids: ViewMut<'a>,
    /// \[1\] u32: the entries of `sorted_token_ids` in use, a multiple of the block size.
    pub num_tokens_post_padded: ViewMut<'a>,
}

/// The largest outputs of [`align_tokens_into`] for `num_slots` = T*K slots.
///
/// If there are fewer slots than the E_local + 1 groups, each slot may need its own block. Otherwise each group wastes
/// at most `block_size - 1` entries.
///
/// # Errors
/// A block size outside of 1..=256; sizes that do not fit in u32, experts that do not fit in i32.
pub fn max_aligned_sizes(num_slots: usize, num_local: usize, block_size: usize) -> Result<AlignedSizes> {
    const OP: &str = "align_tokens";
    check_counts(OP, num_local, block_size)?;
    let groups = num_local + 1;
    let padded = match num_slots < groups {
        true => num_slots.checked_mul(block_size),
        false => groups.checked_mul(block_size - 1).and_then(|waste| waste.checked_add(num_slots)),
    };
    sizes(OP, padded, block_size)
}

fn check_counts(op: &str, num_local: usize, block_size: usize) -> Result<()> {
    if i32::try_from(num_local).is_err() {
        bail!("{op}: {num_local} local experts do not fit in the i32 block ids")
    }
    if !(1..=MAX_ALIGN_BLOCK).contains(&block_size) {
        bail!("{op}: expected a block size of 1 to {MAX_ALIGN_BLOCK}, got {block_size}")
    }
    Ok(())
}

fn sizes(op: &str, padded: Option<usize>, block_size: usize) -> Result<AlignedSizes> {
    let rounded = padded.and_then(|p| p.checked_next_multiple_of(4));
    match (padded, rounded) {
        (Some(padded), Some(rounded)) if u32::try_from(rounded).is_ok() => {
            Ok(AlignedSizes { sorted_token_ids: rounded, expert_ids: padded.div_ceil(block_size) })
        }
        _ => bail!("{op}: the padded slots do not fit in u32; split the tokens into chunks"),
    }
}

/// Sorts slots by local expert, and pads the slots of each expert to a multiple of `block_size`.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `topk_ids` | [T, K] u32, physical expert ids, `u32::MAX` = no expert |
/// | `expert_map` | \[P\] i32, local slot of each physical expert, -1 if it is on another rank; `None` = identity |
/// | `num_local` | E_local |
/// | `out` | see [`AlignedTokens`]; at least [`max_aligned_sizes`] elements |
///
/// Experts come in local order, with ascending slots inside an expert. Slots without a local expert follow in one last
/// group whose blocks have id -1, so that a kernel can give their outputs a defined value. (vLLM sorts by global id
/// instead, and so pads every expert of other ranks; without an `expert_map` the results are equal.) Unused blocks have
/// id -1 too.
///
/// # Errors
/// Wrong dtypes or dims; a block size outside of 1..=256; buffers below the maximum; an id
/// outside of `expert_map` (without a map: outside of 0..E_local); a map entry outside of
/// -1..E_local.
pub fn align_tokens_into(
    topk_ids: View,
    expert_map: Option<View>,
    num_local: usize,
    block_size: usize,
    mut out: AlignedTokens,
    ex: &mut Exec,
) -> Result<()> {
    const OP: &str = "align_tokens";
    check_ids(OP, topk_ids)?;
    check_map(OP, expert_map)?;
    let ids = topk_ids.cpu::<u32>()?;
    let max = max_aligned_sizes(ids.len(), num_local, block_size)?;
    let mut out = out.open(OP, max, ids.len() as u32)?;
    let map = ExpertMap::new(OP, expert_map, num_local)?;

    let mut cursors = ex.scratch(DType::U32, &[num_local + 1])?;
    let mut cursors = cursors.view_mut();
    let cursors = cursors.cpu_mut::<u32>()?;
    cursors.fill(0);
    for &id in ids {
        cursors[map.local(id)?.unwrap_or(num_local)] += 1;
    }
    for (e, cursor) in cursors.iter_mut().enumerate() {
        let id = if e == num_local { SKIP } else { e as i32 };
        *cursor = out.open_group(*cursor as usize, block_size, id) as u32;
    }
    for (slot, &id) in ids.iter().enumerate() {
        let cursor = &mut cursors[map.local(id)?.unwrap_or(num_local)];
        out.sorted[*cursor as usize] = slot as u32;
        *cursor += 1;
    }
    Ok(())
}

/// The outputs as slices, filled with padding. The first `used` entries belong to opened groups.
struct OpenBlocks<'a> {
    sorted: &'a mut [u32],
    blocks: &'a mut [i32],
    used: &'a mut u32,
}

impl AlignedTokens<'_> {
    fn open(&mut self, op: &str, max: AlignedSizes, sentinel: u32) -> Result<OpenBlocks<'_>> {
        expect_at_least(op, "sorted_token_ids", &self.sorted_token_ids, DType::U32, max.sorted_token_ids)?;
        expect_at_least(op, "expert_ids", &self.expert_ids, DType::I32, max.expert_ids)?;
        expect(op, "num_tokens_post_padded", &self.num_tokens_post_padded, DType::U32, &[1])?;
        let sorted = self.sorted_token_ids.cpu_mut::<u32>()?;
        let blocks = self.expert_ids.cpu_mut::<i32>()?;
        sorted.fill(sentinel);
        blocks.fill(SKIP);
        let used = &mut self.num_tokens_post_padded.cpu_mut::<u32>()?[0];
        *used = 0;
        Ok(OpenBlocks { sorted, blocks, used })
    }
}

impl OpenBlocks<'_> {
    /// Appends the blocks of a group of `count` entries, and returns the index of its first entry. The total of all
    /// groups is within the maximum for which the buffers were checked.
    fn open_group(&mut self, count: usize, block_size: usize, id: i32) -> usize {
        let start = *self.used as usize;
        let blocks = count.div_ceil(block_size);
        self.blocks[start / block_size..][..blocks].fill(id);
        *self.used = (start + blocks * block_size) as u32;
        start
    }
}

fn expect_at_least(op: &str, name: &str, v: &ViewMut, dtype: DType, len: usize) -> Result<()> {
    expect(op, name, v, dtype, &[v.elem_count()])?;
    if v.elem_count() < len {
        bail!("{op}: expected {name} with at least {len} elements, got {}", v.elem_count())
    }
    Ok(())
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
