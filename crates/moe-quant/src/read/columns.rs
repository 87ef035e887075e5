//! Which columns of a stored matrix a reader hands over, in which order, and to which group each belongs.

use std::ops::Range;

use moe_kernels::{QuantGroup, QuantScheme};

use crate::format::Format;

/// Columns that act-order sorts a cut group into, if they divide it: kernels know groups of 32.
const SMALL_GROUP: usize = 32;

/// Columns in the logical order.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// Columns of the stored matrix.
    pub source: Range<usize>,
    /// Columns of the logical form.
    pub width: usize,
    /// Columns of a logical group.
    pub group: usize,
    /// The stored group of each logical group.
    pub groups: Vec<usize>,
    /// With act-order.
    pub order: Option<Order>,
}

/// Columns sorted by group.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// The input of each logical column, counted from the first column of the source.
    pub perm: Vec<u32>,
    /// The logical column of each source column.
    pub place: Vec<u32>,
    /// Logical columns that fill up a group: their weight is zero, their input one of the same group.
    pub padding: Vec<u32>,
}

impl Columns {
    /// Consecutive groups. `source` must not cut a group in two.
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

    /// Columns sorted by their group in `g_idx` \[K\], a stable order. The last group may have fewer columns; where a cut leaves
    /// another one with too few, groups become smaller and are filled up.
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

    /// The scheme of the logical form.
    pub fn scheme(&self, scheme: QuantScheme) -> QuantScheme {
        match &self.order {
            Some(_) => QuantScheme { group: QuantGroup::Size(self.group), ..scheme },
            None => scheme,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_group_may_have_fewer_columns() {
        // 72 columns in groups of 32, 32 and 8, none where it stood.
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
