//! Rows of latent attention: norm, rotation, cache entries, and products with a matrix per head.

use candle_core::DType;
use moe_kernels::{
    MlaLatent, MlaQuery, MlaRows, mla_cache_into, mla_latent_into, mla_query_into, mla_rows_into,
    mla_value_into,
};

use crate::common::*;

/// Rows; heads; sizes of the latent, of the part that is not rotated, of the rotated part and of values.
type Sizes = (usize, usize, [usize; 4]);

const SIZES: [Sizes; 8] = [
    (0, 3, [8, 4, 2, 4]),
    (1, 1, [1, 1, 2, 1]),
    (5, 3, [21, 10, 6, 7]),
    (40, 2, [33, 17, 10, 48]),
    (7, 16, [512, 128, 64, 128]),
    (16, 16, [512, 128, 64, 128]),
    (70, 4, [512, 128, 64, 128]),
    (300, 2, [64, 48, 16, 32]),
];

#[test]
fn latents_queries_and_values_agree() {
    let mut rng = Rng::new();
    for model in FLOATS {
        for (t, heads, [l, n, r, v]) in small(SIZES, 1000, |size| size.0 * size.1 * size.2[0]) {
            let what = |part: &str| {
                format!("{part} of {t} rows, {heads} heads, {l} {n} {r} {v}, {}", model.as_str())
            };
            let compressed = rng.floats(DType::F32, &[t, l + r]);
            let norm = rng.floats(model, &[l]);
            let q = rng.floats(DType::F32, &[t, heads, n + r]);
            let cos = rng.floats(DType::F32, &[t, r / 2]);
            let sin = rng.floats(DType::F32, &[t, r / 2]);
            let w_uk = rng.floats(model, &[heads, l, n]);
            let w_uv = rng.floats(model, &[heads, v, l]);
            let x = rng.floats(model, &[t, heads * l]);
            let op = |p: &mut Place| {
                let cos = p.put(&cos);
                let sin = p.put(&sin);
                let q = p.put(&q);
                let compressed = p.put(&compressed);
                let norm = p.put(&norm);
                let mut latent = p.out(model, &[t, l]);
                let mut tail = p.out(model, &[t, r]);
                let args = MlaLatent {
                    compressed: compressed.view(),
                    norm: norm.view(),
                    eps: 1e-6,
                    cos: cos.view(),
                    sin: sin.view(),
                };
                mla_latent_into(&args, latent.view_mut(), tail.view_mut(), &mut p.ex)?;
                let w_uk = p.put(&w_uk);
                let w_uv = p.put(&w_uv);
                let x = p.put(&x);
                let args = |w| MlaQuery { q: q.view(), w_uk: w, cos: cos.view(), sin: sin.view() };
                let mut naive = p.out(DType::F32, &[t, heads, n + r]);
                mla_query_into(&args(None), naive.view_mut(), &mut p.ex)?;
                let mut absorbed = p.out(DType::F32, &[t, heads, l + r]);
                mla_query_into(&args(Some(w_uk.view())), absorbed.view_mut(), &mut p.ex)?;
                let mut rounded = p.out(model, &[t, heads, l + r]);
                mla_query_into(&args(Some(w_uk.view())), rounded.view_mut(), &mut p.ex)?;
                let mut values = p.out(model, &[t, heads * v]);
                mla_value_into(x.view(), w_uv.view(), values.view_mut(), &mut p.ex)?;
                Ok(vec![latent, tail, naive, absorbed, rounded, values])
            };
            on_both(op, |c, g| {
                assert_close(&what("latent"), &c[0], &g[0], 4e-6);
                assert_same(&what("rotated key"), &c[1], &g[1]);
                assert_same(&what("naive queries"), &c[2], &g[2]);
                let bound = 1e-6 * (l.max(n) as f64).sqrt() * 4.0;
                assert_close(&what("absorbed queries"), &c[3], &g[3], bound);
                assert_close(&what("rounded queries"), &c[4], &g[4], bound);
                assert_close(&what("values"), &c[5], &g[5], bound);
            });
        }
    }
}

/// Queries and cache rows from one product and from two, inside and outside of latent space.
#[test]
fn rows_of_products_agree() {
    let mut rng = Rng::new();
    for model in FLOATS {
        for (t, heads, [l, n, r, _]) in small(SIZES, 1000, |size| size.0 * size.1 * size.2[0]) {
            let apart = rng.below(2) == 1;
            let what = format!("{t} rows, {heads} heads, {l} {n} {r}, {}, apart: {apart}", model.as_str());
            let latent_columns = if apart { 0 } else { l + r };
            let products = rng.floats(DType::F32, &[t, heads * (n + r) + latent_columns]);
            let latents = apart.then(|| rng.floats(DType::F32, &[t, l + r]));
            let norm = rng.floats(model, &[l]);
            let w_uk = rng.floats(model, &[heads, l, n]);
            let cos = rng.floats(DType::F32, &[t, r / 2]);
            let sin = rng.floats(DType::F32, &[t, r / 2]);
            let blocks = t / 3 + 1;
            let size = 3;
            let mut slots = rng.permutation(blocks * size);
            slots.truncate(t);
            if let Some(slot) = slots.get_mut(1) {
                *slot = u32::MAX;
            }
            let slots = words(slots, &[t]);
            let op = |p: &mut Place| {
                let products = p.put(&products);
                let latents = p.put_some(latents.as_ref());
                let norm = p.put(&norm);
                let w_uk = p.put(&w_uk);
                let cos = p.put(&cos);
                let sin = p.put(&sin);
                let slots = p.put(&slots);
                let mut all = Vec::new();
                for (w, width, dtype) in
                    [(Some(w_uk.view()), l + r, model), (None, n + r, model), (None, n + r, DType::F32)]
                {
                    let args = MlaRows {
                        products: products.view(),
                        latents: view_of(&latents),
                        norm: norm.view(),
                        eps: 1e-6,
                        w_uk: w,
                        cos: cos.view(),
                        sin: sin.view(),
                        slot_mapping: slots.view(),
                    };
                    let mut cache = p.out(model, &[blocks, 1, size, l + r]);
                    let mut out = p.out(dtype, &[t, heads, width]);
                    mla_rows_into(&args, out.view_mut(), cache.view_mut(), &mut p.ex)?;
                    all.extend([cache, out]);
                }
                Ok(all)
            };
            on_both(op, |c, g| {
                for i in [0, 2, 4] {
                    assert_close(&format!("cache {i} of {what}"), &c[i], &g[i], 4e-6);
                }
                let bound = 1e-6 * (l.max(n) as f64).sqrt() * 4.0;
                assert_close(&format!("absorbed queries of {what}"), &c[1], &g[1], bound);
                assert_same(&format!("rounded queries of {what}"), &c[3], &g[3]);
                assert_same(&format!("queries of {what}"), &c[5], &g[5]);
            });
        }
    }
}

#[test]
fn rows_go_to_their_slots_and_nowhere_else() {
    let mut rng = Rng::new();
    // Rows, heads, sizes of the key's parts and of the value, blocks and their size.
    let cases = [
        (5, 2, [4, 6, 3], (4, 2)),
        (9, 1, [512, 64, 0], (3, 16)),
        (33, 7, [128, 64, 128], (9, 5)),
        (0, 1, [3, 2, 0], (1, 1)),
    ];
    for model in FLOATS {
        for stream in streams(model) {
            for (t, heads, [n, r, v], (blocks, size)) in cases {
                let kv = rng.floats(stream, &[t, heads, n + v]);
                let tail = rng.floats(model, &[t, r]);
                let mut slots = rng.permutation(blocks * size);
                slots.resize(t.max(slots.len()), u32::MAX);
                slots.truncate(t);
                if let Some(slot) = slots.get_mut(1) {
                    *slot = u32::MAX;
                }
                let slots = words(slots, &[t]);
                let op = |p: &mut Place| {
                    let kv = p.put(&kv);
                    let tail = p.put(&tail);
                    let slots = p.put(&slots);
                    let mut k = p.out(model, &[blocks, heads, size, n + r]);
                    let mut values = p.out(model, &[blocks, heads, size, v]);
                    let to = (v > 0).then(|| values.view_mut());
                    mla_cache_into(kv.view(), tail.view(), slots.view(), k.view_mut(), to, &mut p.ex)?;
                    Ok(vec![k, values])
                };
                on_both(op, |c, g| {
                    let what = format!("{t} rows of {heads} heads, {}", model.as_str());
                    assert_same(&format!("keys of {what}"), &c[0], &g[0]);
                    assert_same(&format!("values of {what}"), &c[1], &g[1]);
                });
            }
        }
    }
}
