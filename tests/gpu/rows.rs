//! Row-wise ops.

use candle_core::DType;
use moe_kernels::{
    Buffer, NO_EXPERT, add_into, add_rms_norm_into, add_scaled_into, copy_rows_into, embedding_into,
    fill_into, one_group_into, rms_norm_into, scale_rows_into, sigmoid_into, softmax_into, weighted_sum_into,
};

use crate::common::*;

const SIZES: [(usize, usize); 6] = [(0, 5), (1, 1), (3, 7), (9, 64), (2, 1000), (130, 257)];

#[test]
fn gathered_rows_are_those_of_the_table() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for out_dtype in streams(dtype) {
            for (rows, width) in SIZES {
                let table = rng.floats(dtype, &[11, width]);
                let ids = rng.ids(11, &[rows]);
                let op = |p: &mut Place| {
                    let table = p.put(&table);
                    let ids = p.put(&ids);
                    let mut out = p.out(out_dtype, &[rows, width]);
                    embedding_into(table.view(), ids.view(), out.view_mut(), &mut p.ex)?;
                    Ok(vec![out])
                };
                on_both(op, |c, g| assert_same("embedding", &c[0], &g[0]));
            }
        }
    }
}

/// On the device a token that is not in the table gives a row of zeros.
#[test]
fn an_id_beyond_the_table_is_a_row_of_zeros() {
    let mut rng = Rng::new();
    let mut p = Place::new(cuda());
    for width in [7, 64, 4160] {
        let table = p.put(&rng.floats(DType::BF16, &[33, width]));
        let ids = [32, 33, u32::MAX];
        let ids = p.put(&words(ids.to_vec(), &[3]));
        let mut out = p.out(DType::F32, &[3, width]);
        embedding_into(table.view(), ids.view(), out.view_mut(), &mut p.ex).unwrap();
        let out = out.floats(&p);
        let table = table.floats(&p);
        assert!(out[..width] == table[32 * width..] && out[width..].iter().all(|x| *x == 0.0));
    }
}

/// Sizes for a launch with several rows per block, and sizes for one row.
const WIDE: [(usize, usize); 6] =
    [(257, 2048), (5, 4160), (2, 8192), (1501, 2056), (700, 3080), (4500, 1032)];

/// A row has the same bits as alone, with and without the addition before the norm.
#[test]
fn norms_do_not_depend_on_other_rows() {
    let mut rng = Rng::new();
    for (rows, width) in small(WIDE, 10_000, |size| size.0 * size.1 / 4) {
        let mut p = Place::new(cuda());
        let [delta, x] = [(); 2].map(|()| rng.floats(DType::F32, &[rows, width]));
        let gain = p.put(&rng.floats(DType::BF16, &[width]));
        let mut run = |x: &Buffer, delta: Option<&Buffer>| {
            let (mut x, mut out) = (p.put(x), p.out(DType::BF16, x.dims()));
            let to = out.view_mut();
            match delta {
                Some(delta) => {
                    let delta = p.put(delta);
                    add_rms_norm_into(delta.view(), gain.view(), 1e-6, x.view_mut(), to, &mut p.ex).unwrap();
                }
                None => rms_norm_into(x.view(), gain.view(), 1e-6, to, &mut p.ex).unwrap(),
            }
            [x.host(&p), out.host(&p)]
        };
        let [sums, whole] = run(&x, Some(&delta));
        assert_same(&format!("the norm alone, {rows} x {width}"), &whole, &run(&sums, None)[1]);
        for (first, count) in [(0, 1), (rows - 1, 1), (rows / 3, rows / 2)] {
            let [_, part] = run(&cut(&x, first, count), Some(&cut(&delta, first, count)));
            assert_same(&format!("{count} rows of {rows} x {width}"), &cut(&whole, first, count), &part);
        }
    }
}

#[test]
fn norms_agree() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        // The weight has the model dtype or is in f32, and so does the stream.
        let weights = streams(dtype)
            .into_iter()
            .flat_map(|weight| streams(dtype).into_iter().map(move |s| (weight, s)));
        for (weight, stream) in weights {
            for (rows, width) in SIZES.into_iter().chain(small(WIDE, 10_000, |size| size.0 * size.1 / 4)) {
                let x = rng.floats(stream, &[rows, width]);
                let delta = rng.floats(stream, &[rows, width]);
                let weight = rng.floats(weight, &[width]);
                let op = |p: &mut Place| {
                    let delta = p.put(&delta);
                    let weight = p.put(&weight);
                    let mut x = p.put(&x);
                    let mut normed = p.out(dtype, &[rows, width]);
                    let mut added = p.out(dtype, &[rows, width]);
                    rms_norm_into(x.view(), weight.view(), 1e-6, normed.view_mut(), &mut p.ex)?;
                    let out = added.view_mut();
                    add_rms_norm_into(delta.view(), weight.view(), 1e-6, x.view_mut(), out, &mut p.ex)?;
                    Ok(vec![normed, x, added])
                };
                on_both(op, |c, g| {
                    assert_close("rms_norm", &c[0], &g[0], 2e-6);
                    assert_same("residual", &c[1], &g[1]);
                    assert_close("add_rms_norm", &c[2], &g[2], 2e-6);
                });
            }
        }
    }
}

#[test]
fn additions_and_scalings_are_the_same_bits() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for other in FLOATS {
            for (rows, width) in SIZES {
                let x = rng.floats(dtype, &[rows, width]);
                let acc = rng.floats(other, &[rows, width]);
                let scales = rng.floats(DType::F32, &[rows, 1]);
                let op = |p: &mut Place| {
                    let x = p.put(&x);
                    let scales = p.put(&scales);
                    let mut sum = p.put(&acc);
                    let mut scaled = p.put(&acc);
                    add_into(x.view(), sum.view_mut(), &mut p.ex)?;
                    add_scaled_into(x.view(), scales.view(), scaled.view_mut(), &mut p.ex)?;
                    let mut rows_out = p.out(dtype, &[rows, width]);
                    scale_rows_into(x.view(), scales.view(), rows_out.view_mut(), &mut p.ex)?;
                    let mut copied = p.out(other, &[rows, width]);
                    if dtype == other || [dtype, other].contains(&DType::F32) {
                        copy_rows_into(x.view(), copied.view_mut(), &mut p.ex)?;
                    }
                    Ok(vec![sum, scaled, rows_out, copied])
                };
                on_both(op, |c, g| {
                    for (what, i) in [("add", 0), ("add_scaled", 1), ("scale_rows", 2), ("copy_rows", 3)] {
                        assert_same(what, &c[i], &g[i]);
                    }
                });
            }
        }
    }
}

#[test]
fn softmax_gates_and_fills_agree() {
    let mut rng = Rng::new();
    for (rows, width) in SIZES {
        let x = rng.floats(DType::F32, &[rows, width]);
        let op = |p: &mut Place| {
            let (x, mut probabilities, mut gate) = (p.put(&x), p.out(DType::F32, &[rows, width]), p.put(&x));
            softmax_into(x.view(), probabilities.view_mut(), &mut p.ex)?;
            sigmoid_into(gate.view_mut(), &mut p.ex)?;
            let mut filled = p.out(DType::F32, &[rows, width]);
            fill_into(0.25, filled.view_mut(), &mut p.ex)?;
            let mut offsets = p.out(DType::U32, &[2]);
            let mut numbers = p.out(DType::U32, &[rows * width]);
            one_group_into(offsets.view_mut(), numbers.view_mut(), &mut p.ex)?;
            Ok(vec![probabilities, gate, filled, offsets, numbers])
        };
        on_both(op, |c, g| {
            assert_close("softmax", &c[0], &g[0], 1e-6);
            assert_close("sigmoid", &c[1], &g[1], 1e-6);
            for i in 2..5 {
                assert_same("fill and numbers", &c[i], &g[i]);
            }
        });
    }
}

#[test]
fn weighted_sums_skip_absent_slots() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for (tokens, top_k, width) in [(0, 2, 5), (1, 1, 1), (7, 3, 33), (65, 8, 130)] {
            let slots = rng.floats(DType::F32, &[tokens, top_k, width]);
            let weights = rng.floats(DType::F32, &[tokens, top_k]);
            let id = |rng: &mut Rng| if rng.below(4) == 0 { NO_EXPERT } else { 1 };
            let ids = words((0..tokens * top_k).map(|_| id(&mut rng)).collect(), &[tokens, top_k]);
            let op = |p: &mut Place| {
                let slots = p.put(&slots);
                let ids = p.put(&ids);
                let weights = p.put(&weights);
                let mut out = p.out(dtype, &[tokens, width]);
                weighted_sum_into(slots.view(), ids.view(), weights.view(), out.view_mut(), &mut p.ex)?;
                Ok(vec![out])
            };
            on_both(op, |c, g| assert_close("weighted_sum", &c[0], &g[0], 1e-6));
        }
    }
}

/// A view of the wrong memory is refused, on both sides.
#[test]
fn views_of_the_other_memory_are_refused() {
    let mut rng = Rng::new();
    let x = rng.floats(DType::F32, &[2, 8]);
    let weight = rng.floats(DType::F32, &[8]);
    let mut gpu = cuda();
    let mut out = gpu.zeros(DType::F32, &[2, 8]).unwrap();
    let refused = rms_norm_into(x.view(), weight.view(), 1e-6, out.view_mut(), &mut gpu);
    assert_error(refused, &["rms_norm", "on CUDA device 0", "host memory"]);
    let refused = add_into(x.view(), out.view_mut(), &mut moe_kernels::Exec::cpu());
    assert_error(refused, &["host memory", "CUDA device 0"]);
}
