//! The published EPLB algorithm: pack groups to nodes, replicate inside nodes, pack to devices.
//!
//! Three greedy steps without repair. It may put two copies of an expert on one device, which costs
//! a slot; engines that rely on its exact output get exactly that. On equal loads the lower index
//! wins, where the published code follows the order of an unstable sort.

use super::{Layout, Policy, Task};
use crate::error::Result;
use crate::score::Objective;
use crate::topology::Topology;

/// DeepSeek's algorithm: hierarchical if the groups divide over the nodes, else global.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deepseek {
    /// Treat the machine as one node in any case.
    pub global: bool,
}

impl Policy for Deepseek {
    fn name(&self) -> &'static str {
        "deepseek"
    }

    fn objective(&self) -> Objective {
        Objective::Aggregate
    }

    fn allows_duplicates(&self) -> bool {
        true
    }

    fn place(&self, task: &Task) -> Result<Layout> {
        let flat;
        let topology = if self.global {
            flat = task.topology.with_nodes(1, 1)?;
            &flat
        } else {
            task.topology
        };
        let slots = place_layer(&task.summed_f32(), topology).0;
        Ok(Layout { slots, exhaustive: false, steps: task.topology.slots() as u64 })
    }
}

/// The expert of every slot and which of the expert's copies it is, in order of replication.
pub(crate) fn place_layer(load: &[f32], topology: &Topology) -> (Vec<u32>, Vec<u32>) {
    let hierarchical = topology.groups().is_multiple_of(topology.nodes());
    let (nodes, groups) = if hierarchical { (topology.nodes(), topology.groups()) } else { (1, 1) };
    let mut slots = Vec::with_capacity(topology.slots());
    let mut ranks = Vec::with_capacity(topology.slots());
    for members in experts_of_nodes(load, nodes, groups) {
        let local: Vec<f32> = members.iter().map(|&e| load[e]).collect();
        let (expert, rank, count) = replicate(&local, topology.slots() / nodes);
        let per_copy: Vec<f32> = expert.iter().map(|&e| local[e] / count[e] as f32).collect();
        for pack in balanced_packing(&per_copy, topology.devices() / nodes) {
            slots.extend(pack.iter().map(|&copy| members[expert[copy]] as u32));
            ranks.extend(pack.iter().map(|&copy| rank[copy]));
        }
    }
    (slots, ranks)
}

/// Packs expert groups to nodes; lists each node's experts.
pub(crate) fn experts_of_nodes(load: &[f32], nodes: usize, groups: usize) -> Vec<Vec<usize>> {
    let size = load.len() / groups;
    let group_load: Vec<f32> = load.chunks_exact(size).map(|g| g.iter().sum()).collect();
    balanced_packing(&group_load, nodes)
        .into_iter()
        .map(|pack| pack.into_iter().flat_map(|g| g * size..(g + 1) * size).collect())
        .collect()
}

/// Heaviest first onto the lightest pack with room; every pack gets equally many.
fn balanced_packing(load: &[f32], packs: usize) -> Vec<Vec<usize>> {
    let room = load.len() / packs;
    if room == 1 {
        return (0..packs).map(|i| vec![i]).collect();
    }
    let mut order: Vec<usize> = (0..load.len()).collect();
    order.sort_by(|&a, &b| load[b].total_cmp(&load[a]));
    let mut content = vec![Vec::with_capacity(room); packs];
    let mut weight = vec![0f32; packs];
    for item in order {
        let open = (0..packs).filter(|&p| content[p].len() < room);
        // `min_by` keeps the first of equals.
        if let Some(pack) = open.min_by(|&a, &b| weight[a].total_cmp(&weight[b])) {
            content[pack].push(item);
            weight[pack] += load[item];
        }
    }
    content
}

/// One copy each, then one more for the largest load per copy until the slots are full.
/// Returns expert and copy number of every slot, and the copies of every expert.
fn replicate(load: &[f32], slots: usize) -> (Vec<usize>, Vec<u32>, Vec<u32>) {
    let mut expert: Vec<usize> = (0..load.len()).collect();
    let mut rank = vec![0; load.len()];
    let mut count = vec![1u32; load.len()];
    for _ in load.len()..slots {
        let mut top = 0;
        for e in 1..load.len() {
            if load[e] / count[e] as f32 > load[top] / count[top] as f32 {
                top = e;
            }
        }
        expert.push(top);
        rank.push(count[top]);
        count[top] += 1;
    }
    (expert, rank, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_example() {
        let topology = Topology::new(12, 16, 8).and_then(|t| t.with_nodes(2, 4)).unwrap();
        let weights: [[f32; 12]; 2] = [
            [90., 132., 40., 61., 104., 165., 39., 4., 73., 56., 183., 86.],
            [20., 107., 104., 64., 19., 197., 187., 157., 172., 86., 16., 27.],
        ];
        let expected = [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ];
        for (load, want) in weights.iter().zip(expected) {
            assert_eq!(place_layer(load, &topology).0, want);
        }
    }
}
