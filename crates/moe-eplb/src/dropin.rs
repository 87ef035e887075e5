//! The entry points of the published load balancers, with the same arguments and results.
//!
//! Both take `weight[layer][expert]` and return tables as nested vectors. They run DeepSeek's algorithm, so callers
//! that switch to them get equal placements. vLLM's form also takes any policy; new code should use [`Policy::plan`].
//! Inputs on which the published code crashes or returns nonsense are errors here: no layers, zero groups, NaN,
//! infinite or negative weights.

use crate::error::{Error, Result, expect_len};
use crate::loads::Loads;
use crate::matching::keep_slots;
use crate::placement::Placement;
use crate::policy::{Deepseek, Policy, place_layer};
use crate::topology::Topology;

/// What DeepSeek's `rebalance_experts` returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMaps {
    /// Expert of every physical slot, `[layers][slots]`.
    pub phy2log: Vec<Vec<u32>>,
    /// Slots of every expert, `[layers][experts][largest count]`, padded with -1.
    pub log2phy: Vec<Vec<Vec<i32>>>,
    /// Copies of every expert, `[layers][experts]`.
    pub logcnt: Vec<Vec<u32>>,
}

/// `rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)` of deepseek-ai/EPLB.
///
/// As in the published code, copies appear in `log2phy` in the order in which they were replicated.
///
/// ```
/// use moe_eplb::dropin::rebalance_experts;
/// let weight = [vec![90., 132., 40., 61.]]; // [layers][experts]
/// let maps = rebalance_experts(&weight, 6, 1, 1, 2)?;
/// assert_eq!(maps.phy2log[0].len(), 6);
/// assert_eq!(maps.logcnt[0], [2, 2, 1, 1]);
/// # Ok::<(), moe_eplb::Error>(())
/// ```
///
/// # Errors
/// If the sizes do not divide as the published assertions demand, or a weight is not a finite
/// non-negative number.
pub fn rebalance_experts(
    weight: &[Vec<f32>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_gpus: usize,
) -> Result<ExpertMaps> {
    let topology = topology_of(weight, num_replicas, num_groups, num_nodes, num_gpus)?;
    loads_of(weight)?;
    let placed: Vec<_> = weight.iter().map(|row| place_layer(row, &topology)).collect();
    let logcnt: Vec<Vec<u32>> = placed.iter().map(|(slots, _)| counts(slots, topology.experts())).collect();
    let width = logcnt.iter().flatten().copied().max().unwrap_or(0) as usize;
    let log2phy = |(slots, ranks): &(Vec<u32>, Vec<u32>)| {
        let mut map = vec![vec![-1; width]; topology.experts()];
        for (slot, (&e, &rank)) in slots.iter().zip(ranks).enumerate() {
            map[e as usize][rank as usize] = slot as i32;
        }
        map
    };
    Ok(ExpertMaps {
        log2phy: placed.iter().map(log2phy).collect(),
        logcnt,
        phy2log: placed.into_iter().map(|(slots, _)| slots).collect(),
    })
}

/// `rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks, old)` of vLLM's
/// default policy: only `phy2log`, and an expert that stays on a rank keeps its slot. Ranks that do
/// not divide over the nodes are treated as one node.
///
/// # Errors
/// The errors of [`rebalance_experts`], and if the old table has another shape.
pub fn vllm_rebalance_experts(
    weight: &[Vec<f32>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
    old_global_expert_indices: Option<&[Vec<u32>]>,
) -> Result<Vec<Vec<u32>>> {
    vllm_rebalance_experts_with(
        &Deepseek { allow_duplicates: true, ..Deepseek::default() },
        weight,
        num_replicas,
        num_groups,
        num_nodes,
        num_ranks,
        old_global_expert_indices,
    )
}

/// The same as [`vllm_rebalance_experts`], with another policy.
///
/// # Errors
/// The errors of [`vllm_rebalance_experts`], and if the policy cannot serve the shape.
pub fn vllm_rebalance_experts_with(
    policy: &dyn Policy,
    weight: &[Vec<f32>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
    old_global_expert_indices: Option<&[Vec<u32>]>,
) -> Result<Vec<Vec<u32>>> {
    let nodes = if num_nodes > 0 && num_ranks.is_multiple_of(num_nodes) { num_nodes } else { 1 };
    let topology = topology_of(weight, num_replicas, num_groups, nodes, num_ranks)?;
    let old = match old_global_expert_indices {
        Some(rows) => {
            expect_len("layers of the old table", weight.len(), rows.len())?;
            let slots = topology.slots();
            rows.iter()
                .try_for_each(|row| expect_len("slots of a layer of the old table", slots, row.len()))?;
            Some(Placement::from_phy2log(&topology, weight.len(), rows.concat())?)
        }
        None => None,
    };
    let plan = policy.plan(&topology, &loads_of(weight)?, old.as_ref())?;
    let rows = plan.placement.phy2log().chunks_exact(topology.slots()).enumerate();
    let settled = |(layer, row): (usize, &[u32])| match &old {
        Some(old) => keep_slots(old.layer(layer), row, topology.slots_per_device()),
        None => row.to_vec(),
    };
    Ok(rows.map(settled).collect())
}

fn counts(slots: &[u32], experts: usize) -> Vec<u32> {
    let mut counts = vec![0; experts];
    slots.iter().for_each(|&e| counts[e as usize] += 1);
    counts
}

fn topology_of(
    weight: &[Vec<f32>],
    replicas: usize,
    groups: usize,
    nodes: usize,
    gpus: usize,
) -> Result<Topology> {
    let first = weight.first().ok_or(Error::Empty("layers"))?;
    Topology::new(first.len(), replicas, gpus)?.with_nodes(nodes, groups)
}

fn loads_of(weight: &[Vec<f32>]) -> Result<Loads> {
    let experts = weight.first().map_or(0, Vec::len);
    weight.iter().try_for_each(|row| expect_len("weights of a layer", experts, row.len()))?;
    let flat: Vec<f64> = weight.iter().flatten().map(|&v| f64::from(v)).collect();
    Loads::aggregate(weight.len(), experts, &flat)
}
