//! Compares bench rows with the recorded figures of another planner.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::table::mean;

/// Prints, for every row that `file` contains, which share of the other planner's excess over perfect balance is
/// removed, in which share of its time, and the result on the held-out window. The uniform family is left out of the
/// mean, because there is nothing to balance.
pub fn compare(rows: &[Value], file: &Path) -> Result<()> {
    let known: Value = serde_json::from_slice(&std::fs::read(file)?)
        .with_context(|| format!("bad baseline {}", file.display()))?;
    println!(
        "\n{:24} {:>9} {:>7} {:>9} {:>9}",
        "against the baseline", "removed", "time x", "heldout", "drift"
    );
    let mut removed_shares = Vec::new();
    for row in rows {
        let name = row["workload"].as_str().unwrap_or_default();
        let other = &known[name];
        let both = |key: &str| row[key].as_f64().zip(other[key].as_f64());
        let (Some((ours, theirs)), Some((ms, their_ms))) = (both("par_episode_mean"), both("solve_ms"))
        else {
            continue;
        };
        let difference =
            |key: &str| both(key).map_or_else(|| "-".to_owned(), |(a, b)| format!("{:+.4}", a - b));
        let removed = (theirs - ours) / (theirs - 1.0);
        if !name.ends_with("/uniform") {
            removed_shares.push(removed);
        }
        println!(
            "{name:24} {:>8.1}% {:>7.2} {:>9} {:>9}",
            removed * 100.0,
            ms / their_ms,
            difference("heldout_par_episode_mean"),
            difference("drift_par_episode_mean"),
        );
    }
    println!("mean share of the in-window excess removed: {:.1}%", mean(&removed_shares) * 100.0);
    Ok(())
}
