//! The order in which a checkpoint has the heads of linear attention, and the rows of its input product.

use std::ops::Range;

use super::config::LinearAttentionConfig;

/// The place where the rows of v, z, b or a are stored.
struct ValueRows {
    /// Rows of each value head.
    width: usize,
    /// In a matrix that is grouped by key heads: the first row of the first key head, and the rows of a key head.
    grouped: Option<[usize; 2]>,
    /// In a matrix of their own: its first row.
    separate: usize,
}

impl LinearAttentionConfig {
    /// Returns whether value heads are stored in another order than they are computed in.
    pub(super) fn reorders_values(&self) -> bool {
        self.value_heads_in_turns && self.values_per_key() > 1
    }

    /// Returns the stored place of a value head. Heads are counted from key head to key head.
    pub(super) fn stored_value_head(&self, head: usize) -> usize {
        let shared = self.values_per_key().max(1);
        match self.value_heads_in_turns {
            true => head % shared * self.heads.key_heads + head / shared,
            false => head,
        }
    }

    /// Returns the stored places of the value heads of some key heads, in runs.
    pub(super) fn stored_value_heads(&self, keys: &Range<usize>) -> Vec<Range<usize>> {
        let shared = self.values_per_key();
        // Each turn has one value head of every key head.
        let (turns, heads) = if self.value_heads_in_turns { (shared, 1) } else { (1, shared) };
        let turn = |first: usize| first + keys.start * heads..first + keys.end * heads;
        (0..turns).map(|at| turn(at * self.heads.key_heads)).collect()
    }

    /// Returns, for each row of q, k, v, z, b and a of all heads, its place among the stored rows. Stored rows are
    /// counted through all stored matrices. `qkvz_grouped` and `ba_grouped` say whether these projections are one
    /// matrix whose rows are grouped by key heads.
    pub(super) fn stored_rows(&self, [qkvz_grouped, ba_grouped]: [bool; 2]) -> Vec<usize> {
        let heads = self.heads;
        let shared = self.values_per_key().max(1);
        let [qkvz, ba] = self.grouped_rows();
        let key = heads.key_dim;
        let mut rows = Vec::with_capacity(heads.projected());
        for (at, start) in [(0, 0), (key, heads.key_width())] {
            for head in 0..heads.key_heads {
                let first = if qkvz_grouped { head * qkvz + at } else { start + head * key };
                rows.extend(first..first + key);
            }
        }
        let second = heads.key_heads * qkvz;
        let values = 2 * key + shared * heads.value_dim;
        let qkvz = |at: usize| qkvz_grouped.then_some([at, qkvz]);
        let ba = |at: usize| ba_grouped.then_some([second + at, ba]);
        for ValueRows { width, grouped, separate } in [
            ValueRows { width: heads.value_dim, grouped: qkvz(2 * key), separate: 2 * heads.key_width() },
            ValueRows { width: heads.value_dim, grouped: qkvz(values), separate: heads.channels() },
            ValueRows { width: 1, grouped: ba(0), separate: second },
            ValueRows { width: 1, grouped: ba(shared), separate: second + heads.value_heads },
        ] {
            for head in 0..heads.value_heads {
                let first = match grouped {
                    Some([first, group]) => first + head / shared * group + head % shared * width,
                    None => separate + self.stored_value_head(head) * width,
                };
                rows.extend(first..first + width);
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::DeltaHeads;

    use super::*;

    /// Two key heads of 1 dimension that two value heads of 2 share each.
    fn config(value_heads_in_turns: bool) -> LinearAttentionConfig {
        let heads = DeltaHeads { key_heads: 2, value_heads: 4, key_dim: 1, value_dim: 2 };
        LinearAttentionConfig {
            hidden_size: 1,
            heads,
            conv_width: 4,
            rms_norm_eps: 1e-6,
            value_heads_in_turns,
        }
    }

    /// The rows of each key head are q 0, k 1, v 2 3 4 5, z 6 7 8 9, and then b 20 21, a 22 23.
    #[test]
    fn rows_that_are_grouped_by_key_heads_get_into_order() {
        let v_and_z = [2, 3, 4, 5, 12, 13, 14, 15, 6, 7, 8, 9, 16, 17, 18, 19];
        let b_and_a = [20, 21, 24, 25, 22, 23, 26, 27];
        let all = [&[0, 10, 1, 11][..], &v_and_z, &b_and_a].concat();
        for in_turns in [false, true] {
            assert_eq!(config(in_turns).stored_rows([true; 2]), all);
        }
        assert_eq!(config(false).stored_rows([false; 2]), (0..28).collect::<Vec<_>>());
        let mixed = [&(0..20).collect::<Vec<_>>()[..], &b_and_a].concat();
        assert_eq!(config(false).stored_rows([false, true]), mixed);
    }

    /// Stored are the first value heads of both key heads, 0 and 2, and then the second ones, 1 and 3.
    #[test]
    fn value_heads_in_turns_get_next_to_each_other() {
        let config = config(true);
        assert_eq!((0..4).map(|head| config.stored_value_head(head)).collect::<Vec<_>>(), [0, 2, 1, 3]);
        let v_and_z = [4, 5, 8, 9, 6, 7, 10, 11, 12, 13, 16, 17, 14, 15, 18, 19];
        let b_and_a = [20, 22, 21, 23, 24, 26, 25, 27];
        assert_eq!(config.stored_rows([false; 2]), [&[0, 1, 2, 3][..], &v_and_z, &b_and_a].concat());
        assert_eq!(config.stored_value_heads(&(1..2)), [1..2, 3..4]);
        assert!(config.reorders_values() && !self::config(false).reorders_values());
    }
}
