//! Experts in any places, with copies, give the bits of one rank on every geometry, backend and expert path.

use std::sync::Arc;

use candle_core::DType;
use model_runtime::MoeInfo;
use moe_comm::{ExpertPlacement, ParallelConfig, ReplicaChoice};
use moe_engine::parallel::Replica;
use moe_layer::{ExpertPlacements, MoePath};

use crate::geometries::{Case, Origin, backends, one_rank, outcome};

/// Numbers from a seed (an LCG of Knuth's), the same on every machine.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).rev().for_each(|i| items.swap(i, self.below(i + 1)));
    }
}

/// A random placement: every expert has a slot, `redundant` more slots contain copies, and no rank holds an expert
/// twice. The ranks may have different numbers of slots.
pub fn random_layer(experts: usize, redundant: usize, ranks: usize, numbers: &mut Numbers) -> Vec<Vec<u32>> {
    let mut slots = vec![Vec::new(); ranks];
    for expert in 0..experts as u32 {
        slots[numbers.below(ranks)].push(expert);
    }
    for _ in 0..redundant.min(experts * (ranks - 1)) {
        // A rank that does not hold the expert yet.
        let mut rank = numbers.below(ranks);
        let mut expert = numbers.below(experts) as u32;
        while slots[rank].contains(&expert) {
            (rank, expert) = (numbers.below(ranks), numbers.below(experts) as u32);
        }
        slots[rank].push(expert);
    }
    slots.iter_mut().for_each(|slots| numbers.shuffle(slots));
    slots
}

/// The properties of a model's experts.
pub fn moe_of(replicas: &[Replica]) -> MoeInfo {
    replicas[0].model.info().moe.clone().unwrap()
}

/// The backends over ranks that share experts.
pub fn expert_parallel() -> Vec<ParallelConfig> {
    let several = |p: &ParallelConfig| p.enable_expert_parallel && p.tp * p.dp > 1;
    let linear = |p| ParallelConfig { placement: ExpertPlacement::Linear, ..p };
    backends().into_iter().filter(several).map(linear).collect()
}

/// Runs a case with random and with uneven placements, and with the usual initial placement.
fn check_case(case: &Case, numbers: &mut Numbers, turn: usize) {
    let want = one_rank(case);
    let origin = Origin::open(case.model);
    let plain = origin.load(case).unwrap_or_else(|e| panic!("{case:?}: {e:#}"));
    let moe = moe_of(&plain);
    let ranks = case.parallel.tp * case.parallel.dp;
    drop(plain);
    let redundant = numbers.below(2 * ranks + 1).min(moe.num_experts * (ranks - 1));
    let table: Vec<_> =
        moe.layers.iter().map(|_| random_layer(moe.num_experts, redundant, ranks, numbers)).collect();
    let placements = match turn % 3 {
        0 => ExpertPlacements { num_redundant_experts: redundant.max(1), ..ExpertPlacements::default() },
        _ => ExpertPlacements { table: Some(table.into()), ..ExpertPlacements::default() },
    };
    let placements = ExpertPlacements { replicas: ReplicaChoice::ALL[turn / 3 % 3], ..placements };
    let replicas =
        origin.load_placed(case, &placements).unwrap_or_else(|e| panic!("{case:?} {placements:?}: {e:#}"));
    let slots = replicas[0].model.placed_experts(0).unwrap().map().num_slots();
    assert!(slots >= moe.num_experts);
    let lockstep = case.parallel.dp > 1;
    let got = outcome(&replicas, lockstep).unwrap_or_else(|e| panic!("{case:?} {placements:?}: {e:#}"));
    assert!(got.1 == want.1, "{case:?} {placements:?}: other logits");
    assert!(got.0 == want.0, "{case:?} {placements:?}: other results");
}

#[test]
fn any_placement_gives_the_bits_of_one_rank() {
    let mut numbers = Numbers(7);
    // Packed and separate tensors, uneven experts; the panels of a wide model are in the embedded one.
    let qwen = ["base", "packed", "narrow-experts", "top-1", "all-experts", "embedded"];
    let deepseek = ["deepseek-v2", "deepseek-packed-hub", "deepseek-sigmoid"];
    for (i, parallel) in expert_parallel().into_iter().enumerate() {
        let dtype = if i % 2 == 0 { DType::F32 } else { DType::BF16 };
        let path = if i % 4 < 2 { MoePath::Fused } else { MoePath::Legacy };
        let chunk = [None, Some(1), Some(7)][i % 3];
        let case = Case { chunk, ..Case::new(qwen[i % qwen.len()], dtype, parallel) };
        check_case(&case, &mut numbers, i);
        let origin = |model: &&&str| Origin::open(model).fits(&parallel);
        let fitting: Vec<_> = deepseek.iter().filter(origin).collect();
        if let Some(model) = fitting.get(i % fitting.len().max(1)) {
            let case = Case { chunk, path: Some(path), ..Case::new(model, dtype, parallel) };
            check_case(&case, &mut numbers, i + 1);
        }
    }
}

#[test]
fn maps_that_do_not_fit_are_refused_by_layer_rank_slot_and_expert() {
    let origin = Origin::open("base");
    let ep = ParallelConfig { tp: 2, enable_expert_parallel: true, ..ParallelConfig::default() };
    let refused = |parallel: ParallelConfig, placements: ExpertPlacements| {
        let case = Case::new("base", DType::F32, parallel);
        format!("{:#}", origin.load_placed(&case, &placements).err().unwrap())
    };
    let moe = moe_of(&origin.load(&Case::new("base", DType::F32, ep)).unwrap());
    let layers = moe.layers.len();
    let experts = moe.num_experts as u32;
    let good: Vec<Vec<u32>> = vec![(0..2).collect(), (2..experts).collect()];
    type Table = Vec<Vec<Vec<u32>>>;
    let with = |change: &dyn Fn(&mut Table)| {
        let mut table = vec![good.clone(); layers];
        change(&mut table);
        ExpertPlacements { table: Some(Arc::from(table)), ..ExpertPlacements::default() }
    };
    let last = layers - 1;
    for (placements, said) in [
        (
            with(&|t| t[last][1][0] = experts),
            format!("layer {last}: slot 2 of rank 1 holds expert {experts}"),
        ),
        (with(&|t| t[last][1][1] = 2), format!("layer {last}: slot 3: rank 1 holds expert 2 twice")),
        (with(&|t| t[0][0][1] = 5), "layer 0: none of the".to_string()),
        (with(&|t| t[0].push(Vec::new())), "layer 0: it is for 3 ranks, but 2 share".to_string()),
        (with(&|t| drop(t.pop())), format!("it has {last} layers, but the model has {layers}")),
        (
            ExpertPlacements { num_redundant_experts: 1000, ..ExpertPlacements::default() },
            format!("at most {experts} are redundant"),
        ),
    ] {
        let error = refused(ep, placements);
        assert!(error.contains(&said), "{said}: {error}");
    }
    let alone = ParallelConfig::default();
    assert!(refused(alone, with(&|_| ())).contains("expert parallelism over at least two ranks"));
}
