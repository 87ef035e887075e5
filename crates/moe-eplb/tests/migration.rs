//! Migrations on a simulated cluster: the right weights arrive, and no interruption loses one.

use crate::common::case;
use moe_eplb::migrate::{Contents, Operation, Place, Transfer};
use moe_eplb::{Joint, Loads, Migration, Placement, Policy, Topology, check_migration, plan_migration};
use proptest::prelude::*;

/// Weights as devices would hold them: the bytes of a slot, or garbage while it is written.
struct Cluster {
    experts: usize,
    width: usize,
    regular: usize,
    memory: Vec<Option<u64>>,
}

/// A number that stands for an expert's weights and differs from every other expert's.
fn weights(expert: u32) -> u64 {
    u64::from(expert).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xABCD
}

impl Cluster {
    fn new(placement: &Placement, devices: usize, spares: usize) -> Self {
        let regular = placement.slots_per_device();
        let width = regular + spares;
        let mut memory = vec![None; devices * width];
        for (slot, &e) in placement.layer(0).iter().enumerate() {
            memory[slot / regular * width + slot % regular] = Some(weights(e));
        }
        Self { experts: placement.experts(), width, regular, memory }
    }

    fn at(&mut self, place: Place) -> &mut Option<u64> {
        &mut self.memory[place.device as usize * self.width + place.slot as usize]
    }

    /// Writes garbage first, because that is the state after an interruption.
    fn run(&mut self, transfer: &Transfer, interrupted: bool) {
        let data = *self.at(transfer.from);
        assert_eq!(data, Some(weights(transfer.expert)), "the source holds other weights");
        *self.at(transfer.to) = None;
        self.check_available();
        if !interrupted {
            *self.at(transfer.to) = data;
        }
        self.check_available();
    }

    fn check_available(&self) {
        let experts = self.memory.iter().flatten().collect::<std::collections::BTreeSet<_>>().len();
        assert_eq!(experts, self.experts, "an expert has no complete copy");
    }

    /// The contents of the slots, as the runtime knows them.
    fn contents(&self, placement: &Placement) -> Contents {
        let mut contents = Contents::of(placement, 0, self.width - self.regular).unwrap();
        for (i, data) in self.memory.iter().enumerate() {
            let place = Place { device: (i / self.width) as u32, slot: (i % self.width) as u32 };
            let expert = data.and_then(|d| (0..self.experts as u32).find(|&e| weights(e) == d));
            contents.set(place, expert).unwrap();
        }
        contents
    }

    fn regular(&self) -> Vec<Option<u64>> {
        self.memory.chunks(self.width).flat_map(|row| &row[..self.regular]).copied().collect()
    }
}

/// Two placements of the same shape: before and after the loads changed.
fn two_placements(topology: &Topology, loads: &Loads) -> (Placement, Placement) {
    let experts = topology.experts();
    let policy = Joint { effort: 8, ..Joint::default() };
    let old = policy.plan(topology, loads, None).unwrap().placement;
    let turned: Vec<f64> = loads.layer(0).chunks(experts).flat_map(|r| r.iter().rev()).copied().collect();
    let next = Loads::episodes(loads.steps(), 1, experts, &turned).unwrap();
    // No current placement: rows and slots are not aligned, so that much has to move.
    (old, policy.plan(topology, &next, None).unwrap().placement)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn migrations_move_exactly_the_right_weights((topology, loads) in case(1, 2), cut in 0.0..1.0f64) {
        let experts = topology.experts();
        let (old, new) = two_placements(&topology, &loads);
        let start = Contents::of(&old, 0, 1).unwrap();
        let migration = plan_migration(&topology, 0, &start, new.layer(0)).unwrap();
        check_migration(&start, new.layer(0), &migration, experts, 1).unwrap();

        let want: Vec<_> = new.layer(0).iter().map(|&e| Some(weights(e))).collect();
        let mut cluster = Cluster::new(&old, topology.devices(), 1);
        migration.transfers.iter().for_each(|t| cluster.run(t, false));
        prop_assert_eq!(cluster.regular(), want.clone());

        // Interrupted while a slot is written; then planned again from what is there.
        let mut cluster = Cluster::new(&old, topology.devices(), 1);
        let stop = (cut * migration.transfers.len() as f64) as usize;
        for (i, t) in migration.transfers.iter().enumerate().take(stop + 1) {
            cluster.run(t, i == stop);
        }
        let state = cluster.contents(&old);
        // It continues to the new placement, or returns to the old one.
        for goal in [&new, &old] {
            let resumed = plan_migration(&topology, 0, &state, goal.layer(0)).unwrap();
            check_migration(&state, goal.layer(0), &resumed, experts, 1).unwrap();
            let mut copy = Cluster { memory: cluster.memory.clone(), ..cluster };
            resumed.transfers.iter().for_each(|t| copy.run(t, false));
            let want: Vec<_> = goal.layer(0).iter().map(|&e| Some(weights(e))).collect();
            prop_assert_eq!(copy.regular(), want);
        }
    }

    #[test]
    fn only_changed_slots_are_written((topology, loads) in case(1, 2)) {
        let (old, new) = two_placements(&topology, &loads);
        let start = Contents::of(&old, 0, 1).unwrap();
        let migration = plan_migration(&topology, 0, &start, new.layer(0)).unwrap();
        let k = topology.slots_per_device();
        let changed = old.layer(0).iter().zip(new.layer(0)).filter(|(a, b)| a != b).count();
        let parked = migration.transfers.iter().filter(|t| t.to.slot as usize >= k).count();
        prop_assert_eq!(migration.transfers.len(), changed + parked);
        // A circle needs at least two slots, and each is parked once.
        prop_assert!(parked <= changed / 2);
    }

    #[test]
    fn sends_and_receives_match((topology, loads) in case(1, 2)) {
        let (old, new) = two_placements(&topology, &loads);
        let migration = plan_migration(&topology, 0, &Contents::of(&old, 0, 1).unwrap(), new.layer(0)).unwrap();
        let mut remote = 0;
        for device in 0..topology.devices() as u32 {
            for operation in migration.operations(device) {
                remote += match operation {
                    Operation::Copy(t) => { prop_assert!(t.is_local()); 0 }
                    Operation::Send(_) => 1,
                    Operation::Receive(_) => -1,
                };
            }
        }
        prop_assert_eq!(remote, 0);
    }

    #[test]
    fn the_validator_rejects_every_broken_plan((topology, loads) in case(1, 2), pick in 0usize..1000) {
        let experts = topology.experts();
        let (old, new) = two_placements(&topology, &loads);
        let start = Contents::of(&old, 0, 1).unwrap();
        let migration = plan_migration(&topology, 0, &start, new.layer(0)).unwrap();
        prop_assume!(!migration.transfers.is_empty());
        let at = pick % migration.transfers.len();
        // A lost transfer.
        let mut lost = migration.clone();
        lost.transfers.remove(at);
        prop_assert!(check_migration(&start, new.layer(0), &lost, experts, 1).is_err());
        // Another expert in the same slot.
        let mut wrong = migration.clone();
        wrong.transfers[at].expert = (wrong.transfers[at].expert + 1) % experts as u32;
        if experts > 1 {
            prop_assert!(check_migration(&start, new.layer(0), &wrong, experts, 1).is_err());
        }
    }
}

#[test]
fn a_swap_needs_a_spare_slot() {
    let topology = Topology::new(2, 2, 2).unwrap();
    let old = Placement::from_phy2log(&topology, 1, vec![0, 1]).unwrap();
    assert!(plan_migration(&topology, 0, &Contents::of(&old, 0, 0).unwrap(), &[1, 0]).is_err());
    let start = Contents::of(&old, 0, 1).unwrap();
    let plan = plan_migration(&topology, 0, &start, &[1, 0]).unwrap();
    assert_eq!(plan.transfers.len(), 3);
    check_migration(&start, &[1, 0], &plan, 2, 1).unwrap();
    assert!(check_migration(&start, &[1, 0], &plan, 2, 0).is_err());
    // The naive order loses expert 1 for good.
    let place = |device, slot| Place { device, slot };
    let naive = Migration {
        transfers: vec![
            Transfer { layer: 0, expert: 0, from: place(0, 0), to: place(1, 0) },
            Transfer { layer: 0, expert: 1, from: place(1, 0), to: place(0, 0) },
        ],
    };
    assert!(check_migration(&start, &[1, 0], &naive, 2, 1).is_err());
}

#[test]
fn a_redundant_copy_serves_as_spare() {
    let topology = Topology::new(2, 3, 3).unwrap();
    let old = Placement::from_phy2log(&topology, 1, vec![0, 1, 1]).unwrap();
    let start = Contents::of(&old, 0, 0).unwrap();
    let plan = plan_migration(&topology, 0, &start, &[1, 0, 1]).unwrap();
    check_migration(&start, &[1, 0, 1], &plan, 2, 0).unwrap();
}

#[test]
fn sources_in_the_same_node_come_first() {
    let topology = Topology::new(2, 4, 4).and_then(|t| t.with_nodes(2, 1)).unwrap();
    // Expert 0 on nodes 0 and 1; device 2 (node 1) needs it.
    let old = Placement::from_phy2log(&topology, 1, vec![0, 1, 1, 0]).unwrap();
    let plan = plan_migration(&topology, 0, &Contents::of(&old, 0, 1).unwrap(), &[0, 1, 0, 0]).unwrap();
    assert_eq!(plan.transfers.len(), 1);
    assert_eq!(plan.transfers[0].from, Place { device: 3, slot: 0 });
    assert_eq!(plan.traffic(&topology).in_node, 1);
}
