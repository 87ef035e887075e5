//! Random problems, a definition of the whole layer that uses nothing of the crate, and experts that take both formats.
#![allow(dead_code)] // Each test binary uses its own part.

use std::fmt::Debug;

use moe_dispatch::candle::{DType, Result};
use moe_dispatch::{
    ActivationFormat, Dispatched, Exec, LocalExperts, NO_EXPERT, PrepareFinalize, Tokens, View, ViewMut,
    WeightAndReduce,
};
use moe_kernels::Float;
use proptest::prelude::*;

/// Tokens, their routing, and the places of the experts.
#[derive(Clone, Debug)]
pub struct Problem {
    pub tokens: usize,
    pub hidden: usize,
    pub top_k: usize,
    pub rows: Vec<f32>,
    pub ids: Vec<u32>,
    pub weights: Vec<f32>,
    /// Local slot of each physical expert.
    pub map: Vec<i32>,
    pub num_local: usize,
}

/// Any routing (spread, all to one expert, none at all, with absent slots) and any placement.
pub fn problems() -> impl Strategy<Value = Problem> {
    (0usize..24, 1usize..7, 1usize..5, 1usize..9).prop_flat_map(|(tokens, hidden, top_k, physical)| {
        let slots = tokens * top_k;
        let id = prop_oneof![8 => 0..physical as u32, 1 => Just(NO_EXPERT)];
        let ids = prop_oneof![
            6 => proptest::collection::vec(id, slots),
            1 => (0..physical as u32).prop_map(move |e| vec![e; slots]),
            1 => Just(vec![NO_EXPERT; slots]),
        ];
        let rows = proptest::collection::vec(-4f32..4., tokens * hidden);
        let weights = proptest::collection::vec(-1f32..1.5, slots);
        (rows, ids, weights, placements(physical)).prop_map(move |(rows, ids, weights, (map, num_local))| {
            Problem { tokens, hidden, top_k, rows, ids, weights, map, num_local }
        })
    })
}

/// A map with gaps onto shuffled local slots, some of which may stay unused.
fn placements(physical: usize) -> impl Strategy<Value = (Vec<i32>, usize)> {
    let holes = prop_oneof![
        Just(vec![false; physical]),
        proptest::collection::vec(any::<bool>(), physical),
        Just(vec![true; physical]),
    ];
    let order = Just((0..physical as i32 + 2).collect::<Vec<_>>()).prop_shuffle();
    (holes, order, 0usize..3).prop_map(move |(holes, order, unused)| {
        let here = holes.iter().filter(|hole| !**hole).count();
        let num_local = here + unused;
        let mut free = order.into_iter().filter(|&slot| (slot as usize) < num_local);
        let map = holes.iter().map(|&hole| if hole { -1 } else { free.next().unwrap_or(-1) }).collect();
        (map, num_local)
    })
}

impl Problem {
    /// Rows of ones that all choose expert 0, with weights of one half. All experts are on this rank.
    pub fn ones(tokens: usize, hidden: usize, top_k: usize, experts: usize) -> Self {
        Self {
            tokens,
            hidden,
            top_k,
            rows: vec![1.; tokens * hidden],
            ids: vec![0; tokens * top_k],
            weights: vec![0.5; tokens * top_k],
            map: (0..experts as i32).collect(),
            num_local: experts,
        }
    }

    pub fn experts(&self) -> Result<LocalExperts> {
        LocalExperts::from_map(&self.map, self.num_local)
    }

    pub fn local(&self, slot: usize) -> Option<usize> {
        let id = self.ids[slot];
        if id == NO_EXPERT { None } else { usize::try_from(self.map[id as usize]).ok() }
    }

    /// The number of rows of the local expert with the most rows.
    pub fn most_rows(&self) -> usize {
        let mut counts = vec![0; self.num_local];
        (0..self.ids.len()).filter_map(|slot| self.local(slot)).for_each(|e| counts[e] += 1);
        counts.into_iter().max().unwrap_or(0)
    }

    pub fn rows_as<T: Float>(&self) -> Vec<T> {
        self.rows.iter().map(|&x| T::narrow(x)).collect()
    }

    /// The layer by its definition: token by token, slot by slot.
    pub fn definition<T: Float>(&self) -> Vec<T> {
        let rows = self.rows_as::<T>();
        let mut out = Vec::new();
        for t in 0..self.tokens {
            let row = &rows[t * self.hidden..(t + 1) * self.hidden];
            let mut sum = vec![0f32; self.hidden];
            for slot in t * self.top_k..(t + 1) * self.top_k {
                if let Some(e) = self.local(slot) {
                    let y = expert(e, row);
                    (0..self.hidden).for_each(|h| sum[h] += self.weights[slot] * y[h]);
                }
            }
            out.extend(sum.into_iter().map(T::narrow));
        }
        out
    }

    /// Rows, ids and weights.
    pub fn inputs(&self) -> Result<Tokens<'_>> {
        let slots = [self.tokens, self.top_k];
        let hidden = View::new(&self.rows, &[self.tokens, self.hidden])?;
        Ok(Tokens::new(hidden, View::new(&self.ids, &slots)?, View::new(&self.weights, &slots)?))
    }

    /// An output [T, H] that is filled with NaN before `write`.
    pub fn output<T: Float>(&self, write: impl FnOnce(ViewMut) -> Result<()>) -> Result<Vec<T>> {
        let mut out = vec![T::narrow(f32::NAN); self.rows.len()];
        write(ViewMut::new(&mut out, &[self.tokens, self.hidden])?)?;
        Ok(out)
    }

    /// Runs prepare, experts and finalize.
    pub fn run<T: Float>(&self, backend: &dyn PrepareFinalize, ex: &mut Exec) -> Result<Vec<T>> {
        let rows = self.rows_as::<T>();
        let hidden = View::new(&rows, &[self.tokens, self.hidden])?;
        let d = backend.prepare(Tokens { hidden, ..self.inputs()? }, None, ex)?;
        let y = run_experts::<T>(&d)?;
        let y = View::new(&y, &d.expert_out_dims()?)?;
        self.output(|to| backend.finalize(y, &d, WeightAndReduce::Delegate, to, ex))
    }
}

/// The result of local expert `e` for a row.
pub fn expert<T: Float>(e: usize, row: &[T]) -> Vec<f32> {
    let n = row.len();
    (0..n).map(|h| row[h].widen() * (e as f32 + 0.37) + row[(h + 1) % n].widen() * 0.11 - e as f32).collect()
}

/// The unweighted rows of the experts of one rank. Values that must not be read are NaN.
pub fn run_experts<T: Float>(d: &Dispatched) -> Result<Vec<f32>> {
    run_named_experts::<T>(d, |local| local)
}

/// [`run_experts`] where local slot `e` holds the expert `name(e)`.
pub fn run_named_experts<T: Float>(d: &Dispatched, name: impl Fn(usize) -> usize) -> Result<Vec<f32>> {
    let dims = d.expert_out_dims()?;
    let rows = d.rows.view();
    let hidden = rows.dims()[rows.dims().len() - 1];
    let rows = rows.cpu::<T>()?;
    let mut out = vec![f32::NAN; dims.iter().product()];
    let mut compute = |e: usize, from: usize, to: usize| {
        out[to * hidden..][..hidden].copy_from_slice(&expert(name(e), &rows[from * hidden..][..hidden]));
    };
    match d.format {
        ActivationFormat::Listed => {
            let slots = d.expert_slots()?;
            let counts = d.expert_num_tokens()?.cpu::<u32>()?;
            let room = slots.dims()[1];
            for (e, &n) in counts.iter().enumerate() {
                let list = &slots.cpu::<u32>()?[e * room..][..n as usize];
                list.iter().for_each(|&slot| compute(e, slot as usize / dims[1], slot as usize));
            }
        }
        ActivationFormat::Standard => {
            let map = d.expert_map.map(|map| map.cpu::<i32>()).transpose()?;
            for (slot, &id) in d.topk_ids()?.cpu::<u32>()?.iter().enumerate() {
                let local = match (id, map) {
                    (NO_EXPERT, _) => -1,
                    (id, None) => id as i32,
                    (id, Some(map)) => map[id as usize],
                };
                if let Ok(e) = usize::try_from(local) {
                    compute(e, slot / dims[1], slot);
                }
            }
        }
        ActivationFormat::BatchedExperts => {
            for (e, &n) in d.expert_num_tokens()?.cpu::<u32>()?.iter().enumerate() {
                (0..n as usize).for_each(|r| compute(e, e * dims[1] + r, e * dims[1] + r));
            }
        }
    }
    Ok(out)
}

/// The bits, so that NaN and signed zeros are compared too.
pub fn bits<T: Float>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.widen().to_bits()).collect()
}

pub const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
