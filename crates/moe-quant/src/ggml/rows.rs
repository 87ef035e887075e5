//! Rows of a matrix in blocks, in their logical form.

use std::ops::Range;

use half::f16;
use moe_kernels::Levels;
use moe_kernels::quant::{LogicalRows, TwoLevels};

use super::{Block, GgmlType};
use crate::read::of_columns;

/// Writes rows of a matrix with `k` columns whose blocks are `bytes`: the columns `columns`, which cut no group.
pub(crate) fn fill(
    ggml: GgmlType,
    bytes: &[u8],
    k: usize,
    rows: Range<usize>,
    columns: &Range<usize>,
    out: &mut LogicalRows,
) {
    let size = ggml.columns();
    let group = ggml.scheme().group_size(k);
    let scheme = of_columns(ggml.scheme(), group, columns);
    let line = k / size * ggml.bytes();
    let blocks = columns.start / size..columns.end.div_ceil(size);
    let mut block = Block::default();
    out.clear();
    for row in rows {
        for at in blocks.clone() {
            let start = row * line + at * ggml.bytes();
            ggml.decode(&bytes[start..start + ggml.bytes()], &mut block);
            let first = columns.start.max(at * size) - at * size;
            let last = columns.end.min((at + 1) * size) - at * size;
            let groups = first / group..last / group;
            out.q.extend_from_slice(&block.codes[first..last]);
            out.scale.extend_from_slice(&block.scales[groups.clone()]);
            if scheme.has_minima() {
                out.minimum.extend_from_slice(&block.minima[groups.clone()]);
            } else if scheme.is_int() {
                out.zero.extend(groups.clone().map(|_| scheme.middle()));
            }
            if let Levels::Two(sharing) = scheme.levels {
                let times = groups.len() / sharing.max(1);
                let [scale, minimum] = block.shared;
                push_levels(&mut out.scale_levels, &block.factors[groups.clone()], scale, times);
                if scheme.has_minima() {
                    push_levels(&mut out.minimum_levels, &block.minimum_factors[groups], minimum, times);
                }
            }
        }
    }
}

/// Adds the factors of groups, and what they share, as often as a part of a super-block needs it.
fn push_levels(to: &mut TwoLevels, factors: &[i8], shared: f16, times: usize) {
    to.factor.extend(factors.iter().map(|factor| factor.cast_unsigned()));
    to.shared.extend(std::iter::repeat_n(shared.to_f32(), times));
}
