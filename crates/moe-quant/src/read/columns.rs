//! The columns that a reader returns: which columns of the stored matrix, in which order, and the group of each.

use std::ops::Range;

use moe_kernels::{Levels, QuantGroup, QuantScheme};

use crate::format::Format;

/// If a part of a matrix with act-order cuts a group, its columns are sorted into smaller groups, of this number of
/// columns if it divides the group. The kernels support groups of 32.
const SMALL_GROUP: usize = 32;

/// Columns in the logical order.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// The columns of the stored matrix.
    pub source: Range<usize>,
    /// The number of columns of the logical form.
    pub width: usize,
    /// The number of columns of a logical group.
    pub group: usize,
    /// The stored group of each logical group.
    pub groups: Vec<usize>,
    /// The order of the columns, with act-order.
    pub order: Option<Order>,
}

/// Columns sorted by group.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// The input of each logical column, as an index from the first column of the source.
    pub perm: Vec<u32>,
    /// The logical column of each source column.
    pub place: Vec<u32>,
    /// The logical columns that fill up a group. Their weight is zero, and their input is one of the same group.
    pub padding: Vec<u32>,
}

impl Columns {
    /// Returns columns in consecutive groups. `source` must not cut a group.
    pub fn in_order(format: Format, source: Range<usize>, k: usize) -> Result<Self, String> {
        let scheme = format.scheme();
        let width = source.len();
        if let QuantGroup::Channel | QuantGroup::Tensor = scheme.group {
            return Ok(Self { source, width, group: width, groups: vec![0], order: None });
        }
        let group = scheme.group_size(k);
        let whole = |edge: usize| edge.is_multiple_of(group) || edge == k;
        if !whole(source.start) || !whole(source.end) {
            let sizes: Vec<_> = format.tp_sizes(k).iter().map(usize::to_string).collect();
            return Err(format!(
                "columns {source:?} of {k} cut a group of {group} in two; tensor-parallel sizes that work: {}; or expert \
                 parallelism, which keeps experts whole",
                sizes.join(", ")
            ));
        }
        let groups = (source.start / group..source.end.div_ceil(group)).collect();
        Ok(Self { source, width, group, groups, order: None })
    }

    /// Returns columns sorted by their group in `g_idx` \[K\], with a stable order within groups. The last group may
    /// have fewer columns. If another group has too few columns because `source` cuts it, groups become smaller and are
    /// filled up.
    pub fn by_group(g_idx: &[u32], source: Range<usize>, group: usize) -> Self {
        let mut sorted: Vec<u32> = (0..source.len() as u32).collect();
        let group_of = |column: u32| g_idx[source.start + column as usize];
        sorted.sort_by_key(|column| group_of(*column));
        let runs: Vec<&[u32]> = sorted.chunk_by(|a, b| group_of(*a) == group_of(*b)).collect();
        let whole = runs.split_last().is_none_or(|(_, others)| others.iter().all(|run| run.len() == group));
        let unit = if whole || !group.is_multiple_of(SMALL_GROUP) { group } else { SMALL_GROUP };
        let mut order = Order { perm: Vec::new(), place: vec![0; source.len()], padding: Vec::new() };
        let mut groups = Vec::new();
        for run in runs {
            for &column in run {
                order.place[column as usize] = order.perm.len() as u32;
                order.perm.push(column);
            }
            let full = if whole { run.len() } else { run.len().next_multiple_of(unit) };
            for _ in run.len()..full {
                order.padding.push(order.perm.len() as u32);
                order.perm.push(run[0]);
            }
            groups.resize(groups.len() + full.div_ceil(unit), group_of(run[0]) as usize);
        }
        Self { source, width: order.perm.len(), group: unit, groups, order: Some(order) }
    }

    /// Returns the scheme of the logical form.
    pub fn scheme(&self, scheme: QuantScheme) -> QuantScheme {
        match &self.order {
            Some(_) => QuantScheme { group: QuantGroup::Size(self.group), ..scheme },
            None => of_columns(scheme, self.group, &self.source),
        }
    }
}

/// Returns the scheme of columns that cut no group of `group` columns. If the groups that share a scale are cut, fewer
/// groups share one: a number that divides both ends of the columns.
pub(crate) fn of_columns(scheme: QuantScheme, group: usize, columns: &Range<usize>) -> QuantScheme {
    let Levels::Two(groups) = scheme.levels else { return scheme };
    let group = group.max(1);
    let ends = (columns.start / group) | (columns.len() / group);
    // This is the largest power of two that divides both ends and the number of groups that share a scale in the whole
    // matrix.
    scheme.with_shared_scales(1 << (ends | groups).trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_super_blocks_share_fewer_scales() {
        let scheme = QuantScheme::int(4, QuantGroup::Size(32)).with_shared_scales(8);
        let shared = |columns: Range<usize>| match of_columns(scheme, 32, &columns).levels {
            Levels::Two(groups) => groups,
            Levels::One | Levels::Fp8 => 0,
        };
        assert_eq!([0..768, 256..512, 0..384, 384..768, 96..192].map(shared), [8, 8, 4, 4, 1]);
    }

    #[test]
    fn the_last_group_may_have_fewer_columns() {
        // There are 72 columns in groups of 32, 32 and 8, and none is at its original place.
        let g_idx: Vec<u32> = (0..72).map(|column| (column * 5 % 72) / 32).collect();
        let whole = Columns::by_group(&g_idx, 0..72, 32);
        let order = whole.order.as_ref().map(|order| (order.perm.clone(), order.padding.len()));
        let (perm, padding) = order.unwrap_or_default();
        assert_eq!((whole.width, whole.group, whole.groups, padding), (72, 32, vec![0, 1, 2], 0));
        assert!(perm.windows(2).all(|pair| {
            let [a, b] = [pair[0], pair[1]].map(|column| (g_idx[column as usize], column));
            a < b
        }));

        let part = Columns::by_group(&g_idx, 0..40, 32);
        let filled = part.order.map_or(0, |order| order.padding.len());
        assert_eq!((part.width, filled), (96, 56), "a cut fills groups up");
    }
}
