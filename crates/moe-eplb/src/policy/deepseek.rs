//! The published EPLB algorithm: pack groups to nodes, replicate inside nodes, pack to devices.
//!
//! The algorithm has three greedy steps. They may put two copies of an expert on one device, where the second one is
//! useless and which engines refuse. This policy prevents that: no expert gets more copies than there are devices, and
//! copies on the same device are exchanged with copies of another device ([`part_copies`](super::part::part_copies)).
//! Placements that are already valid in the published code are unchanged. On equal loads the lower index wins, where
//! the published code follows the order of an unstable sort.

use super::part::part_copies;
use super::{Layout, Policy, Task};
use crate::error::Result;
use crate::matching::keep_slots;
use crate::score::Objective;
use crate::topology::Topology;

/// DeepSeek's algorithm: hierarchical if the groups divide over the nodes, else global.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deepseek {
    /// Treat the machine as one node in any case.
    pub global: bool,
    /// Follow the published algorithm exactly, even where it puts two copies of an expert on one device.
    pub allow_duplicates: bool,
}

impl Policy for Deepseek {
    fn name(&self) -> &'static str {
        "deepseek"
    }

    fn objective(&self) -> Objective {
        Objective::Aggregate
    }

    fn allows_duplicates(&self) -> bool {
        self.allow_duplicates
    }

    fn place(&self, task: &Task) -> Result<Layout> {
        task.check()?;
        let flat;
        let topology = if self.global {
            flat = task.topology.with_nodes(1, 1)?;
            &flat
        } else {
            task.topology
        };
        let load = task.summed_f32();
        let slots = match (self.allow_duplicates, task.valid_current()) {
            (true, _) => place_layer(&load, topology).0,
            (false, None) => place_apart(&load, topology),
            (false, Some(current)) => {
                keep_slots(current, &place_apart(&load, topology), topology.slots_per_device())
            }
        };
        Ok(Layout { slots, exhaustive: false, steps: task.topology.slots() as u64 })
    }
}

/// The expert of every slot and which of the expert's copies it is, in order of replication.
pub(crate) fn place_layer(load: &[f32], topology: &Topology) -> (Vec<u32>, Vec<u32>) {
    let hierarchical = topology.groups().is_multiple_of(topology.nodes());
    let (nodes, groups) = if hierarchical { (topology.nodes(), topology.groups()) } else { (1, 1) };
    let mut slots = Vec::with_capacity(topology.slots());
    let mut ranks = Vec::with_capacity(topology.slots());
    for node in place_nodes(load, topology, (nodes, groups), u32::MAX) {
        slots.extend(node.copies().map(|copy| node.members[node.expert[copy]] as u32));
        ranks.extend(node.copies().map(|copy| node.rank[copy]));
    }
    (slots, ranks)
}

/// The expert of every slot, with no expert twice on a device. If the devices of a node have more slots than the node
/// has experts, experts would be repeated; then the whole machine counts as one node. The caller must ensure that a
/// device has no more slots than there are experts.
fn place_apart(load: &[f32], topology: &Topology) -> Vec<u32> {
    let nodes = topology.nodes();
    let groups = topology.groups();
    let hierarchical =
        groups.is_multiple_of(nodes) && topology.slots_per_device() <= topology.experts() / nodes;
    let (nodes, groups) = if hierarchical { (nodes, groups) } else { (1, 1) };
    let most = (topology.devices() / nodes) as u32;
    let mut slots = Vec::with_capacity(topology.slots());
    for node in place_nodes(load, topology, (nodes, groups), most) {
        let mut experts: Vec<usize> = node.copies().map(|copy| node.expert[copy]).collect();
        part_copies(&mut experts, topology.slots_per_device(), |expert| {
            load[node.members[expert]] / node.count[expert] as f32
        });
        slots.extend(experts.into_iter().map(|expert| node.members[expert] as u32));
    }
    slots
}

/// The result of the algorithm for one node. Experts are numbered from 0 within the node.
struct Node {
    /// The node's experts, numbered as in the whole machine.
    members: Vec<usize>,
    /// Expert and number of each copy, and the copies of each expert.
    expert: Vec<usize>,
    rank: Vec<u32>,
    count: Vec<u32>,
    /// The copies of each device.
    devices: Vec<Vec<usize>>,
}

impl Node {
    /// The copies in the order of slots.
    fn copies(&self) -> impl Iterator<Item = usize> {
        self.devices.iter().flatten().copied()
    }
}

/// The three steps, with at most `most` copies of an expert.
fn place_nodes(
    load: &[f32],
    topology: &Topology,
    (nodes, groups): (usize, usize),
    most: u32,
) -> impl Iterator<Item = Node> {
    experts_of_nodes(load, nodes, groups).into_iter().map(move |members| {
        let local: Vec<f32> = members.iter().map(|&e| load[e]).collect();
        let (expert, rank, count) = replicate(&local, topology.slots() / nodes, most);
        let per_copy: Vec<f32> = expert.iter().map(|&e| local[e] / count[e] as f32).collect();
        let devices = balanced_packing(&per_copy, topology.devices() / nodes);
        Node { members, expert, rank, count, devices }
    })
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

/// Puts the heaviest load that is left into the lightest pack with room; every pack gets the same number.
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

/// One copy each, then one more for the largest load per copy until the slots are full, at most `most` of an expert.
/// Returns expert and copy number of every slot, and the copies of every expert.
fn replicate(load: &[f32], slots: usize, most: u32) -> (Vec<usize>, Vec<u32>, Vec<u32>) {
    let mut expert: Vec<usize> = (0..load.len()).collect();
    let mut rank = vec![0; load.len()];
    let mut count = vec![1u32; load.len()];
    for _ in load.len()..slots {
        let per_copy = |e: usize| load[e] / count[e] as f32;
        let open = (0..load.len()).filter(|&e| count[e] < most);
        let heaviest = open.reduce(|top, e| if per_copy(e) > per_copy(top) { e } else { top });
        let Some(top) = heaviest else { break };
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
