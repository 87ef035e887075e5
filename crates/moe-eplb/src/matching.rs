//! Least movement: which new device row should go to which old device.
//!
//! Devices are interchangeable for the balance, so the rows of a new placement are handed out such
//! that most experts stay where they are (a maximum-weight assignment), and inside a device an
//! expert that stays keeps its slot.

/// Permutes `new` (the expert of every slot) to share as much as possible with `old`, slot by slot.
pub(crate) fn keep_in_place(old: &[u32], new: &[u32], experts: usize, k: usize) -> Vec<u32> {
    let devices = old.len() / k;
    let mut kept = vec![0; devices * devices];
    let mut held = vec![0usize; experts];
    for (o, row) in old.chunks_exact(k).enumerate() {
        for &e in row {
            held[e as usize] = o + 1;
        }
        for (n, row) in new.chunks_exact(k).enumerate() {
            let shared = row.iter().filter(|&&e| held[e as usize] == o + 1).count();
            kept[o * devices + n] = -(shared as i64);
        }
    }
    let mut placed = Vec::with_capacity(new.len());
    for (o, n) in assign(&kept, devices).into_iter().enumerate() {
        placed.extend(keep_in_row(&old[o * k..][..k], &new[n * k..][..k]));
    }
    placed
}

/// Reorders each device's `new` experts so that those also in its `old` ones keep their slots.
pub(crate) fn keep_slots(old: &[u32], new: &[u32], k: usize) -> Vec<u32> {
    old.chunks_exact(k).zip(new.chunks_exact(k)).flat_map(|(old, new)| keep_in_row(old, new)).collect()
}

/// [`keep_slots`] of one device.
fn keep_in_row(old: &[u32], new: &[u32]) -> Vec<u32> {
    let mut rest: Vec<u32> = new.to_vec();
    let mut row: Vec<Option<u32>> = vec![None; old.len()];
    for (slot, e) in old.iter().enumerate() {
        if let Some(i) = rest.iter().position(|r| r == e) {
            row[slot] = Some(rest.remove(i));
        }
    }
    let mut rest = rest.into_iter();
    row.into_iter().filter_map(|e| e.or_else(|| rest.next())).collect()
}

/// Minimum-cost assignment of rows to columns of an `n x n` matrix: the column of every row.
/// Shortest augmenting paths with potentials, O(n^3); ties go to the lower index.
pub(crate) fn assign(cost: &[i64], n: usize) -> Vec<usize> {
    const FREE: usize = usize::MAX;
    let mut row_price = vec![0i64; n];
    let mut col_price = vec![0i64; n + 1];
    // Column n is the virtual start of each augmenting path.
    let mut row_of = vec![FREE; n + 1];
    for row in 0..n {
        row_of[n] = row;
        let mut col = n;
        let mut reach = vec![i64::MAX; n];
        let mut from = vec![n; n];
        let mut done = vec![false; n + 1];
        while row_of[col] != FREE {
            done[col] = true;
            let at = row_of[col];
            let mut step = i64::MAX;
            let mut next = n;
            for c in (0..n).filter(|&c| !done[c]) {
                let reduced = cost[at * n + c] - row_price[at] - col_price[c];
                if reduced < reach[c] {
                    reach[c] = reduced;
                    from[c] = col;
                }
                if reach[c] < step {
                    step = reach[c];
                    next = c;
                }
            }
            for c in 0..=n {
                if done[c] {
                    row_price[row_of[c]] += step;
                    col_price[c] -= step;
                } else if c < n {
                    reach[c] -= step;
                }
            }
            col = next;
        }
        while col != n {
            let previous = from[col];
            row_of[col] = row_of[previous];
            col = previous;
        }
    }
    let mut col_of = vec![0; n];
    for (c, &r) in row_of[..n].iter().enumerate() {
        col_of[r] = c;
    }
    col_of
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All permutations, the slow way.
    fn best_by_force(cost: &[i64], n: usize, row: usize, used: &mut Vec<bool>) -> i64 {
        if row == n {
            return 0;
        }
        let mut best = i64::MAX;
        for c in 0..n {
            if !used[c] {
                used[c] = true;
                best = best.min(cost[row * n + c] + best_by_force(cost, n, row + 1, used));
                used[c] = false;
            }
        }
        best
    }

    #[test]
    fn assignment_is_optimal() {
        let mut rng = crate::search::rng::Rng::new(7);
        for n in 1..=6 {
            for _ in 0..50 {
                let cost: Vec<i64> = (0..n * n).map(|_| rng.below(10) as i64 - 5).collect();
                let columns = assign(&cost, n);
                let total: i64 = columns.iter().enumerate().map(|(r, &c)| cost[r * n + c]).sum();
                assert_eq!(total, best_by_force(&cost, n, 0, &mut vec![false; n]));
            }
        }
    }

    #[test]
    fn retained_experts_keep_their_slots() {
        assert_eq!(keep_slots(&[4, 7, 1], &[1, 9, 7], 3), [9, 7, 1]);
        // Rows swapped between devices cost nothing.
        assert_eq!(keep_in_place(&[0, 1, 2, 3], &[3, 2, 1, 0], 4, 2), [0, 1, 2, 3]);
    }
}
