//! The order of a packed matrix's columns, and the blocks of columns that kernels sum at a time.

use std::ops::Range;

use candle_core::{Result, bail};

use super::sorted::is_order;
use crate::cpu::product::K_BLOCK;

/// Blocks are padded to a multiple of this number of columns, which a kernel multiplies at a time.
pub(crate) const STEP: usize = 8;

/// The largest number of columns of a block. Its integer sum fits 32 bits: 128 * 255 * 32767 < 2^31.
pub(crate) const BLOCK: usize = 128;

/// Consecutive columns of one segment and one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// First column, in packed order and without padding.
    pub start: usize,
    /// Columns, 1 to 128.
    pub len: usize,
    /// The group of these columns.
    pub group: usize,
    /// First step.
    pub step: usize,
}

impl Block {
    /// Steps of the block.
    pub(crate) fn steps(self) -> usize {
        self.len.div_ceil(STEP)
    }
}

/// The columns of a packed matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns {
    pub blocks: Vec<Block>,
    /// The range of blocks of each segment of K.
    pub segments: Vec<Range<usize>>,
    /// The column of the logical rows that packed column i holds; `None`: column i.
    pub logical: Option<Vec<u32>>,
    /// The column of x that packed column i multiplies; `None`: column i.
    pub x: Option<Vec<u32>>,
    /// Whether each block has a multiple of 32 columns, and at least 64. With fewer columns, AMX takes longer to end a
    /// block than to multiply it.
    pub is_wide: bool,
}

impl Columns {
    /// Orders the columns that multiply `inputs` of x, out of `width` logical columns in groups of `group`. The
    /// products sum each of `segments` equal segments of these inputs separately.
    ///
    /// # Errors
    /// Inputs that do not exist; segments that do not divide them; a `perm` that does not name each column once.
    pub(crate) fn new(
        width: usize,
        inputs: Range<usize>,
        group: usize,
        segments: usize,
        perm: Option<&[u32]>,
    ) -> Result<Self> {
        let k = inputs.len();
        if inputs.start > inputs.end || inputs.end > width {
            bail!("inputs {inputs:?} are asked for, but there are {width}")
        }
        if segments == 0 || !k.is_multiple_of(segments) {
            bail!("{segments} segments do not divide K = {k}")
        }
        let length = k / segments;
        let logical = match perm {
            Some(perm) => Some(sorted(perm, width, &inputs, length)?),
            None if k == width => None,
            None => Some((inputs.start as u32..inputs.end as u32).collect()),
        };
        let column = |i: usize| logical.as_ref().map_or(i, |order| order[i] as usize);
        let mut blocks = Vec::new();
        let mut ranges = Vec::new();
        let mut step = 0;
        for segment in 0..segments {
            let first = blocks.len();
            let mut at = segment * length;
            let end = (segment + 1) * length;
            while at < end {
                // Chains of f32 end at the same columns as chains of other dtypes.
                let chain = at + K_BLOCK - (at - segment * length) % K_BLOCK;
                let start = at;
                let of = column(at) / group;
                let most = end.min(at + BLOCK).min(chain);
                while at < most && column(at) / group == of {
                    at += 1;
                }
                let block = Block { start, len: at - start, group: of, step };
                step += block.steps();
                blocks.push(block);
            }
            ranges.push(first..blocks.len());
        }
        let first = inputs.start as u32;
        let x = perm
            .zip(logical.as_ref())
            .map(|(perm, order)| order.iter().map(|&i| perm[i as usize] - first).collect());
        let is_wide = blocks.iter().all(|block| block.len >= 64 && block.len.is_multiple_of(32));
        Ok(Self { blocks, segments: ranges, logical, x, is_wide })
    }

    /// Steps of a row.
    pub(crate) fn steps(&self) -> usize {
        self.blocks.last().map_or(0, |block| block.step + block.steps())
    }
}

/// The columns of `inputs`, sorted by the segment of x that they multiply, and within a segment by group. Columns of a
/// group keep their order.
fn sorted(perm: &[u32], width: usize, inputs: &Range<usize>, length: usize) -> Result<Vec<u32>> {
    if !is_order(perm, width) {
        bail!("the order of columns must name each of the {width} columns once")
    }
    let input = |i: u32| perm[i as usize] as usize;
    let mut order: Vec<u32> = (0..width as u32).filter(|&i| inputs.contains(&input(i))).collect();
    order.sort_by_key(|&i| (input(i) - inputs.start) / length.max(1));
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_at_groups_segments_and_chains() -> Result<()> {
        let of = |k, group, segments| -> Result<Vec<(usize, usize, usize)>> {
            let columns = Columns::new(k, 0..k, group, segments, None)?;
            Ok(columns.blocks.iter().map(|b| (b.start, b.len, b.group)).collect())
        };
        assert_eq!(of(96, 32, 2)?, [(0, 32, 0), (32, 16, 1), (48, 16, 1), (64, 32, 2)]);
        assert_eq!(of(300, 300, 1)?, [(0, 128, 0), (128, 128, 0), (256, 44, 0)]);
        assert_eq!(of(0, 1, 1)?, []);
        assert_eq!(Columns::new(20, 0..20, 20, 2, None)?.steps(), 4);
        assert!(Columns::new(10, 0..10, 10, 4, None).is_err());
        Ok(())
    }

    #[test]
    fn act_order_keeps_segments_of_x_together() -> Result<()> {
        // The groups have two columns: {3, 0} and {1, 2}. The segments of x are {0, 1} and {2, 3}.
        let columns = Columns::new(4, 0..4, 2, 2, Some(&[3, 0, 1, 2]))?;
        assert_eq!(columns.x, Some(vec![0, 1, 3, 2]));
        assert_eq!(columns.logical, Some(vec![1, 2, 0, 3]));
        assert_eq!(columns.blocks.iter().map(|b| b.group).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert!(Columns::new(4, 0..4, 2, 1, Some(&[0, 0, 1, 2])).is_err());
        assert!(Columns::new(4, 0..4, 2, 1, Some(&[0, 1, 2])).is_err());
        Ok(())
    }

    /// A part of the inputs has the same blocks as its segments have in the whole matrix.
    #[test]
    fn a_part_of_the_inputs_has_the_blocks_of_its_segments() -> Result<()> {
        let perm = [5, 2, 7, 0, 3, 6, 1, 4];
        let all = Columns::new(8, 0..8, 4, 4, Some(&perm))?;
        let part = Columns::new(8, 4..8, 4, 2, Some(&perm))?;
        let of = |c: &Columns, segment: usize| -> Vec<_> {
            c.blocks[c.segments[segment].clone()].iter().map(|b| (b.len, b.group)).collect()
        };
        for segment in 0..2 {
            assert_eq!(of(&part, segment), of(&all, segment + 2));
        }
        assert_eq!(part.x, Some(vec![1, 0, 3, 2]));
        assert_eq!(part.logical, all.logical.map(|order| order[4..].to_vec()));
        assert_eq!(Columns::new(8, 2..6, 4, 1, None)?.logical, Some(vec![2, 3, 4, 5]));
        assert!(Columns::new(8, 4..9, 4, 1, None).is_err());
        Ok(())
    }
}
