//! Dense products, and whole expert layers from ids to token rows.

use candle_core::DType;
use moe_kernels::{
    Activation, Buffer, ExpertGroups, NO_EXPERT, PreNorm, group_token_slots_into, grouped_down_into,
    grouped_gate_up_into, linear_add_into, linear_into, linear_row_parallel_into, norm_linear_into,
    weighted_sum_into, zero_absent_into,
};

use crate::common::*;
use crate::definition::{product, relative_error};

/// Error of an f32 sum of `k` products of values in -1..1, for two orders of addition.
pub fn sum_bound(k: usize) -> f64 {
    k as f64 * 4e-7 + 1e-6
}

#[test]
fn dense_products_agree() {
    let mut rng = Rng::new();
    let sizes = [
        (0, 5, 8),
        (1, 1, 1),
        (1, 300, 64),
        (3, 7, 5),
        (8, 33, 64),
        (9, 64, 256),
        (31, 130, 72),
        (33, 65, 100),
        (64, 64, 64),
        (130, 70, 129),
        (200, 9, 7),
        (257, 129, 320),
    ];
    for dtype in FLOATS {
        for out_dtype in streams(dtype) {
            for (i, (m, n, k)) in small(sizes, 64, |size| size.0).into_iter().enumerate() {
                let x = rng.floats(dtype, &[m, k]);
                let w = rng.floats(dtype, &[n, k]);
                let bias = (i % 2 == 0).then(|| rng.floats(dtype, &[n]));
                let op = |p: &mut Place| {
                    let x = p.put(&x);
                    let w = p.put(&w);
                    let bias = p.put_some(bias.as_ref());
                    let mut whole = p.out(out_dtype, &[m, n]);
                    let mut parts = p.out(out_dtype, &[m, n]);
                    linear_into(x.view(), w.view(), view_of(&bias), whole.view_mut(), &mut p.ex)?;
                    let out = parts.view_mut();
                    linear_row_parallel_into(x.view(), w.view(), view_of(&bias), out, &mut p.ex)?;
                    Ok(vec![whole, parts])
                };
                on_both(op, |c, g| {
                    let what = format!("linear {m} x {n} x {k} {}", dtype.as_str());
                    assert_close(&what, &c[0], &g[0], sum_bound(k));
                    assert_close(&what, &c[1], &g[1], sum_bound(k));
                });
            }
        }
    }
}

/// Products in bf16 by every kernel: stored in f32 and bf16, added, with a bias, after a norm. A second run must give
/// the same bits.
#[test]
fn dense_products_in_bf16_are_those_of_their_definition() {
    let mut rng = Rng::new();
    // N and K: sizes of the models, rows that fill no tile, long rows, more stages than a ring has.
    let sizes = [
        (5120, 2048),
        (2048, 4096),
        (130, 64),
        (9, 128),
        (33, 1088),
        (777, 2880),
        (16, 1024),
        (100, 6208),
        (5000, 64),
    ];
    let rows = small([1, 2, 3, 4, 5, 8, 9, 17, 33, 64, 65, 129, 300, 520], 65, |m| *m);
    for (n, k) in small(sizes, 400_000, |size| size.0 * size.1) {
        let w = rng.floats(DType::BF16, &[n, k]);
        let gain = rng.floats(DType::BF16, &[k]);
        let [w_floats, gain_floats] = [&w, &gain].map(|b| b.view().to_f32_vec().unwrap());
        for (i, &m) in rows.iter().enumerate() {
            let x = rng.floats(DType::BF16, &[m, k]);
            let bias = rng.floats(DType::BF16, &[n]);
            let stream = rng.floats(DType::F32, &[m, k]);
            let before = rng.floats(DType::F32, &[m, n]);
            let bias = (i % 2 == 0).then_some(&bias);
            let with_bias = |mut sums: Vec<f64>| {
                let bias = bias.map_or(vec![0.0; n], |bias| bias.view().to_f32_vec().unwrap());
                sums.iter_mut().enumerate().for_each(|(i, sum)| *sum += f64::from(bias[i % n]));
                sums
            };
            let want = with_bias(product(&x.view().to_f32_vec().unwrap(), &w_floats, k));
            let added =
                want.iter().zip(before.view().to_f32_vec().unwrap()).map(|(sum, x)| sum + f64::from(x));
            let added: Vec<f64> = added.collect();
            let normed = rms_norm(&stream.view().to_f32_vec().unwrap(), &gain_floats);
            let normed = with_bias(product(&normed, &w_floats, k));
            let mut p = Place::new(cuda());
            let x = p.put(&x);
            let w = p.put(&w);
            let bias = p.put_some(bias);
            let stream = p.put(&stream);
            let gain = p.put(&gain);
            let mut run = || {
                let mut stored = p.out(DType::F32, &[m, n]);
                let mut rounded = p.out(DType::BF16, &[m, n]);
                let mut sums = p.put(&before);
                let mut normed = p.out(DType::F32, &[m, n]);
                let w = w.view();
                let bias = view_of(&bias);
                linear_into(x.view(), w, bias, stored.view_mut(), &mut p.ex).unwrap();
                linear_into(x.view(), w, bias, rounded.view_mut(), &mut p.ex).unwrap();
                linear_add_into(x.view(), w, bias, sums.view_mut(), &mut p.ex).unwrap();
                let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
                norm_linear_into(stream.view(), &norm, w, bias, normed.view_mut(), &mut p.ex).unwrap();
                [stored, rounded, sums, normed].map(|placed| placed.host(&p))
            };
            let got = run();
            let again = run();
            // f32 sums; one rounding to bf16; x rounded before sums that may cancel, even in a single output.
            let bounds = [
                ("stored", &want, 2e-5),
                ("in bf16", &want, 4e-3),
                ("added", &added, 2e-5),
                ("normed", &normed, 8e-3),
            ];
            for ((part, want, bound), (got, again)) in bounds.into_iter().zip(got.iter().zip(&again)) {
                let what = format!("{part} {m} x {n} x {k}");
                let off = relative_error(want, &got.view().to_f32_vec().unwrap());
                assert!(off < bound, "{what}: off by {off}");
                assert_same(&what, got, again);
            }
        }
    }
}

/// If weights are streamed past a few rows, a row's bits do not depend on the other rows.
#[test]
fn rows_that_weights_stream_past_do_not_depend_on_each_other() {
    let mut rng = Rng::new();
    for (n, k) in small([(640, 2048), (300, 1088)], 1100, |size| size.1) {
        let w = rng.floats(DType::BF16, &[n, k]);
        let gain = rng.floats(DType::BF16, &[k]);
        let x = rng.floats(DType::BF16, &[4, k]);
        let stream = rng.floats(DType::F32, &[4, k]);
        let mut p = Place::new(cuda());
        let w = p.put(&w);
        let gain = p.put(&gain);
        let mut run = |rows: usize| {
            let x = p.put(&cut(&x, 0, rows));
            let stream = p.put(&cut(&stream, 0, rows));
            let mut plain = p.out(DType::F32, &[rows, n]);
            let mut normed = p.out(DType::F32, &[rows, n]);
            linear_into(x.view(), w.view(), None, plain.view_mut(), &mut p.ex).unwrap();
            let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
            norm_linear_into(stream.view(), &norm, w.view(), None, normed.view_mut(), &mut p.ex).unwrap();
            [plain, normed].map(|placed| placed.host(&p))
        };
        let whole = run(4);
        for rows in 1..4 {
            for (whole, part) in whole.iter().zip(&run(rows)) {
                assert_same(&format!("{rows} of 4 rows, {n} x {k}"), &cut(whole, 0, rows), part);
            }
        }
    }
}

/// Rows divided by their norm, times `gain`, without rounding.
fn rms_norm(rows: &[f32], gain: &[f32]) -> Vec<f32> {
    let normed = |row: &[f32]| {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let factor = (squares / row.len() as f64 + 1e-6).sqrt().recip();
        let each = row.iter().zip(gain).map(|(x, gain)| (f64::from(*x) * factor * f64::from(*gain)) as f32);
        each.collect::<Vec<_>>()
    };
    rows.chunks(gain.len()).flat_map(normed).collect()
}

/// Which expert computes which slot.
struct Routing {
    ids: Buffer,
    weights: Buffer,
    map: Option<Buffer>,
    num_local: usize,
}

/// With `spread`, the ids name all experts. Otherwise all slots go to expert `only`, or to none if that is `None`.
fn routing(
    rng: &mut Rng,
    tokens: usize,
    top_k: usize,
    experts: usize,
    only: Option<u32>,
    mapped: bool,
) -> Routing {
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
    let map = mapped.then(|| {
        let slots = rng.permutation(experts).into_iter().map(|s| if s % 3 == 0 { -1 } else { s as i32 });
        Buffer::from_vec(slots.collect::<Vec<i32>>(), &[experts]).unwrap()
    });
    Routing {
        ids: words(ids, &[tokens, top_k]),
        weights: rng.floats(DType::F32, &[tokens, top_k]),
        map,
        num_local: experts,
    }
}

fn layers_agree(
    rng: &mut Rng,
    dtype: DType,
    activation: Activation,
    r: &Routing,
    sizes: (usize, usize),
    biased: bool,
) {
    let hidden = sizes.0;
    let inter = sizes.1;
    let e = r.num_local;
    let tokens = r.ids.dims()[0];
    let top_k = r.ids.dims()[1];
    let x = rng.floats(dtype, &[tokens, hidden]);
    let w13 = rng.floats(dtype, &[e, 2 * inter, hidden]);
    let w2 = rng.floats(dtype, &[e, hidden, inter]);
    let bias13 = biased.then(|| rng.floats(dtype, &[e, 2 * inter]));
    let bias2 = biased.then(|| rng.floats(dtype, &[e, hidden]));
    let op = |p: &mut Place| {
        let ids = p.put(&r.ids);
        let weights = p.put(&r.weights);
        let map = p.put_some(r.map.as_ref());
        let x = p.put(&x);
        let w13 = p.put(&w13);
        let w2 = p.put(&w2);
        let bias13 = p.put_some(bias13.as_ref());
        let bias2 = p.put_some(bias2.as_ref());
        let slots_n = tokens * top_k;
        let mut offsets = p.out(DType::U32, &[e + 1]);
        let mut slots = p.out(DType::U32, &[slots_n]);
        let mut in_rows = p.out(DType::U32, &[slots_n]);
        let out = (offsets.view_mut(), slots.view_mut(), in_rows.view_mut());
        group_token_slots_into(ids.view(), view_of(&map), out.0, out.1, out.2, &mut p.ex)?;
        let mut rows = p.out(DType::F32, &[tokens, top_k, hidden]);
        zero_absent_into(ids.view(), view_of(&map), e, rows.view_mut(), &mut p.ex)?;
        let groups =
            ExpertGroups { offsets: offsets.view(), in_rows: in_rows.view(), out_rows: slots.view() };
        let mut act = p.put(&Buffer::zeros(dtype, &[slots_n, inter])?);
        let out = act.view_mut();
        grouped_gate_up_into(x.view(), &groups, w13.view(), view_of(&bias13), activation, out, &mut p.ex)?;
        let out = rows.view_mut().reshape(&[slots_n, hidden])?;
        grouped_down_into(act.view(), &groups, w2.view(), view_of(&bias2), out, &mut p.ex)?;
        let mut sum = p.out(dtype, &[tokens, hidden]);
        weighted_sum_into(rows.view(), ids.view(), weights.view(), sum.view_mut(), &mut p.ex)?;
        Ok(vec![offsets, slots, in_rows, act, rows, sum])
    };
    on_both(op, |c, g| {
        for i in 0..3 {
            assert_same("groups", &c[i], &g[i]);
        }
        // |up| and |gate| reach sqrt(H), and a rounding of the activation changes the down product.
        let gate = sum_bound(hidden) * (hidden as f64).sqrt();
        assert_close("gate_up", &c[3], &g[3], gate);
        let act = (hidden as f64) * rounding(dtype) * 2.0 + gate;
        let down = sum_bound(inter) * (hidden as f64) + (inter as f64) * act;
        assert_close("down", &c[4], &g[4], down);
        assert_close("sum", &c[5], &g[5], down * top_k as f64);
    });
}

#[test]
fn expert_layers_agree_for_every_activation() {
    let mut rng = Rng::new();
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 2.0 };
    for dtype in FLOATS {
        for activation in [Activation::SwiGlu, oai, Activation::Gelu, Activation::GeluTanh] {
            let r = routing(&mut rng, 19, 3, 7, None, true);
            layers_agree(&mut rng, dtype, activation, &r, (24, 10), true);
        }
    }
}

#[test]
fn expert_layers_agree_at_the_edges() {
    let mut rng = Rng::new();
    let none = Some(NO_EXPERT);
    let cases = [
        (0, 2, 4, None, false),
        (1, 1, 1, None, false),
        (5, 2, 9, none, false),
        (5, 2, 9, none, true),
        (300, 2, 6, Some(4), false),
        (150, 4, 5, None, true),
        (260, 3, 3, None, false),
        (33, 8, 200, None, true),
    ];
    for dtype in FLOATS {
        for (i, (tokens, top_k, experts, only, mapped)) in
            small(cases, 64, |case| case.0).into_iter().enumerate()
        {
            let r = routing(&mut rng, tokens, top_k, experts, only, mapped);
            let sizes = [(16, 8), (33, 7), (64, 70)][i % 3];
            layers_agree(&mut rng, dtype, Activation::SwiGlu, &r, sizes, i % 2 == 1);
        }
    }
}
