//! Expert backends on CUDA through the interface of the block: prepare, experts, finalize.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use moe_comm::{Communicator, ExpertLayout, ExpertPlacement, SelfComm};
use moe_dispatch::{EpRanks, LocalExperts, NoEp, OverRanks, PrepareFinalize, Tokens, WhoAdds};
use moe_experts::{Activation, ActivationFormat, ExpertWeights, Experts, build, build_batched, select};
use moe_kernels::{Buffer, Exec, NO_EXPERT};

use crate::common::*;
use crate::definition::relative_error;

struct Problem {
    x: Buffer,
    ids: Buffer,
    weights: Buffer,
    packs: [Buffer; 4],
    map: Vec<i32>,
}

const EXPERTS: usize = 9;

impl Problem {
    fn new(rng: &mut Rng, dtype: DType, tokens: usize, top_k: usize, hidden: usize, inter: usize) -> Self {
        let ids = (0..tokens).flat_map(|_| {
            let order = rng.permutation(EXPERTS);
            let absent = rng.below(top_k + 3);
            (0..top_k).map(|k| if k == absent { NO_EXPERT } else { order[k] }).collect::<Vec<_>>()
        });
        let ids = words(ids.collect(), &[tokens, top_k]);
        let e = EXPERTS;
        let h = hidden;
        let i = inter;
        let packs =
            [vec![e, 2 * i, h], vec![e, h, i], vec![e, 2 * i], vec![e, h]].map(|d| rng.floats(dtype, &d));
        let map = rng.permutation(EXPERTS).into_iter().map(|s| if s == 4 { -1 } else { s as i32 }).collect();
        Self {
            x: rng.floats(dtype, &[tokens, hidden]),
            ids,
            weights: rng.floats(DType::F32, &[tokens, top_k]),
            packs,
            map,
        }
    }

    fn experts(&self, biased: bool, ex: &Exec) -> ExpertWeights {
        let [w13, w2, b13, b2]: [Tensor; 4] =
            std::array::from_fn(|i| on_device(&self.packs[i], ex).into_tensor().unwrap());
        ExpertWeights::new(w13, w2, biased.then_some(b13), biased.then_some(b2)).unwrap()
    }

    /// Token rows from a backend of this format.
    fn run(&self, format: ActivationFormat, activation: Activation, biased: bool, mut ex: Exec) -> Buffer {
        let weights = self.experts(biased, &ex);
        let tokens = self.ids.dims()[0];
        let top_k = self.ids.dims()[1];
        let mut spec = weights.spec(activation, top_k);
        spec.activation_format = format;
        let batched = format == ActivationFormat::BatchedExperts;
        // The fused backend is left out, because other tests compare it.
        let name = [["cpu", "cpu_batched"], ["cuda", "cuda_batched"]][usize::from(ex.is_cuda())]
            [usize::from(batched)];
        let selection = select(&spec, Some(name)).unwrap();
        let local = LocalExperts::from_map(&self.map, EXPERTS).unwrap().on(ex.device()).unwrap();
        let (experts, prepare): (_, Box<dyn PrepareFinalize>) = if batched {
            let experts = build_batched(&selection, weights, tokens * top_k).unwrap();
            (experts, Box::new(NoEp::batched(local, tokens * top_k)))
        } else {
            (build(&selection, weights).unwrap(), Box::new(NoEp::new().with_local_experts(local)))
        };
        assert_eq!(experts.name(), name);
        self.through(prepare.as_ref(), experts.as_ref(), &mut ex)
    }

    /// Token rows from prepare, experts and finalize.
    fn through(&self, prepare: &dyn PrepareFinalize, experts: &dyn Experts, ex: &mut Exec) -> Buffer {
        let [x, ids, topk_weights] = [&self.x, &self.ids, &self.weights].map(|b| on_device(b, ex));
        let mut out = ex.zeros(self.x.dtype(), self.x.dims()).unwrap();
        let dispatched =
            prepare.prepare(Tokens::new(x.view(), ids.view(), topk_weights.view()), None, ex).unwrap();
        let mut rows = ex.scratch(DType::F32, &experts.out_dims(&dispatched).unwrap()).unwrap();
        experts.apply(&dispatched, rows.view_mut(), ex).unwrap();
        let strategy = experts.weight_and_reduce();
        prepare.finalize(rows.view(), &dispatched, strategy, out.view_mut(), ex).unwrap();
        ex.to_host(out.view()).unwrap()
    }
}

#[test]
fn both_formats_agree_with_the_cpu() {
    let mut rng = Rng::new();
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 1.5 };
    for dtype in FLOATS {
        let cases = [(0, 2, 16, 8), (1, 1, 7, 5), (23, 3, 40, 24), (400, 4, 64, 32)];
        for (tokens, top_k, hidden, inter) in small(cases, 64, |case| case.0) {
            for (activation, biased) in [(Activation::SwiGlu, false), (oai, true), (Activation::Gelu, true)] {
                let p = Problem::new(&mut rng, dtype, tokens, top_k, hidden, inter);
                for format in [ActivationFormat::Standard, ActivationFormat::BatchedExperts] {
                    let cpu = p.run(format, activation, biased, Exec::cpu());
                    let gpu = p.run(format, activation, biased, cuda());
                    let size = (hidden * inter * top_k) as f64;
                    let bound = 1e-5 * size + 4.0 * rounding(dtype) * size;
                    assert_close(&format!("{format:?} {activation:?} {}", dtype.as_str()), &cpu, &gpu, bound);
                }
            }
        }
    }
}

fn on_device(b: &Buffer, ex: &Exec) -> Buffer {
    let mut to = ex.zeros(b.dtype(), b.dims()).unwrap();
    ex.copy_from_host(b.view(), to.view_mut()).unwrap();
    to
}

/// The relative error of a result.
fn off(want: &Buffer, got: &Buffer) -> f64 {
    let [want, got] = [want, got].map(|b| b.view().to_f32_vec().unwrap());
    relative_error(&want.into_iter().map(f64::from).collect::<Vec<_>>(), &got)
}

const SIZES: [(usize, usize, usize, usize); 6] = [
    (1, 2, 64, 64),
    (7, 9, 128, 192),
    (8, 3, 192, 64),
    (33, 4, 320, 128),
    (300, 8, 64, 192),
    (1100, 2, 128, 64),
];

/// The low-latency form of deepep on a rank that has all experts: slots are listed, and the oracle's experts take the
/// lists.
#[test]
fn listed_rows_agree_with_the_cpu() {
    let mut rng = Rng::new();
    for (dtype, name) in [(DType::BF16, "cuda_fused_listed"), (DType::F32, "cuda")] {
        for (tokens, top_k, hidden, inter) in [(0, 2, 64, 64)].into_iter().chain(SIZES) {
            let mut p = Problem::new(&mut rng, dtype, tokens, top_k, hidden, inter);
            p.map = (0..EXPERTS as i32).collect();
            let cpu = p.run(ActivationFormat::Standard, Activation::SwiGlu, false, Exec::cpu());
            let mut ex = cuda();
            let weights = p.experts(false, &ex);
            let mut spec = weights.spec(Activation::SwiGlu, top_k);
            spec.activation_format = ActivationFormat::Listed;
            let experts = build(&select(&spec, None).unwrap(), weights).unwrap();
            let layout = ExpertLayout::new(EXPERTS, 1, 0, ExpertPlacement::Linear).unwrap();
            let alone: Arc<dyn Communicator> = Arc::new(SelfComm::new());
            let ranks = EpRanks::new(&layout, alone.clone(), alone).unwrap().on(ex.device()).unwrap();
            let prepare = OverRanks::low_latency(ranks, 2000, WhoAdds::ByRank);
            assert_eq!(experts.name(), name);
            let off = off(&cpu, &p.through(&prepare, experts.as_ref(), &mut ex));
            let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            assert!(tokens == 0 || off < bound, "{name}, T={tokens}: off by {off}");
        }
    }
}

/// Each backend over ranks, in a world of one rank, adds by slot and by rank on a device as on the CPU.
#[test]
fn backends_add_by_slot_and_by_rank() {
    let mut rng = Rng::new();
    let alone = || -> Arc<dyn Communicator> { Arc::new(SelfComm::new()) };
    for (who, index) in
        [WhoAdds::BySlot, WhoAdds::ByRank].into_iter().flat_map(|who| (0..5).map(move |i| (who, i)))
    {
        for (tokens, top_k, hidden, inter) in [(0, 2, 16, 8), (23, 3, 40, 24)] {
            let mut p = Problem::new(&mut rng, DType::F32, tokens, top_k, hidden, inter);
            p.map = (0..EXPERTS as i32).collect();
            let cpu = p.run(ActivationFormat::Standard, Activation::SwiGlu, false, Exec::cpu());
            let mut ex = cuda();
            let layout = ExpertLayout::new(EXPERTS, 1, 0, ExpertPlacement::Linear).unwrap();
            let ranks = EpRanks::new(&layout, alone(), alone()).unwrap().on(ex.device()).unwrap();
            let prepare = match index {
                0 => OverRanks::disabled(alone(), who),
                1 => OverRanks::local_allreduce(ranks, who).unwrap(),
                2 => OverRanks::allgather_reducescatter(ranks, who),
                3 => OverRanks::high_throughput(ranks, who),
                _ => OverRanks::low_latency(ranks, 32, who),
            };
            let weights = p.experts(false, &ex);
            let mut spec = weights.spec(Activation::SwiGlu, top_k);
            spec.activation_format = prepare.activation_format();
            let experts = build(&select(&spec, None).unwrap(), weights).unwrap();
            let gpu = p.through(&prepare, experts.as_ref(), &mut ex);
            let off = off(&cpu, &gpu);
            assert!(tokens == 0 || off < 1e-5, "{} {who:?}: off by {off}", prepare.name());
        }
    }
}
