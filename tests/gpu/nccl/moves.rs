//! Experts move between GPUs under a captured graph. Results stay the same whatever moves, and all ranks roll back a
//! corrupt transfer.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use moe_comm::{
    Collectives, Communicator, EpBackend, ExpertMap, NcclComm, NcclWindow, ParallelConfig, ParallelGroups,
    PeerWindow, ReduceOp, ReplicaChoice, Window,
};
use moe_kernels::cuda::{Graph, device_calls};
use moe_kernels::quant::QuantSource;
use moe_kernels::{Buffer, Exec, QuantGroup, QuantScheme, StepContext, TensorView};
use moe_layer::{
    Activation, BlockContext, BlockOptions, ExpertPlacements, Fusion, MoveRound, MoveStatus, PlacedExperts,
    PlanStep, RouterConfig, SparseMoeBlock, load_block_on,
};

use super::faulty::{Fault, Faulty};
use super::{LIMIT, run_nccl_ranks};
use crate::common::{Rng, assert_close};
use crate::quant::matrices::{Matrix, Source, fp8, int};

/// Five experts and three copies, four slots on each of two ranks.
const EXPERTS: usize = 5;
const COPIES: usize = 3;
const MOVES: usize = 100;

#[derive(Clone)]
pub struct Case {
    dtype: DType,
    /// Scheme of the experts.
    scheme: QuantScheme,
    widths: [usize; 2],
    /// Tokens of each rank.
    tokens: usize,
    parallel: ParallelConfig,
    replicas: ReplicaChoice,
    /// Whether experts are sent by NCCL instead of over peer memory.
    by_nccl: bool,
    /// The largest allowed error, relative to the largest result (at least 1).
    bound: f64,
}

pub fn cases() -> Vec<Case> {
    let parallel = |tp, backend: EpBackend| ParallelConfig {
        tp,
        dp: 2 / tp,
        enable_expert_parallel: true,
        backend: backend.into(),
        ..ParallelConfig::default()
    };
    let gathers = parallel(1, EpBackend::AllgatherReducescatter);
    let replicated = parallel(2, EpBackend::LocalAllreduce);
    let replicas = ReplicaChoice::Hash;
    let bf16 = |tokens, parallel| Case {
        dtype: DType::BF16,
        scheme: QuantScheme::NONE,
        widths: [256, 128],
        tokens,
        parallel,
        replicas,
        by_nccl: false,
        bound: 2e-2,
    };
    let quantised = |scheme, case: Case| Case { scheme, ..case };
    vec![
        bf16(8, gathers),
        // No fast kernel takes these sizes: a slot is not a whole number of vectors.
        Case { dtype: DType::F32, widths: [42, 25], bound: 1e-5, ..bf16(8, gathers) },
        bf16(8, parallel(1, EpBackend::DeepEp)),
        // With this number of tokens, copies share their rows.
        bf16(200, gathers),
        // Launches that contain the router: one launch for the whole layer, then lists by one copy of each expert, and
        // by all copies.
        bf16(3, replicated),
        bf16(8, replicated),
        bf16(200, replicated),
        // Each rank of a group uses the nearest copies, after the router.
        Case { replicas: ReplicaChoice::LocalFirst, ..bf16(200, replicated) },
        // Integers, scales and zero points, by kernels for few rows, for many rows, and for any shape.
        quantised(int(4, 128, true, false), bf16(8, gathers)),
        quantised(int(4, 128, false, false), bf16(3, replicated)),
        quantised(fp8(QuantGroup::Block { n: 128, k: 128 }), bf16(200, gathers)),
        quantised(int(8, 32, true, false), Case { by_nccl: true, ..bf16(8, gathers) }),
        quantised(fp8(QuantGroup::Channel), Case { dtype: DType::F32, bound: 1e-3, ..bf16(8, gathers) }),
        Case { by_nccl: true, ..bf16(8, gathers) },
        Case { by_nccl: true, ..bf16(200, replicated) },
    ]
}

impl Case {
    /// This case with experts that are sent by NCCL, or over peer memory.
    pub fn by_nccl(self, by_nccl: bool) -> Self {
        Self { by_nccl, ..self }
    }

    /// Whether all ranks have the same rows; otherwise each rank has its own.
    fn is_replicated(&self) -> bool {
        self.parallel.tp == 2
    }

    /// Whether the experts' launches contain the router.
    fn is_monolithic(&self) -> bool {
        self.is_replicated() && self.replicas != ReplicaChoice::LocalFirst
    }
}

/// Other experts in the same slots: all are renumbered, so that every expert keeps a slot and no rank holds one twice.
pub fn renamed(map: &ExpertMap, rng: &mut Rng) -> Vec<u32> {
    let names = rng.permutation(map.num_experts());
    map.phy2log().iter().map(|&expert| names[expert as usize]).collect()
}

/// Runs rounds until the move has ended. `hosts` connects the ranks so that they can agree.
pub fn shift(
    placed: &PlacedExperts,
    (phy2log, bytes): (&[u32], usize),
    window: &Arc<dyn Window>,
    hosts: &dyn Communicator,
    ex: &mut Exec,
) -> Result<MoveStatus> {
    let round = MoveRound { layer: 0, phy2log: phy2log.to_vec(), sole: Vec::new(), bytes, limit: LIMIT };
    for _ in 0..10_000 {
        let status = placed.move_round(&round, hosts, Some(window), ex)?;
        if status != MoveStatus::Underway {
            return Ok(status);
        }
    }
    panic!("a move that never ends")
}

/// A rank's block, whose window may be in use. The rows are the rank's own, or in a tensor-parallel group the same on
/// all ranks.
pub fn block(
    case: &Case,
    model: &Model,
    comm: &NcclComm,
    ex: &mut Exec,
) -> Result<(SparseMoeBlock, StepContext)> {
    let geometry = case.parallel.geometry(comm.rank())?;
    let groups = ParallelGroups::new(&geometry, comm.split(0, comm.rank(), ex)?, ex)?;
    let placements = ExpertPlacements {
        num_redundant_experts: COPIES,
        replicas: case.replicas,
        movable: true,
        ..ExpertPlacements::default()
    };
    let quant = model.quant.clone();
    let context = BlockContext { geometry, groups, placements, quant, ..BlockContext::default() };
    let vb = VarBuilder::from_tensors(model.tensors.iter().cloned().collect(), case.dtype, ex.device());
    let options = BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(EXPERTS, 2) },
        hidden_size: case.widths[0],
        intermediate_size: case.widths[1],
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    };
    let (mut block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts"))?;
    // If so, this test adds the ranks' sums.
    assert_eq!(block.defer_sum(), case.is_replicated());
    let asked = PlanStep::decode(case.tokens);
    let form = block.choose(&asked, &[Fusion::Nothing], &ex.machine());
    assert!(
        case.scheme != QuantScheme::NONE || form.monolithic.is_some() == case.is_monolithic(),
        "{:?}",
        block.stages(form, &asked, &[Fusion::Nothing], &ex.machine())
    );
    let step = StepContext {
        rank_tokens: Some(vec![case.tokens; 2].into()),
        only_decode: true,
        ..StepContext::default()
    };
    Ok((block, step))
}

/// The layer that all ranks load.
pub struct Model {
    tensors: Vec<(String, Tensor)>,
    quant: Option<Arc<dyn QuantSource>>,
}

pub fn model(case: &Case, rng: &mut Rng) -> Model {
    let [h, i] = case.widths;
    // The products have about the size of their inputs.
    let tensor = |name: &str, dims: &[usize], rng: &mut Rng| {
        let scale = 1.7 / (dims[dims.len() - 1] as f64).sqrt();
        let values = rng.floats(DType::F32, dims).into_tensor().unwrap().affine(scale, 0.0).unwrap();
        (name.to_string(), values.to_dtype(case.dtype).unwrap())
    };
    let gate = tensor("gate.weight", &[EXPERTS, h], rng);
    if case.scheme == QuantScheme::NONE {
        let experts = [("experts.gate_up_proj", [EXPERTS, 2 * i, h]), ("experts.down_proj", [EXPERTS, h, i])];
        let experts = experts.map(|(name, dims)| tensor(name, &dims, rng));
        return Model { tensors: [gate].into_iter().chain(experts).collect(), quant: None };
    }
    let mut source = Source::default();
    for expert in 0..EXPERTS {
        for (name, n, k) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
            source
                .matrices
                .insert(format!("experts.{expert}.{name}"), Matrix::new(rng, n, k, case.scheme, 1));
        }
    }
    Model { tensors: vec![gate], quant: Some(Arc::new(source)) }
}

/// The window through which a rank receives experts.
pub fn window(case: &Case, bytes: usize, comm: &NcclComm, ex: &mut Exec) -> Result<Box<dyn Window>> {
    if case.by_nccl {
        return Ok(Box::new(NcclWindow::new(comm.split(0, comm.rank(), ex)?, bytes, ex)?));
    }
    let window = PeerWindow::new(comm, &mut ex.clone(), bytes, ex)?;
    Ok(Box::new(window.unwrap_or_else(|why| panic!("no shared memory: {why}"))))
}

/// Moves experts under one graph. Returns the results before and after each move, and how the moves ended. The bytes
/// for `victim` are corrupted.
fn run(case: &Case, seed: u64, victim: Option<usize>) -> Vec<(Vec<Buffer>, Vec<MoveStatus>)> {
    let mut rng = Rng::seeded(seed);
    let model = model(case, &mut rng);
    let rows = rng.floats(case.dtype, &[2 * case.tokens, case.widths[0]]).into_tensor().unwrap();
    let on_rank = |comm: &NcclComm, ex: &mut Exec| -> Result<_> {
        let (block, mut step) = block(case, &model, comm, ex)?;
        let placed = block.placed_experts().unwrap();
        let inner = window(case, placed.landing_bytes().unwrap(), comm, ex)?;
        let window: Arc<dyn Window> = match victim.filter(|&rank| rank != comm.rank()) {
            Some(victim) => Arc::new(Faulty::new(inner, Fault::Corrupt(victim))),
            None => Arc::from(inner),
        };
        let first = if case.is_replicated() { 0 } else { comm.rank() * case.tokens };
        let x = rows.narrow(0, first, case.tokens)?.to_device(ex.device())?;
        let x = TensorView::new(&x)?;
        let mut out = ex.zeros(DType::F32, &[case.tokens, case.widths[0]])?;
        let mut forward = |ex: &mut Exec| -> Result<()> {
            block.forward_into(x.view()?, out.view_mut(), &mut step, ex)?;
            if case.is_replicated() { comm.all_reduce(out.view_mut(), ReduceOp::Sum, ex) } else { Ok(()) }
        };
        // The first run creates every buffer; then a graph is recorded.
        forward(ex)?;
        let mut graph = Graph::capture(ex, forward)?;
        // The same moves on all ranks.
        let mut rng = Rng::seeded(seed ^ 0x55);
        let mut results = Vec::new();
        let mut statuses = Vec::new();
        for turn in 0..=MOVES {
            graph.launch()?;
            comm.watch(ex)?;
            results.push(ex.to_host(out.view())?);
            if turn == MOVES {
                break;
            }
            let before = placed.map();
            let target = renamed(&before, &mut rng);
            let bytes = [777, 5000, usize::MAX][rng.below(3)];
            // This step is in progress when the slots change.
            graph.launch()?;
            let status = shift(placed, (&target, bytes), &window, comm, ex)?;
            let want = if status == MoveStatus::Moved { &target[..] } else { before.phy2log() };
            assert_eq!(placed.map().phy2log(), want);
            statuses.push(status);
        }
        comm.check()?;
        // Ranks drop graphs and windows when no rank uses them any more.
        ex.synchronize()?;
        comm.barrier(ex)?;
        drop(graph);
        Ok((results, statuses))
    };
    run_nccl_ranks(2, LIMIT, on_rank).into_iter().map(Result::unwrap).collect()
}

/// The result of one rank on the CPU.
fn reference(case: &Case, seed: u64) -> Buffer {
    let mut rng = Rng::seeded(seed);
    let model = model(case, &mut rng);
    let rows = rng.floats(case.dtype, &[2 * case.tokens, case.widths[0]]).into_tensor().unwrap();
    let vb = VarBuilder::from_tensors(model.tensors.into_iter().collect(), case.dtype, &Device::Cpu);
    let options = BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(EXPERTS, 2) },
        hidden_size: case.widths[0],
        intermediate_size: case.widths[1],
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    };
    let context = BlockContext { quant: model.quant, ..BlockContext::default() };
    let (block, _) = load_block_on(&options, &context, vb.pp("gate"), vb.pp("experts")).unwrap();
    let x = TensorView::new(&rows).unwrap();
    let mut out = Buffer::zeros(DType::F32, rows.dims()).unwrap();
    block
        .forward_into(x.view().unwrap(), out.view_mut(), &mut StepContext::default(), &mut Exec::cpu())
        .unwrap();
    out
}

/// Compares the results for a rank's rows with the reference.
fn check(case: &Case, rank: usize, want: &Buffer, results: &[Buffer]) {
    let first = if case.is_replicated() { 0 } else { rank * case.tokens };
    let want = Exec::cpu().to_host(want.view().narrow(first, case.tokens).unwrap()).unwrap();
    let most = want.view().to_f32_vec().unwrap().iter().fold(1f32, |most, x| most.max(x.abs()));
    for (turn, got) in results.iter().enumerate() {
        let Case { dtype, scheme, tokens, parallel, replicas, by_nccl, .. } = case;
        let name = format!(
            "{dtype:?} {scheme} {:?} {replicas:?}, NCCL {by_nccl}, {tokens} tokens, rank {rank}, after {turn} moves",
            parallel.backend
        );
        assert_close(&name, &want, got, case.bound * f64::from(most));
    }
}

#[test]
fn a_graph_computes_the_same_after_every_move() {
    for (i, case) in cases().iter().enumerate() {
        let seed = Rng::new().bits() ^ i as u64;
        let want = reference(case, seed);
        for (rank, (results, statuses)) in run(case, seed, None).iter().enumerate() {
            assert!(statuses.iter().all(|status| *status == MoveStatus::Moved), "{statuses:?}");
            check(case, rank, &want, results);
        }
    }
    println!("{:?}", device_calls());
}

#[test]
fn a_corrupt_transfer_is_found_rolled_back_and_named_on_all_ranks() {
    for (rank, by_nccl) in [(0, false), (1, false), (1, true)] {
        let case = &Case { by_nccl, ..cases()[rank].clone() };
        let want = reference(case, 5 + rank as u64);
        let ranks = run(case, 5 + rank as u64, Some(rank));
        assert_eq!(ranks[0].1, ranks[1].1);
        let rolled_back = ranks[0].1.iter().filter_map(|status| match status {
            MoveStatus::RolledBack(faults) => Some(faults),
            _ => None,
        });
        let rolled_back: Vec<_> = rolled_back.collect();
        assert!(rolled_back.len() > MOVES / 2, "{} of {MOVES}", rolled_back.len());
        let named =
            |fault: &String| fault.contains(&format!("of rank {rank} from")) && fault.contains("checksum");
        assert!(rolled_back.iter().all(|faults| faults.iter().all(named)), "{rolled_back:?}");
        for (place, (results, _)) in ranks.iter().enumerate() {
            check(case, place, &want, results);
        }
    }
}

#[test]
fn a_rank_without_a_window_is_refused() {
    let case = &cases()[0];
    let model = model(case, &mut Rng::seeded(1));
    let on_rank = |comm: &NcclComm, ex: &mut Exec| -> Result<String> {
        let (block, _) = block(case, &model, comm, ex)?;
        let placed = block.placed_experts().unwrap();
        let target = renamed(&placed.map(), &mut Rng::seeded(2));
        let round = MoveRound { layer: 0, phy2log: target, sole: Vec::new(), bytes: 1, limit: LIMIT };
        let error = placed.move_round(&round, comm, None, ex).unwrap_err().to_string();
        comm.barrier(ex)?;
        Ok(error)
    };
    for error in run_nccl_ranks(2, LIMIT, on_rank) {
        assert!(error.unwrap().contains("expected a window of at least"));
    }
}
