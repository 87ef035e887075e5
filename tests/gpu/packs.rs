//! Random experts on the GPU, in bf16 or quantised, with the values of their weights, and random routings.

use candle_core::DType;
use moe_kernels::cuda::ExpertEpilogue;
use moe_kernels::plan::EpilogueCall;
use moe_kernels::quant::QuantUse;
use moe_kernels::{Activation, Buffer, NO_EXPERT, QuantScheme, Weight, row_parallel_segments};

use crate::common::*;
use crate::definition::{Epilogue, Experts};
use crate::quant::matrices::{Matrix, Source};

/// Packs of gate and up, and of down.
pub struct Packs {
    pub weights: [Weight; 2],
    /// Biases of both products on the GPU.
    pub biases: [Option<Buffer>; 2],
    pub meaning: Experts,
    pub inter: usize,
}

impl Packs {
    /// Packs in bf16, or quantised by a scheme. If the scheme has an order of columns, each expert has its own.
    pub fn new(
        rng: &mut Rng,
        experts: usize,
        [hidden, inter]: [usize; 2],
        scheme: Option<QuantScheme>,
    ) -> Self {
        match scheme {
            None => Self::floats(rng, experts, hidden, inter),
            Some(scheme) => Self::quantised(rng, experts, hidden, inter, scheme),
        }
    }

    fn floats(rng: &mut Rng, experts: usize, hidden: usize, inter: usize) -> Self {
        let dims = [[experts, 2 * inter, hidden], [experts, hidden, inter]];
        let packs = dims.map(|dims| rng.floats(DType::BF16, &dims));
        let [w13, w2] = packs.each_ref().map(|pack| pack.view().to_f32_vec().unwrap());
        let each = w13.chunks(2 * inter * hidden).zip(w2.chunks(hidden * inter));
        let weights = each.map(|(w13, w2)| [w13.to_vec(), w2.to_vec()]).collect();
        let on_device = |pack| cuda().buffer_from_host(pack).unwrap().into_tensor().unwrap();
        let packs = packs.each_ref().map(|pack| Weight::new(on_device(pack.view())).unwrap());
        Self::of(packs, Experts { hidden, weights, epilogue: Epilogue::PLAIN }, inter)
    }

    /// Packs without biases.
    pub fn of(weights: [Weight; 2], meaning: Experts, inter: usize) -> Self {
        Self { weights, biases: [None, None], meaning, inter }
    }

    /// The same weights with random biases of the products that `biased` names, and another activation.
    pub fn with_epilogue(mut self, rng: &mut Rng, biased: [bool; 2], activation: Activation) -> Self {
        let experts = self.meaning.weights.len();
        let mut biases = vec![[Vec::new(), Vec::new()]; experts];
        for (product, rows) in [2 * self.inter, self.meaning.hidden].into_iter().enumerate() {
            if !biased[product] {
                continue;
            }
            let values = rng.floats(DType::BF16, &[experts, rows]);
            for (own, row) in biases.iter_mut().zip(values.view().to_f32_vec().unwrap().chunks(rows)) {
                own[product] = row.to_vec();
            }
            self.biases[product] = Some(cuda().buffer_from_host(values.view()).unwrap());
        }
        self.meaning.epilogue = Epilogue { biases, activation };
        self
    }

    /// Biases and activation as the launches take them.
    pub fn epilogue(&self) -> ExpertEpilogue<'_> {
        let [w13_bias, w2_bias] = self.biases.each_ref().map(|bias| bias.as_ref().map(Buffer::view));
        ExpertEpilogue { w13_bias, w2_bias, activation: self.meaning.epilogue.activation }
    }

    /// Biases and activation as the plan takes them.
    pub fn epilogue_call(&self) -> EpilogueCall {
        EpilogueCall {
            bias: self.biases.iter().any(Option::is_some),
            activation: self.meaning.epilogue.activation,
        }
    }

    fn quantised(rng: &mut Rng, experts: usize, hidden: usize, inter: usize, scheme: QuantScheme) -> Self {
        let mut source = Source::default();
        let mut gate_up = Vec::new();
        let mut down = Vec::new();
        let mut weights = Vec::new();
        for e in 0..experts {
            let names = ["gate", "up", "down"].map(|name| format!("{e}.{name}"));
            let dims = [(inter, hidden), (inter, hidden), (hidden, inter)];
            let [gate, up, last] = dims.map(|(n, k)| Matrix::new(rng, n, k, scheme, e as u64));
            weights.push([[gate.floats(), up.floats()].concat(), last.floats()]);
            source.matrices.extend(names.iter().cloned().zip([gate, up, last]));
            let [gate, up, last] = names;
            gate_up.push(vec![gate, up]);
            down.push(vec![last]);
        }
        let pack = |modules: &[Vec<String>], usage| {
            let modules: Vec<&[String]> = modules.iter().map(Vec::as_slice).collect();
            source.weight(&modules, usage, DType::BF16, &cuda())
        };
        let segments = row_parallel_segments(inter);
        let packs = [pack(&gate_up, QuantUse::GateUp), pack(&down, QuantUse::RowParallel { segments })];
        Self::of(packs, Experts { hidden, weights, epilogue: Epilogue::PLAIN }, inter)
    }
}

/// Which experts compute a step's rows.
pub struct Routing {
    pub name: &'static str,
    pub ids: Vec<u32>,
    pub map: Option<Vec<i32>>,
}

/// Routings: spread; with padding; all padding; half of the experts on another rank; one expert overloaded and others
/// empty; ids that do not exist.
pub fn routings(rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> Vec<Routing> {
    let spread = |rng: &mut Rng, experts: usize| -> Vec<u32> {
        (0..tokens)
            .flat_map(|_| rng.permutation(experts).into_iter().take(top_k).collect::<Vec<_>>())
            .collect()
    };
    let ids = spread(rng, experts);
    let is_padding = |rng: &mut Rng, slot: usize| slot >= ids.len() / 4 * 3 || rng.below(5) == 0;
    let padded =
        (0..ids.len()).map(|slot| if is_padding(rng, slot) { NO_EXPERT } else { ids[slot] }).collect();
    let last = experts as u32 - 1;
    let mut crowd = ids.clone();
    for row in crowd.chunks_mut(top_k) {
        row.iter_mut().filter(|id| **id == last).for_each(|id| *id = 0);
        row[0] = last;
    }
    let mut beyond = crowd.clone();
    beyond.chunks_mut(top_k).for_each(|row| row[top_k - 1] = last + 8);
    // Every other one of twice as many experts is on this rank, in reversed order.
    let here = (0..2 * experts).map(|id| if id % 2 == 0 { (experts - 1 - id / 2) as i32 } else { -1 });
    let elsewhere = spread(rng, 2 * experts);
    let map = here.collect();
    let all = |name, ids| Routing { name, ids, map: None };
    vec![
        all("spread", ids.clone()),
        all("padded", padded),
        all("nobody", vec![NO_EXPERT; ids.len()]),
        Routing { name: "half elsewhere", ids: elsewhere, map: Some(map) },
        all("overloaded", crowd),
        all("out of range", beyond),
    ]
}
