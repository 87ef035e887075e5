//! The validator: simulates a migration and refuses one that would break the model.

use super::{Contents, Migration};
use crate::error::{Error, Result, expect_below};

/// Verifies that `migration`, started on `start`, keeps every one of `experts` experts available at
/// every point, also while a slot is being written, uses at most `max_spares` spare slots at a time
/// and ends with `target` in the regular slots.
///
/// # Errors
/// Names the first transfer that breaks a rule; the number of transfers stands for the end state.
pub fn check_migration(
    start: &Contents,
    target: &[u32],
    migration: &Migration,
    experts: usize,
    max_spares: usize,
) -> Result<()> {
    let broken = |transfer, reason| Err(Error::UnsafePlan { transfer, reason });
    let mut now = start.clone();
    if experts > now.slots.len() {
        return broken(0, "an expert is missing from the start");
    }
    let mut copies = vec![0usize; experts];
    for &e in now.slots.iter().flatten() {
        expect_below("expert", e as usize, experts)?;
        copies[e as usize] += 1;
    }
    if copies.contains(&0) {
        return broken(0, "an expert is missing from the start");
    }
    let layer = migration.transfers.first().map(|t| t.layer);
    for (i, t) in migration.transfers.iter().enumerate() {
        if Some(t.layer) != layer {
            return broken(i, "the transfers belong to different layers");
        }
        let from = now.index(t.from)?;
        let to = now.index(t.to)?;
        if from == to {
            return broken(i, "a slot is copied onto itself");
        }
        if now.slots[from] != Some(t.expert) {
            return broken(i, "the source does not hold the expert");
        }
        // While the slot is written it holds nothing, so its expert must have another copy.
        if let Some(lost) = now.slots[to] {
            if copies[lost as usize] == 1 {
                return broken(i, "the last copy of an expert is overwritten");
            }
            copies[lost as usize] -= 1;
        }
        now.slots[to] = Some(t.expert);
        copies[t.expert as usize] += 1;
        // A spare slot whose expert also has another copy is free; only unique contents count.
        if spares_needed(&now, &copies) > max_spares {
            return broken(i, "more spare slots are in use than allowed");
        }
    }
    if now.regular().ne(target.iter().map(|&e| Some(e))) {
        return broken(migration.transfers.len(), "the slots do not end up as planned");
    }
    Ok(())
}

/// Spare slots that hold the only copy of an expert.
fn spares_needed(now: &Contents, copies: &[usize]) -> usize {
    let spares = now.slots.chunks_exact(now.width).flat_map(|row| &row[now.regular..]);
    spares.flatten().filter(|&&e| copies[e as usize] == 1).count()
}
