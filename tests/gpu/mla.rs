//! Attention whose values are a part of their keys or have another size than the keys, in latent space and for prompts.

use candle_core::DType;
use moe_kernels::{
    Activation, AttentionMeta, Buffer, Float, MlaPrompt, gated_activation_into, gated_rows_into,
    mla_attention_into, mla_prompt_into, paged_attention_into, with_float,
};

use crate::common::*;

#[test]
fn activations_apart_from_their_products_agree() {
    let mut rng = Rng::new();
    let activations = [
        Activation::SwiGlu,
        Activation::SwiGluOai { alpha: 1.7, limit: 0.6 },
        Activation::Gelu,
        Activation::GeluTanh,
    ];
    for model in FLOATS {
        for activation in activations {
            for (rows, width) in [(0, 5), (1, 1), (3, 7), (40, 1408), (2, 20_000)] {
                let joined = rng.floats(DType::F32, &[rows, 2 * width]);
                let gate = rng.floats(DType::F32, &[rows, width]);
                let up = rng.floats(DType::F32, &[rows, width]);
                let op = |p: &mut Place| {
                    let joined = p.put(&joined);
                    let gate = p.put(&gate);
                    let up = p.put(&up);
                    let mut a = p.out(model, &[rows, width]);
                    let mut b = p.out(model, &[rows, width]);
                    gated_activation_into(gate.view(), up.view(), activation, a.view_mut(), &mut p.ex)?;
                    gated_rows_into(joined.view(), activation, b.view_mut(), &mut p.ex)?;
                    Ok(vec![a, b])
                };
                on_both(op, |c, g| {
                    let what = format!("{activation:?} of {rows} x {width}");
                    assert_close(&what, &c[0], &g[0], 2e-6);
                    assert_close(&what, &c[1], &g[1], 2e-6);
                });
            }
        }
    }
}

/// Queries, and a cache that contains the rows that they attend to.
struct Case {
    heads: (usize, usize),
    /// Sizes of a key and of a value.
    dims: (usize, usize),
    /// Whether values are the first elements of keys.
    shared: bool,
    block_size: usize,
    window: Option<usize>,
    /// First position and number of rows of each sequence.
    sequences: Vec<(usize, usize)>,
    padding: usize,
}

impl Case {
    fn check(&self, rng: &mut Rng, model: DType, q_dtype: DType) {
        let (hq, hkv) = self.heads;
        let (d, dv) = self.dims;
        let bs = self.block_size;
        let rows = self.sequences.iter().map(|s| s.1).sum::<usize>() + self.padding;
        let max_blocks = self.sequences.iter().map(|s| (s.0 + s.1).div_ceil(bs)).max().unwrap_or(0).max(1);
        let blocks = self.sequences.len() * max_blocks + 2;
        let order = rng.permutation(blocks);
        let mut tables = Vec::new();
        let mut starts = vec![0];
        let mut positions = Vec::new();
        for (s, &(first, count)) in self.sequences.iter().enumerate() {
            let needed = (first + count).div_ceil(bs);
            let own = order[s * max_blocks..(s + 1) * max_blocks].iter().enumerate();
            tables.extend(own.map(|(i, &block)| if i < needed { block } else { u32::MAX }));
            positions.extend(first as u32..(first + count) as u32);
            starts.push(positions.len() as u32);
        }
        positions.resize(rows, 0);
        let q = rng.floats(q_dtype, &[rows, hq, d]);
        let k = rng.floats(model, &[blocks, hkv, bs, d]);
        let v = rng.floats(model, &[blocks, hkv, bs, dv]);
        let w_uv = rng.floats(model, &[hq, 128, dv]);
        let starts = words(starts, &[self.sequences.len() + 1]);
        let tables = words(tables, &[self.sequences.len(), max_blocks]);
        let positions = words(positions, &[rows]);
        let op = |p: &mut Place| {
            let q = p.put(&q);
            let k = p.put(&k);
            let v = p.put(&v);
            let starts = p.put(&starts);
            let positions = p.put(&positions);
            let tables = p.put(&tables);
            let meta = AttentionMeta {
                query_start_loc: starts.view(),
                positions: positions.view(),
                block_tables: tables.view(),
                scale: 3.0 * (d as f32).powf(-0.5),
                sliding_window: self.window,
                sinks: None,
                gates: None,
            };
            let values = if self.shared { k.view() } else { v.view() };
            let mut out = p.out(model, &[rows, hq * dv]);
            paged_attention_into(q.view(), k.view(), values, &meta, out.view_mut(), &mut p.ex)?;
            if !self.shared || hkv != 1 {
                return Ok(vec![out]);
            }
            // The product that follows is included: in one launch if the sizes are DeepSeek's and there are few rows.
            let w_uv = p.put(&w_uv);
            let mut values = p.out(model, &[rows, hq * 128]);
            mla_attention_into(q.view(), k.view(), &meta, w_uv.view(), values.view_mut(), &mut p.ex)?;
            Ok(vec![out, values])
        };
        on_both(op, |c, g| {
            let bound = 1e-5 + 12.0 * if model == DType::F32 { 0.0 } else { rounding(model) };
            let what = format!(
                "{rows} rows, {hq}/{hkv} heads of {d} and {dv}, blocks of {bs}, window {:?}, {:?}, {} with {}",
                self.window,
                self.sequences,
                model.as_str(),
                q_dtype.as_str()
            );
            assert_close(&what, &c[0], &g[0], bound);
            if let (Some(c), Some(g)) = (c.get(1), g.get(1)) {
                // Two orders of a sum of `dv` products in f32.
                assert_close(&format!("values of {what}"), c, g, 2.0 * bound + dv as f64 * 4e-7);
            }
        });
    }
}

fn steps() -> Vec<(Vec<(usize, usize)>, usize)> {
    vec![
        (vec![], 3),
        (vec![(0, 1)], 0),
        (vec![(300, 1), (0, 1), (64, 1)], 1),
        (vec![(0, 5), (37, 1), (0, 0), (128, 9), (0, 1), (300, 1)], 3),
        (vec![(63, 1), (64, 1), (65, 1), (127, 1), (128, 1), (5, 1), (700, 1)], 1),
        (vec![(0, 150)], 0),
        (vec![(40, 70), (3, 1), (0, 66)], 2),
    ]
}

#[test]
fn attention_with_values_of_other_sizes_agrees() {
    let mut rng = Rng::new();
    // Heads, sizes of keys and values, whether both share rows, block size, window.
    let shapes = [
        ((3, 1), (9, 6), true, 4, None),
        ((6, 2), (20, 12), true, 7, Some(11)),
        ((4, 4), (192, 128), false, 16, None),
        ((5, 5), (11, 30), false, 16, None),
        ((16, 1), (576, 512), true, 16, None),
        ((2, 2), (64, 32), false, 16, None),
    ];
    for model in FLOATS {
        for q_dtype in streams(model) {
            for (heads, dims, shared, block_size, window) in small(shapes, 64, |shape| shape.1.0) {
                for (sequences, padding) in steps() {
                    Case { heads, dims, shared, block_size, window, sequences, padding }
                        .check(&mut rng, model, q_dtype);
                }
            }
        }
    }
}

/// The kernel on warpgroup products: one row or many, split over positions or not, with partly filled tiles and
/// padding.
#[test]
fn latent_attention_of_tensor_cores_agrees() {
    let mut rng = Rng::new();
    let check = |rng: &mut Rng, heads: usize, block_size, window, sequences: &[(usize, usize)], padding| {
        let heads = (heads, 1);
        let dims = (576, 512);
        let sequences = sequences.to_vec();
        Case { heads, dims, shared: true, block_size, window, sequences, padding }.check(
            rng,
            DType::BF16,
            DType::BF16,
        );
    };
    for (sequences, padding) in steps() {
        for heads in [1, 5, 16, 24, 64, 128] {
            check(&mut rng, heads, 16, None, &sequences, padding);
        }
        for (block_size, window) in [(8, None), (32, Some(40)), (64, None), (128, Some(1)), (256, Some(200))]
        {
            check(&mut rng, 16, block_size, window, &sequences, padding);
        }
    }
    // Many splits, some of which have no positions; more tiles than blocks in the grid.
    check(&mut rng, 16, 16, None, &[(9000, 1)], 0);
    check(&mut rng, 128, 16, None, &[(3001, 1), (10, 1)], 0);
    let many: Vec<(usize, usize)> = (0..300).map(|i| ((i * 37) % 400, 1)).collect();
    check(&mut rng, 16, 16, None, &many, 0);
    check(&mut rng, 16, 16, None, &many[..80], 0);
    check(&mut rng, 2, 16, None, &[(1000, 333)], 0);
}

/// Rows that no sequence attends to contain no numbers, which must not reach a result.
#[test]
fn what_nobody_sees_may_be_anything() {
    let ex = cuda();
    let place = Place::new(ex);
    let heads = 16;
    let bs = 16;
    let rows = 1;
    let mut rng = Rng::new();
    let mut k = values::<moe_kernels::half::bf16>(&rng.floats(DType::BF16, &[8 * bs * 576]));
    // The sequence has 70 positions in blocks 0 to 4.
    k[70 * 576..].fill(moe_kernels::half::bf16::NAN);
    let k = place.put(&Buffer::from_vec(k, &[8, 1, bs, 576]).unwrap());
    let q = place.put(&rng.floats(DType::BF16, &[rows, heads, 576]));
    let starts = place.put(&words(vec![0, 1], &[2]));
    let positions = place.put(&words(vec![69], &[1]));
    let tables = place.put(&words((0..8).collect(), &[1, 8]));
    let meta = AttentionMeta {
        query_start_loc: starts.view(),
        positions: positions.view(),
        block_tables: tables.view(),
        scale: 0.04,
        sliding_window: None,
        sinks: None,
        gates: None,
    };
    let mut out = place.out(DType::BF16, &[rows, heads * 512]);
    let mut ex = place.ex.clone();
    paged_attention_into(q.view(), k.view(), k.view(), &meta, out.view_mut(), &mut ex).unwrap();
    let out = out.host(&place).view().to_f32_vec().unwrap();
    assert!(out.iter().all(|x| x.is_finite()) && out.iter().any(|x| *x != out[0]));
}

/// Dtype, heads, the sizes of a latent, of a key's parts and of a value, the block size, and for each sequence the
/// first position and the number of rows.
type PromptCase = (DType, usize, [usize; 4], usize, &'static [(usize, usize)]);

/// Prompts with keys and values for every head if there are enough rows, otherwise in latent space: whole prompts, last
/// chunks, several sequences, sizes for which no special kernel exists.
#[test]
fn prompts_over_latent_rows_agree() {
    let mut rng = Rng::new();
    let small_sizes = [21, 8, 6, 5];
    let full = [512, 128, 64, 128];
    let cases: [PromptCase; 9] = [
        (DType::F32, 3, small_sizes, 4, &[(0, 7), (5, 3), (0, 0), (9, 1)]),
        (DType::BF16, 2, small_sizes, 7, &[(0, 300)]),
        (DType::F16, 1, small_sizes, 16, &[]),
        (DType::BF16, 16, full, 16, &[(0, 40), (17, 5)]),
        (DType::BF16, 16, full, 16, &[(0, 256)]),
        (DType::BF16, 4, full, 16, &[(0, 300), (130, 70), (0, 0), (600, 33), (0, 2), (127, 1), (128, 65)]),
        (DType::BF16, 2, full, 5, &[(1000, 129), (0, 129)]),
        (DType::BF16, 3, full, 128, &[(513, 255), (0, 1)]),
        (DType::F32, 2, full, 16, &[(0, 270)]),
    ];
    for (model, heads, [l, n, r, v], bs, sequences) in small(cases, 1, |case| case.2[0] / 100) {
        let rows: usize = sequences.iter().map(|s| s.1).sum();
        let max_blocks = sequences.iter().map(|s| (s.0 + s.1).div_ceil(bs)).max().unwrap_or(1);
        let order = rng.permutation(sequences.len() * max_blocks + 1);
        let mut starts = vec![0];
        let mut positions = Vec::new();
        let mut seen = 0;
        for &(first, count) in sequences {
            positions.extend(first as u32..(first + count) as u32);
            starts.push(positions.len() as u32);
            seen += if count > 0 { first + count } else { 0 };
        }
        let tables = words(order[..sequences.len() * max_blocks].to_vec(), &[sequences.len(), max_blocks]);
        let starts = words(starts, &[sequences.len() + 1]);
        let positions = words(positions, &[rows]);
        let cache = rng.floats(model, &[order.len(), 1, bs, l + r]);
        let q = rng.floats(model, &[rows, heads, n + r]);
        // Scores are about 1, so that a rounded key changes them little.
        let scaled = |rng: &mut Rng, dims: &[usize], by: f32| {
            let values = |rng: &mut Rng| {
                (0..dims.iter().product::<usize>()).map(|_| rng.float() * by).collect::<Vec<_>>()
            };
            let buffer: candle_core::Result<Buffer> = with_float!(model, "weights", T => {
                Buffer::from_vec(values(rng).into_iter().map(<T as Float>::narrow).collect::<Vec<T>>(), dims)
            });
            buffer.unwrap()
        };
        let by = (l as f32).powf(-0.5);
        let w_uk = scaled(&mut rng, &[heads, l, n], by);
        let w_uv = scaled(&mut rng, &[heads, v, l], by);
        let op = |p: &mut Place| {
            let q = p.put(&q);
            let w_uk = p.put(&w_uk);
            let w_uv = p.put(&w_uv);
            let cache = p.put(&cache);
            let starts = p.put(&starts);
            let positions = p.put(&positions);
            let tables = p.put(&tables);
            let args = MlaPrompt {
                q: q.view(),
                w_uk: w_uk.view(),
                w_uv: w_uv.view(),
                cache: cache.view(),
                meta: AttentionMeta {
                    query_start_loc: starts.view(),
                    positions: positions.view(),
                    block_tables: tables.view(),
                    scale: ((n + r) as f32).powf(-0.5),
                    sliding_window: None,
                    sinks: None,
                    gates: None,
                },
                positions: seen,
            };
            let mut out = p.out(model, &[rows, heads * v]);
            mla_prompt_into(&args, out.view_mut(), &mut p.ex)?;
            Ok(vec![out])
        };
        on_both(op, |c, g| {
            let bound = 1e-5 + 6.0 * if model == DType::F32 { 0.0 } else { rounding(model) };
            let what = format!("{} {heads} heads of {l} {n} {r} {v}, {sequences:?}", model.as_str());
            assert_close(&what, &c[0], &g[0], bound);
        });
    }
}
