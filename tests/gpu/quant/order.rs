//! Act-order in the fast kernels: rows are in the order of a pack's columns, and experts' activations in the order of
//! down's columns.

use candle_core::{DType, Result};
use moe_kernels::plan::{Form, LinearCall, LinearForm};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Exec, ExpertGroups, NO_EXPERT, QuantScheme, Weight, group_token_slots_into, grouped_down_into,
    grouped_gate_up_into, linear_into, row_parallel_segments, weighted_sum_into, zero_absent_into,
};

use super::matrices::{Matrix, Source, int};
use super::{rounded_weights, sum_bound};
use crate::common::*;
use crate::definition::{self, product, relative_error};
use crate::packs::Packs;

pub const EXPERTS: usize = 12;
pub const TOP_K: usize = 3;

/// Schemes that the fast kernels read, and whether their scales are stored as bf16.
pub fn schemes() -> [(QuantScheme, bool); 5] {
    [
        (int(4, 128, true, true), false),
        (int(4, 32, false, true), true),
        (int(8, 128, false, true), false),
        (int(8, 32, true, true), true),
        (int(4, 0, true, true), false),
    ]
}

fn matrix(rng: &mut Rng, (n, k): (usize, usize), scheme: (QuantScheme, bool), perm_seed: u64) -> Matrix {
    let matrix = Matrix::new(rng, n, k, scheme.0, perm_seed);
    if scheme.1 { matrix.with_bf16_scales() } else { matrix }
}

/// Experts, each with its own orders.
pub struct Experts {
    source: Source,
    modules: [Vec<Vec<String>>; 2],
    dims: (usize, usize),
}

impl Experts {
    pub fn new(rng: &mut Rng, (hidden, inter): (usize, usize), scheme: (QuantScheme, bool)) -> Self {
        let mut of = Self { source: Source::default(), modules: Default::default(), dims: (hidden, inter) };
        for e in 0..EXPERTS {
            let names = ["gate", "up", "down"].map(|name| format!("{e}.{name}"));
            let dims = [(inter, hidden), (inter, hidden), (hidden, inter)];
            for (name, dims) in names.iter().zip(dims) {
                of.source.matrices.insert(name.clone(), matrix(rng, dims, scheme, e as u64));
            }
            let [gate, up, down] = names;
            of.modules[0].push(vec![gate, up]);
            of.modules[1].push(vec![down]);
        }
        of
    }

    fn packs(&self, dtype: DType, ex: &Exec) -> [Weight; 2] {
        let [gate_up, down] = &self.modules;
        self.source.experts([gate_up, down], row_parallel_segments(self.dims.1), dtype, ex)
    }

    /// Their packs in bf16, with the values of their weights.
    pub fn with_meaning(&self) -> Packs {
        let of = |e: usize| {
            let [gate, up, down] =
                ["gate", "up", "down"].map(|name| self.source.matrices[&format!("{e}.{name}")].floats());
            [[gate, up].concat(), down]
        };
        let (hidden, inter) = self.dims;
        let weights = (0..EXPERTS).map(of).collect();
        let meaning = definition::Experts { hidden, weights, epilogue: definition::Epilogue::PLAIN };
        Packs::of(self.packs(DType::BF16, &cuda()), meaning, inter)
    }
}

/// Some slots without an expert; all to one expert; none.
fn routings(rng: &mut Rng, tokens: usize) -> [Vec<u32>; 3] {
    let mut some = Vec::new();
    for _ in 0..tokens {
        let order = rng.permutation(EXPERTS);
        some.extend((0..TOP_K).map(|k| if rng.below(9) == 0 { NO_EXPERT } else { order[k] }));
    }
    let one = (0..tokens * TOP_K).map(|slot| if slot % TOP_K == 1 { 5 } else { NO_EXPERT });
    [some, one.collect(), vec![NO_EXPERT; tokens * TOP_K]]
}

/// The kernels for any dtype, on experts that are ordered in the same way, compared with the CPU's experts, which are
/// not ordered.
#[test]
fn experts_in_their_own_orders_agree_in_every_dtype() {
    let mut rng = Rng::new();
    let tokens = 11;
    let hidden = 96;
    let inter = 64;
    for scheme in [int(4, 32, true, true), int(8, 0, false, true)] {
        let experts = Experts::new(&mut rng, (hidden, inter), (scheme, false));
        let ids = words(routings(&mut rng, tokens)[0].clone(), &[tokens, TOP_K]);
        let weights = rng.floats(DType::F32, &[tokens, TOP_K]);
        for dtype in FLOATS {
            let x = rng.floats(dtype, &[tokens, hidden]);
            let op = |p: &mut Place| -> Result<Vec<Placed>> {
                let ids = p.put(&ids);
                let weights = p.put(&weights);
                let x = p.put(&x);
                let packs = experts.packs(dtype, &p.ex);
                let w13 = packs[0].read()?;
                let w2 = packs[1].read()?;
                let slots = tokens * TOP_K;
                let mut offsets = p.out(DType::U32, &[EXPERTS + 1]);
                let mut sorted = p.out(DType::U32, &[slots]);
                let mut in_rows = p.out(DType::U32, &[slots]);
                let out = (offsets.view_mut(), sorted.view_mut(), in_rows.view_mut());
                group_token_slots_into(ids.view(), None, out.0, out.1, out.2, &mut p.ex)?;
                let mut rows = p.out(DType::F32, &[tokens, TOP_K, hidden]);
                zero_absent_into(ids.view(), None, EXPERTS, rows.view_mut(), &mut p.ex)?;
                let groups = ExpertGroups {
                    offsets: offsets.view(),
                    in_rows: in_rows.view(),
                    out_rows: sorted.view(),
                };
                let mut act = p.out(dtype, &[slots, inter]);
                let activation = moe_kernels::Activation::SwiGlu;
                grouped_gate_up_into(
                    x.view(),
                    &groups,
                    w13.view()?,
                    None,
                    activation,
                    act.view_mut(),
                    &mut p.ex,
                )?;
                let out = rows.view_mut().reshape(&[slots, hidden])?;
                grouped_down_into(act.view(), &groups, w2.view()?, None, out, &mut p.ex)?;
                let mut sum = p.out(dtype, &[tokens, hidden]);
                weighted_sum_into(rows.view(), ids.view(), weights.view(), sum.view_mut(), &mut p.ex)?;
                Ok(vec![sum])
            };
            let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            on_both(op, |c, g| {
                let [c, g] = [&c[0], &g[0]].map(|sum| sum.view().to_f32_vec().unwrap());
                let off = relative_error(&c.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), &g);
                assert!(off < bound, "{scheme} {}: off by {off}", dtype.as_str());
            });
        }
    }
}

#[test]
fn dense_products_take_rows_in_the_order_of_the_columns() {
    let mut rng = Rng::new();
    let sizes = [(1, 64, 128), (5, 96, 256), (33, 128, 384), (600, 64, 256), (513, 32, 128)];
    for (m, n, k) in small(sizes, 64, |size| size.0) {
        for scheme in schemes() {
            let w = matrix(&mut rng, (n, k), scheme, 1);
            let floats = w.floats();
            let source = Source { matrices: [("m".to_string(), w)].into(), inputs: None };
            let weight = source.weight(&[&["m".to_string()]], QuantUse::Linear, DType::BF16, &cuda());
            let x = rng.floats(DType::BF16, &[m, k]);
            let bias = rng.floats(DType::BF16, &[n]);
            let mut ex = cuda();
            for bias in [None, Some(&bias)] {
                let quant = weight.quantisation();
                let call = LinearCall {
                    rows: m,
                    n,
                    k,
                    dtype: DType::BF16,
                    quant,
                    bias: bias.is_some(),
                    aligned: true,
                };
                let kernel = LinearForm::choose(&call, &ex.machine()).map(|form| form.kernel(&call));
                assert!(kernel.is_some_and(|kernel| kernel.starts_with("order_rows + ")), "{call:?}");
                let mut want = product(&x.view().to_f32_vec().unwrap(), &floats, k);
                if let Some(bias) = bias {
                    let bias = bias.view().to_f32_vec().unwrap();
                    want.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % n]));
                }
                let p = Place::new(cuda());
                let x = p.put(&x);
                let bias = p.put_some(bias);
                let mut out = p.out(DType::F32, &[m, n]);
                linear_into(
                    x.view(),
                    weight.read().unwrap().view().unwrap(),
                    view_of(&bias),
                    out.view_mut(),
                    &mut ex,
                )
                .unwrap();
                let bound = sum_bound(k) + rounded_weights(DType::BF16, k);
                for (want, got) in want.iter().zip(out.host(&p).view().to_f32_vec().unwrap()) {
                    assert!((want - f64::from(got)).abs() <= bound, "{call:?}: expected {want}, got {got}");
                }
            }
        }
    }
}
