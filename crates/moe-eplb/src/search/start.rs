//! Where the search starts: copies by greedy allotment, placement heaviest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::pack::Table;

/// Copies per expert that minimise the largest `weight / copies`, with at most `devices` copies.
pub(crate) fn allot(weight: &[f32], slots: usize, devices: usize) -> Vec<u16> {
    let mut copies = vec![1u16; weight.len()];
    // The heap serves the largest load per copy; loads are not negative, so their bits are in order. Ties go to the
    // expert with fewer copies, so that all-zero loads give even copies.
    let candidate = |expert: usize, copies: u16| {
        ((weight[expert] / f32::from(copies)).to_bits(), Reverse(copies), Reverse(expert))
    };
    let mut heap: BinaryHeap<_> =
        (0..weight.len()).filter(|_| devices > 1).map(|e| candidate(e, 1)).collect();
    for _ in weight.len()..slots {
        let Some((_, _, Reverse(expert))) = heap.pop() else { break };
        copies[expert] += 1;
        if usize::from(copies[expert]) < devices {
            heap.push(candidate(expert, copies[expert]));
        }
    }
    copies
}

/// A scalar that stands for an expert's lanes: mean plus 0.67 standard deviations, the load it
/// stays under three times out of four.
pub(crate) fn risk<const W: usize>(row: &[f32; W]) -> f32 {
    let mean = row.iter().sum::<f32>() / W as f32;
    let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / W as f32;
    mean + 0.67 * variance.sqrt()
}

/// Heaviest copy first onto the device where it hurts least, never twice on one device.
pub(crate) fn pack<const W: usize>(row: &[[f32; W]], copies: &[u16], devices: usize, k: usize) -> Vec<u16> {
    let missing: Vec<u16> = copies.to_vec();
    fill(Table::new(devices, k), row, copies, &missing)
}

/// Turns the placement `current` into one with the given copies by as few transfers as that takes:
/// surplus copies leave the most loaded devices, missing ones are packed into the gaps.
pub(crate) fn transplant<const W: usize>(
    row: &[[f32; W]],
    copies: &[u16],
    current: &[u32],
    k: usize,
) -> Vec<u16> {
    let mut table = Table::from_slots(current, k);
    let mut load = table.loads(row, copies);
    let mut has = vec![0u16; row.len()];
    current.iter().for_each(|&e| has[e as usize] += 1);
    for e in by_weight(row, copies) {
        let unit = unit_of(&row[e], copies[e]);
        while has[e] > copies[e] {
            let holders = (0..load.len()).filter(|&d| table.holds(d, e));
            let total = |d: usize| load[d].iter().sum::<f32>();
            let Some(d) = holders.max_by(|&a, &b| total(a).total_cmp(&total(b))) else { break };
            table.remove(d, e);
            has[e] -= 1;
            for t in 0..W {
                load[d][t] -= unit[t];
            }
        }
    }
    let missing: Vec<u16> = copies.iter().zip(&has).map(|(want, have)| want - have).collect();
    fill(table, row, copies, &missing)
}

fn unit_of<const W: usize>(row: &[f32; W], copies: u16) -> [f32; W] {
    let share = 1.0 / f32::from(copies);
    row.map(|v| v * share)
}

/// Experts by falling risk per copy.
fn by_weight<const W: usize>(row: &[[f32; W]], copies: &[u16]) -> Vec<usize> {
    let key: Vec<f32> = row.iter().zip(copies).map(|(r, &c)| risk(r) / f32::from(c)).collect();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| key[b].total_cmp(&key[a]).then(a.cmp(&b)));
    order
}

/// Adds the `missing` copies of every expert to the table and returns its slots.
fn fill<const W: usize>(mut table: Table, row: &[[f32; W]], copies: &[u16], missing: &[u16]) -> Vec<u16> {
    let mut load = table.loads(row, copies);
    for e in by_weight(row, copies) {
        let unit = unit_of(&row[e], copies[e]);
        for _ in 0..missing[e] {
            match cheapest(&table, &load, e, &unit) {
                Some(d) => {
                    table.push(d, e);
                    for t in 0..W {
                        load[d][t] += unit[t];
                    }
                }
                // The loads of the two devices become approximate; the search sums them afresh.
                None => drop(table.displace(e)),
            }
        }
    }
    table.into_slots()
}

/// The device with room for `e` whose sum of squares grows least: that sees both the mean and which
/// episodes collide.
fn cheapest<const W: usize>(table: &Table, load: &[[f32; W]], e: usize, unit: &[f32; W]) -> Option<usize> {
    let mut best = None;
    let mut least = f32::INFINITY;
    for (d, load) in load.iter().enumerate() {
        if !table.has_room(d) {
            continue;
        }
        let mut cost = 0.0;
        for t in 0..W {
            let v = load[t] + unit[t];
            cost += v * v;
        }
        if cost < least && !table.holds(d, e) {
            best = Some(d);
            least = cost;
        }
    }
    best
}
