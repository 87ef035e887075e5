//! Products with quantised weights: packs on the device, compared with their definition in f64 and with the CPU.

mod activations;
mod fp4;
mod linear;
pub mod matrices;
pub mod order;
mod packing;
mod q4k;

use candle_core::DType;
use moe_kernels::half::bf16;
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    Activation, Buffer, ExpertGroups, NO_EXPERT, QuantGroup, QuantScheme, group_token_slots_into,
    grouped_down_into, grouped_gate_up_into, linear_into, linear_row_parallel_into, row_parallel_segments,
    weighted_sum_into, zero_absent_into,
};

use crate::common::*;
use crate::definition::product;
use matrices::{Matrix, Source, fp8, int, schemes};

/// Error of an f32 sum of `k` products of values in -1..1, for two orders of addition.
fn sum_bound(k: usize) -> f64 {
    k as f64 * 4e-7 + 1e-6
}

/// The error that the CPU's fixed-point form of 16-bit activations may add.
fn fixed_point(dtype: DType, k: usize) -> f64 {
    if dtype == DType::F32 { 0.0 } else { k as f64 * f64::powi(2.0, -15) }
}

/// The error that weights rounded to bf16 in the fast kernels add, as several standard deviations.
fn rounded_weights(dtype: DType, k: usize) -> f64 {
    if dtype == DType::BF16 { 8.0 * (k as f64).sqrt() * f64::powi(2.0, -9) } else { 0.0 }
}

#[test]
fn quantised_packs_mean_the_same_floats() {
    let mut rng = Rng::new();
    // The last shapes are ones that the kernel for bf16 rows takes.
    for (n, k) in
        [(1, 1), (21, 96), (16, 128), (40, 200), (130, 384), (64, 128), (96, 320), (128, 1152), (512, 1024)]
    {
        for scheme in schemes(k) {
            let m = Matrix::new(&mut rng, n, k, scheme, 1).with_every_code(&mut rng);
            let floats = m.floats();
            let source = Source { matrices: [("m".to_string(), m)].into(), inputs: None };
            let names = ["m".to_string()];
            let uses =
                if n % 2 == 0 { vec![QuantUse::Linear, QuantUse::GateUp] } else { vec![QuantUse::Linear] };
            for (usage, dtype) in
                uses.into_iter().flat_map(|usage| [(usage, DType::F32), (usage, DType::BF16)])
            {
                let rounded = |x: &f32| if dtype == DType::BF16 { bf16::from_f32(*x).to_f32() } else { *x };
                let want = Buffer::from_vec(floats.iter().map(rounded).collect(), &[n, k]).unwrap();
                let weight = source.weight(&[&names], usage, dtype, &cuda());
                let tensor = weight.to_tensor().unwrap().to_device(&candle_core::Device::Cpu).unwrap();
                assert_eq!(tensor.dtype(), dtype);
                let got =
                    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let got = Buffer::from_vec(got, &[n, k]).unwrap();
                assert_same(&format!("{scheme} [{n}, {k}] {usage:?} {}", dtype.as_str()), &want, &got);
            }
        }
    }
}

#[test]
fn quantised_dense_products_agree() {
    let mut rng = Rng::new();
    // The last size but one ends with half a stage of the fast kernels.
    let sizes = [
        (0, 5, 96),
        (1, 1, 8),
        (1, 300, 128),
        (2, 33, 96),
        (8, 48, 384),
        (9, 17, 256),
        (20, 64, 192),
        (70, 130, 200),
    ];
    for (m, n, k) in small(sizes, 64, |size| size.0) {
        for scheme in schemes(k) {
            let w = Matrix::new(&mut rng, n, k, scheme, 1);
            let floats = w.floats();
            let source = Source { matrices: [("m".to_string(), w)].into(), inputs: None };
            let names = ["m".to_string()];
            for (i, dtype) in FLOATS.into_iter().enumerate() {
                let x = rng.floats(dtype, &[m, k]);
                let bias = (i != 1).then(|| rng.floats(dtype, &[n]));
                let mut want = product(&x.view().to_f32_vec().unwrap(), &floats, k);
                if let Some(bias) = &bias {
                    let bias = bias.view().to_f32_vec().unwrap();
                    want.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % n]));
                }
                let segments = row_parallel_segments(k);
                let op = |p: &mut Place| {
                    let x = p.put(&x);
                    let bias = p.put_some(bias.as_ref());
                    let mut plain = p.out(DType::F32, &[m, n]);
                    let mut parts = p.out(dtype, &[m, n]);
                    let w = source.weight(&[&names], QuantUse::Linear, dtype, &p.ex);
                    let guard = w.read()?;
                    linear_into(x.view(), guard.view()?, view_of(&bias), plain.view_mut(), &mut p.ex)?;
                    let w = source.weight(&[&names], QuantUse::RowParallel { segments }, dtype, &p.ex);
                    let guard = w.read()?;
                    let out = parts.view_mut();
                    linear_row_parallel_into(x.view(), guard.view()?, view_of(&bias), out, &mut p.ex)?;
                    Ok(vec![plain, parts])
                };
                on_both(op, |c, g| {
                    let what = format!("{scheme} {m} x {n} x {k} {}", dtype.as_str());
                    let bound = sum_bound(k) + rounded_weights(dtype, k);
                    for (want, got) in want.iter().zip(g[0].view().to_f32_vec().unwrap()) {
                        assert!((want - f64::from(got)).abs() <= bound, "{what}: expected {want}, got {got}");
                    }
                    for i in 0..2 {
                        assert_close(&what, &c[i], &g[i], bound + fixed_point(dtype, k));
                    }
                });
            }
        }
    }
}

/// With act-order a rank multiplies its own columns of a matrix, otherwise whole groups of columns.
#[test]
fn a_rank_multiplies_its_inputs() {
    let mut rng = Rng::new();
    let ordered = [int(4, 64, true, true), int(8, 32, false, true), int(4, 0, true, true)];
    for scheme in ordered.into_iter().chain(matrices::fp4()) {
        let m = 5;
        let n = 24;
        let k = 192;
        let inputs = 96..192;
        let w = Matrix::new(&mut rng, n, k, scheme, 1);
        let floats: Vec<f32> = w.floats().chunks(k).flat_map(|row| row[inputs.clone()].to_vec()).collect();
        let source = Source { matrices: [("m".to_string(), w)].into(), inputs: Some(inputs.clone()) };
        let x = rng.floats(DType::F32, &[m, inputs.len()]);
        let want = product(&x.view().to_f32_vec().unwrap(), &floats, inputs.len());
        let mut p = Place::new(cuda());
        let on_device = p.put(&x);
        let mut out = p.out(DType::F32, &[m, n]);
        let w = source.weight(&[&["m".to_string()]], QuantUse::Linear, DType::F32, &p.ex);
        linear_into(on_device.view(), w.read().unwrap().view().unwrap(), None, out.view_mut(), &mut p.ex)
            .unwrap();
        let got = out.host(&p).view().to_f32_vec().unwrap();
        for (want, got) in want.iter().zip(got) {
            assert!((want - f64::from(got)).abs() <= sum_bound(k), "{scheme}: expected {want}, got {got}");
        }
    }
}

/// One layer of experts, from ids to token rows.
struct Layer {
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    inter: usize,
    /// Every slot goes to this expert, or to none.
    only: Option<u32>,
    /// Whether both products add biases.
    bias: bool,
}

fn layers_agree(rng: &mut Rng, l: &Layer, schemes: [QuantScheme; 2], dtype: DType, activation: Activation) {
    let Layer { tokens, top_k, experts, hidden, inter, only, bias } = *l;
    let mut source = Source::default();
    let mut gate_up = Vec::new();
    let mut down = Vec::new();
    for e in 0..experts {
        let names = ["gate", "up", "down"].map(|name| format!("{e}.{name}"));
        for (i, (name, (n, k))) in
            names.iter().zip([(inter, hidden), (inter, hidden), (hidden, inter)]).enumerate()
        {
            let m = Matrix::new(rng, n, k, schemes[i / 2], e as u64);
            source.matrices.insert(name.clone(), m);
        }
        let [gate, up, last] = names;
        gate_up.push(vec![gate, up]);
        down.push(vec![last]);
    }
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let order = rng.permutation(experts);
        ids.extend((0..top_k).map(|k| match only {
            Some(id) if k == 0 => id,
            Some(_) => NO_EXPERT,
            None if rng.below(8) == 0 => NO_EXPERT,
            None => order[k],
        }));
    }
    let ids = words(ids, &[tokens, top_k]);
    let weights = rng.floats(DType::F32, &[tokens, top_k]);
    let x = rng.floats(dtype, &[tokens, hidden]);
    let w13_bias = bias.then(|| rng.floats(dtype, &[experts, 2 * inter]));
    let w2_bias = bias.then(|| rng.floats(dtype, &[experts, hidden]));
    let slots_n = tokens * top_k;
    let segments = row_parallel_segments(inter);
    let op = |p: &mut Place| {
        let ids = p.put(&ids);
        let weights = p.put(&weights);
        let x = p.put(&x);
        let w13_bias = p.put_some(w13_bias.as_ref());
        let w2_bias = p.put_some(w2_bias.as_ref());
        let pack = |modules: &[Vec<String>], usage| {
            let modules: Vec<&[String]> = modules.iter().map(Vec::as_slice).collect();
            source.weight(&modules, usage, dtype, &p.ex).with_experts().unwrap()
        };
        let w13 = pack(&gate_up, QuantUse::GateUp);
        let w2 = pack(&down, QuantUse::RowParallel { segments });
        let w13 = w13.read()?;
        let w2 = w2.read()?;
        let mut offsets = p.out(DType::U32, &[experts + 1]);
        let mut slots = p.out(DType::U32, &[slots_n]);
        let mut in_rows = p.out(DType::U32, &[slots_n]);
        let out = (offsets.view_mut(), slots.view_mut(), in_rows.view_mut());
        group_token_slots_into(ids.view(), None, out.0, out.1, out.2, &mut p.ex)?;
        let mut rows = p.out(DType::F32, &[tokens, top_k, hidden]);
        zero_absent_into(ids.view(), None, experts, rows.view_mut(), &mut p.ex)?;
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: in_rows.view(), out_rows: slots.view() };
        let mut act = p.put(&Buffer::zeros(dtype, &[slots_n, inter])?);
        let bias = view_of(&w13_bias);
        grouped_gate_up_into(x.view(), &groups, w13.view()?, bias, activation, act.view_mut(), &mut p.ex)?;
        let out = rows.view_mut().reshape(&[slots_n, hidden])?;
        grouped_down_into(act.view(), &groups, w2.view()?, view_of(&w2_bias), out, &mut p.ex)?;
        let mut sum = p.out(dtype, &[tokens, hidden]);
        weighted_sum_into(rows.view(), ids.view(), weights.view(), sum.view_mut(), &mut p.ex)?;
        Ok(vec![act, rows, sum])
    };
    on_both(op, |c, g| {
        let what = format!("{} {} {tokens} of {experts}", schemes[0], dtype.as_str());
        // |up| and |gate| reach sqrt(H), and a rounding of the activation changes the down product.
        let gate = (sum_bound(hidden) + fixed_point(dtype, hidden)) * (hidden as f64).sqrt();
        assert_close(&format!("gate_up {what}"), &c[0], &g[0], gate);
        let act = (hidden as f64) * rounding(dtype) * 2.0 + gate;
        let down = (sum_bound(inter) + fixed_point(dtype, inter)) * (hidden as f64) + (inter as f64) * act;
        assert_close(&format!("down {what}"), &c[1], &g[1], down);
        assert_close(&format!("sum {what}"), &c[2], &g[2], down * top_k as f64);
    });
}

#[test]
fn quantised_expert_layers_agree_for_every_scheme() {
    let mut rng = Rng::new();
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 2.0 };
    let layer = Layer { tokens: 11, top_k: 3, experts: 5, hidden: 96, inter: 384, only: None, bias: false };
    for (i, scheme) in schemes(96).into_iter().enumerate() {
        let activation = [Activation::SwiGlu, oai, Activation::Gelu, Activation::GeluTanh][i % 4];
        for dtype in FLOATS {
            layers_agree(&mut rng, &layer, [scheme; 2], dtype, activation);
        }
    }
}

#[test]
fn quantised_expert_layers_agree_at_the_edges() {
    let mut rng = Rng::new();
    let cases = [
        (0, 2, 4, None),
        (1, 1, 1, None),
        (5, 2, 9, Some(NO_EXPERT)),
        (90, 2, 6, Some(4)),
        (1, 4, 70, None),
        (33, 8, 64, None),
    ];
    for (i, (tokens, top_k, experts, only)) in small(cases, 32, |case| case.0).into_iter().enumerate() {
        let (hidden, inter) = [(96, 64), (33, 7), (128, 128)][i % 3];
        let layer = Layer { tokens, top_k, experts, hidden, inter, only, bias: false };
        let fits = |k: usize, group: usize| if k.is_multiple_of(group) { group } else { 0 };
        let schemes = [
            [int(4, fits(hidden, 32), false, false), int(4, fits(inter, 32), true, true)],
            [int(8, fits(hidden, 32), true, true), fp8(QuantGroup::Channel)],
            [fp8(QuantGroup::Block { n: 128, k: 128 }), fp8(QuantGroup::Block { n: 128, k: 128 })],
        ];
        for schemes in schemes {
            for dtype in FLOATS {
                layers_agree(&mut rng, &layer, schemes, dtype, Activation::SwiGlu);
            }
        }
    }
}

/// MXFP4 as in gpt-oss, and NVFP4: biases and both activations, sizes that are no multiples of a tile, and rows of the
/// published length.
#[test]
fn fp4_expert_layers_agree_with_biases() {
    let mut rng = Rng::new();
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 7.0 };
    let cases = [
        (0, 2, 4, (64, 32), None),
        (1, 4, 32, (96, 64), None),
        (5, 2, 9, (32, 96), Some(NO_EXPERT)),
        (70, 1, 5, (64, 160), Some(3)),
        (23, 3, 40, (160, 32), None),
        (3, 2, 4, (2880, 96), None),
    ];
    for (tokens, top_k, experts, (hidden, inter), only) in small(cases, 32, |case| case.0) {
        for (bias, activation) in [(true, oai), (true, Activation::SwiGlu), (false, oai)] {
            let layer = Layer { tokens, top_k, experts, hidden, inter, only, bias };
            for (scheme, dtype) in
                matrices::fp4().into_iter().flat_map(|scheme| FLOATS.map(|dtype| (scheme, dtype)))
            {
                layers_agree(&mut rng, &layer, [scheme; 2], dtype, activation);
            }
        }
    }
}
