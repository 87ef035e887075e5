//! Top-k and grouped top-k of one row: descending key, ties to the lower id.

/// Whether candidate (key, id) `a` comes before `b`.
fn before(a: (f32, u32), b: (f32, u32)) -> bool {
    a.0 > b.0 || (a.0 == b.0 && a.1 < b.1)
}

/// Fills `ids` with the first `ids.len()` candidates in descending order of key, ties to the
/// lower id; `keys`, of the same length, is scratch that ends up holding their keys.
///
/// One pass of insertion into a sorted list: k is small, and most candidates fail the comparison
/// with its last entry. Keys are never NaN. With fewer candidates than k the tail is left as is;
/// a valid configuration rules that out.
pub(crate) fn top_k(candidates: impl Iterator<Item = (u32, f32)>, ids: &mut [u32], keys: &mut [f32]) {
    let k = ids.len();
    let mut len = 0;
    for (id, key) in candidates {
        if len < k {
            len += 1;
        } else if k == 0 || !before((key, id), (keys[k - 1], ids[k - 1])) {
            continue;
        }
        let mut at = len - 1;
        while at > 0 && before((key, id), (keys[at - 1], ids[at - 1])) {
            (keys[at], ids[at]) = (keys[at - 1], ids[at - 1]);
            at -= 1;
        }
        (keys[at], ids[at]) = (key, id);
    }
}

/// [`top_k`] over a whole row of keys.
pub(crate) fn top_k_row(keys: &[f32], ids: &mut [u32], best: &mut [f32]) {
    top_k((0u32..).zip(keys.iter().copied()), ids, best);
}

/// How a group of experts is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupScore {
    /// The best key of the group (DeepSeek-V2).
    Max,
    /// The sum of its two best keys (DeepSeek-V3).
    TopTwoSum,
}

impl GroupScore {
    fn of(self, keys: &[f32]) -> f32 {
        let mut first = f32::NEG_INFINITY;
        let mut second = f32::NEG_INFINITY;
        for &key in keys {
            if key > first {
                (first, second) = (key, first);
            } else if key > second {
                second = key;
            }
        }
        match self {
            Self::Max => first,
            Self::TopTwoSum => first + second,
        }
    }
}

/// Scratch of [`grouped_top_k`].
pub(crate) struct GroupScratch<'a> {
    /// Ids of the kept groups, [topk_group].
    pub ids: &'a mut [u32],
    /// Keys of the kept groups or experts, at least max(topk_group, top_k).
    pub best: &'a mut [f32],
}

/// Top-k among the experts of the `scratch.ids.len()` best groups, ties to the lower group. The
/// row divides into `num_expert_group` groups of equal size.
pub(crate) fn grouped_top_k(
    keys: &[f32],
    num_expert_group: usize,
    score: GroupScore,
    ids: &mut [u32],
    scratch: GroupScratch<'_>,
) {
    let GroupScratch { ids: groups, best } = scratch;
    let size = (keys.len() / num_expert_group.max(1)).max(1);
    let scores = keys.chunks_exact(size).map(|group| score.of(group));
    let topk_group = groups.len();
    top_k((0u32..).zip(scores), groups, &mut best[..topk_group]);
    let members = groups.iter().flat_map(|&group| {
        let start = group as usize * size;
        (start as u32..).zip(keys[start..start + size].iter().copied())
    });
    let top = ids.len();
    top_k(members, ids, &mut best[..top]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(keys: &[f32], k: usize) -> Vec<u32> {
        let mut ids = vec![u32::MAX; k];
        top_k_row(keys, &mut ids, &mut vec![0.0; k]);
        ids
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        assert_eq!(top(&[1.0, 3.0, 3.0, 2.0, 3.0], 4), [1, 2, 4, 3]);
        assert_eq!(top(&[0.0, -0.0, 0.0], 2), [0, 1]);
        assert_eq!(top(&[f32::NEG_INFINITY; 3], 3), [0, 1, 2]);
        assert_eq!(top(&[1.0, 2.0], 0), [] as [u32; 0]);
    }

    #[test]
    fn the_group_score_decides_which_groups_stay() {
        // Group 0 has the best expert, group 1 the best pair.
        let keys = [0.9, 0.0, 0.6, 0.5, 0.1, 0.2];
        let run = |score| {
            let mut ids = [9; 2];
            let mut groups = [9; 1];
            let mut best = [0.0; 2];
            grouped_top_k(&keys, 3, score, &mut ids, GroupScratch { ids: &mut groups, best: &mut best });
            ids
        };
        assert_eq!(run(GroupScore::Max), [0, 1]);
        assert_eq!(run(GroupScore::TopTwoSum), [2, 3]);
    }

    #[test]
    fn equal_groups_keep_the_lower_one_and_experts_sort_across_groups() {
        let keys = [0.1, 0.7, 0.5, 0.5, 0.7, 0.1];
        let mut ids = [9; 3];
        let mut groups = [9; 2];
        let mut best = [0.0; 3];
        grouped_top_k(
            &keys,
            3,
            GroupScore::Max,
            &mut ids,
            GroupScratch { ids: &mut groups, best: &mut best },
        );
        assert_eq!(groups, [0, 2]);
        assert_eq!(ids, [1, 4, 0]);
    }
}
