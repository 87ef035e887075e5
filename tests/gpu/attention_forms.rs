//! Attention by each of its kernels: pages, windows, splits and sharp scores, which the kernels handle separately, and
//! rows whose bits must not depend on the other rows of their step.

use candle_core::DType;
use moe_kernels::half::bf16;
use moe_kernels::plan::{Gpu, Machine, MixedForm};
use moe_kernels::{
    AttentionMeta, Buffer, Exec, QkNormRope, StepRows, paged_attention_into, qk_norm_rope_cache_into,
    rope_attention_into,
};

use crate::attention::{Case, Data, Sequence};
use crate::common::*;
use crate::definition::relative_error;

/// The bound covers the rounding of q, weights, keys, values and results to bf16, and the CPU's rounding. Sharp
/// softmaxes round worst.
const BOUND: f64 = 1.2e-2;

fn case(heads: (usize, usize), head_dim: usize, block_size: usize, sequences: &[Sequence]) -> Case {
    let sequences = sequences.to_vec();
    // The models with heads of 256 have gates.
    let gates = head_dim == 256;
    Case {
        heads,
        head_dim,
        block_size,
        window: None,
        norms: true,
        sinks: false,
        gates,
        sequences,
        padding: 0,
    }
}

/// The caches with infinities in every slot that no sequence has written before this step.
fn hidden(case: &Case, data: &Data) -> [Buffer; 2] {
    let bs = case.block_size;
    let kv = case.heads.1;
    let d = case.head_dim;
    let tables = values::<u32>(&data.tables);
    let mut is_written = vec![false; data.caches[0].dims()[0] * bs];
    for (&(first, _), table) in case.sequences.iter().zip(tables.chunks(data.tables.dims()[1])) {
        (0..first).for_each(|p| is_written[table[p / bs] as usize * bs + p % bs] = true);
    }
    data.caches.each_ref().map(|cache| {
        let mut all = values::<bf16>(cache);
        for (row, slot) in all.chunks_mut(d).zip((0..).map(|row| row / (kv * bs) * bs + row % bs)) {
            if !is_written[slot] {
                row.fill(bf16::INFINITY);
            }
        }
        Buffer::from_vec(all, cache.dims()).unwrap()
    })
}

fn assert_near(what: &str, cpu: &Buffer, gpu: &Buffer, bound: f64) {
    let [want, got] = [cpu, gpu].map(|b| b.view().to_f32_vec().unwrap());
    let off = relative_error(&want.into_iter().map(f64::from).collect::<Vec<_>>(), &got);
    assert!(off < bound, "{what}: off by {off}");
}

/// Runs steps in bf16 whose unwritten slots contain no numbers on the GPU.
fn check(rng: &mut Rng, case: &Case) {
    let data = case.data(rng, DType::BF16, DType::F32);
    let hidden = hidden(case, &data);
    let op = |p: &mut Place| {
        let placed = data.placed(p);
        let caches = if p.ex.is_cuda() { &hidden } else { &data.caches };
        let [mut k, mut v] = caches.each_ref().map(|cache| p.put(cache));
        let mut out = p.out(DType::BF16, &[data.rows, case.heads.0 * case.head_dim]);
        let args = placed.args(case);
        let meta = placed.meta(case);
        let rows = case.step_rows();
        rope_attention_into(&args, &meta, rows, k.view_mut(), v.view_mut(), out.view_mut(), &mut p.ex)?;
        let first = p.put(&out.host(p));
        rope_attention_into(&args, &meta, rows, k.view_mut(), v.view_mut(), out.view_mut(), &mut p.ex)?;
        Ok(vec![first, out])
    };
    let Case { heads, head_dim, block_size, window, .. } = case;
    let what = format!(
        "{heads:?} heads of {head_dim}, pages of {block_size}, window {window:?}, {:?}",
        case.sequences
    );
    on_both(op, |c, g| {
        assert_near(&what, &c[0], &g[0], BOUND);
        assert_same(&format!("{what}, again"), &g[0], &g[1]);
    });
}

#[test]
fn decoding_rows_agree_for_every_number_of_splits() {
    let mut rng = Rng::new();
    let edges = [0, 1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 1000];
    let decoding = |positions: &[usize]| positions.iter().map(|p| (*p, 1)).collect::<Vec<Sequence>>();
    let uneven: Vec<usize> = (0..256).map(|i| i * 37 % 400).collect();
    let heads = [
        ((32, 4), 128),
        ((8, 8), 64),
        ((12, 1), 128),
        ((16, 4), 64),
        ((32, 2), 128),
        ((16, 2), 256),
        ((24, 2), 256),
        ((5, 1), 64),
        ((3, 3), 256),
    ];
    for (heads, head_dim) in small(heads, 5, |heads| heads.0.0) {
        // A step with fewer rows is cut into more splits.
        let pages = [(16, None), (7, Some(100)), (64, Some(1))];
        for positions in [&edges[..], &edges[8..], &[8191, 5119], &[255], &uneven] {
            // Many rows take a long time on the CPU.
            let some = if positions.len() > 100 { 1 } else { pages.len() };
            for (block_size, window) in pages.into_iter().take(some) {
                check(&mut rng, &Case { window, ..case(heads, head_dim, block_size, &decoding(positions)) });
            }
        }
    }
}

#[test]
fn prompts_agree_on_pages_and_windows_of_every_size() {
    let mut rng = Rng::new();
    let many: Vec<Sequence> = (0..70).map(|i| (i * 3, 1 + i % 45)).collect();
    let mixed = [(0, 1), (7, 65), (0, 0), (130, 1), (64, 64), (0, 8), (0, 9), (3, 17)];
    let mut cases = vec![
        case((8, 2), 128, 8, &many),
        case((32, 4), 128, 16, &mixed),
        case((8, 8), 64, 64, &[(100, 33), (0, 129), (1000, 256)]),
        case((32, 4), 128, 7, &mixed),
        case((6, 1), 64, 96, &[(0, 300), (513, 130)]),
        case((16, 2), 256, 16, &mixed),
        case((24, 2), 256, 7, &mixed),
        case((4, 1), 256, 192, &[(0, 300), (513, 130)]),
    ];
    for block_size in [8, 32, 64, 128, 256] {
        cases.push(case((32, 4), 128, block_size, &[(77, 1000), (0, 128), (0, 127), (128, 1)]));
        cases.push(case((6, 1), 64, block_size, &[(0, 300), (513, 130)]));
        cases.push(case((16, 2), 256, block_size, &[(77, 1000), (0, 64), (0, 63), (128, 1), (63, 2)]));
    }
    for window in [1, 20, 128, 129, 300] {
        cases.push(Case { window: Some(window), ..case((12, 4), 128, 16, &[(100, 333), (0, 129)]) });
        cases.push(Case { window: Some(window), ..case((16, 2), 64, 32, &[(0, 700)]) });
        cases.push(Case { window: Some(window), ..case((8, 2), 256, 32, &[(0, 700), (61, 150)]) });
    }
    // Blocks come in pairs, and in the last pair the second block has no rows. The rows of a pair see positions of two
    // tiles.
    for rows in [129, 160, 161, 384] {
        cases.push(case((32, 1), 64, 16, &[(3, rows)]));
        cases.push(Case { window: Some(300), ..case((32, 1), 128, 32, &[(3, 3 * rows), (90, 3 * rows)]) });
        cases.push(case((32, 1), 256, 8, &[(3, rows)]));
    }
    for case in small(cases, 3000, |case| case.heads.0 * case.sequences.iter().map(|s| s.1).sum::<usize>()) {
        check(&mut rng, &case);
    }
}

/// Scores grow from one tile to the next by far more than the weights of a softmax may grow, and beyond the range of
/// f32.
#[test]
fn sharp_scores_agree() {
    let mut rng = Rng::new();
    let steps = [
        case((32, 4), 128, 16, &[(1000, 300)]),
        case((32, 1), 128, 16, &[(1000, 300)]),
        Case { window: Some(200), ..case((8, 2), 64, 32, &[(0, 700), (130, 5)]) },
        case((4, 1), 128, 7, &[(0, 200), (70, 3)]),
        case((16, 2), 256, 16, &[(1000, 300)]),
        case((32, 1), 256, 8, &[(100, 200), (70, 3)]),
        case((4, 1), 256, 7, &[(0, 200), (70, 3)]),
        case((2, 1), 64, 16, &[(130, 20)]),
    ];
    for case in small(steps, 2, |step| step.heads.0) {
        let Case { heads, head_dim, .. } = case;
        let data = case.data(&mut rng, DType::BF16, DType::F32);
        let q = rng.floats(DType::BF16, &[data.rows, heads.0, head_dim]);
        for sharp in [3.0, 36.0, 120.0] {
            let op = |p: &mut Place| {
                let placed = data.placed(p);
                let q = p.put(&q);
                let [k, v] = data.caches.each_ref().map(|cache| p.put(cache));
                let mut meta = placed.meta(&case);
                meta.scale *= sharp;
                let mut out = p.out(DType::BF16, &[data.rows, heads.0 * head_dim]);
                paged_attention_into(q.view(), k.view(), v.view(), &meta, out.view_mut(), &mut p.ex)?;
                let mut exact = p.out(DType::BF16, &[data.rows, heads.0 * head_dim]);
                let mut ex = p.ex.clone().with_batch_invariant(true);
                paged_attention_into(q.view(), k.view(), v.view(), &meta, exact.view_mut(), &mut ex)?;
                Ok(vec![out, exact])
            };
            on_both(op, |c, g| {
                for (c, g) in c.iter().zip(g) {
                    let bound = if sharp > 3.0 { 2.0 * BOUND } else { BOUND };
                    assert_near(&format!("{heads:?} heads of {head_dim}, {sharp} times"), c, g, bound);
                }
            });
        }
    }
}

/// The rows of a prompt in one step, in chunks and after another sequence have the same bits where they must. This
/// holds for sharp scores too, and a row whose weights become too large must not change its neighbours.
#[test]
fn rows_of_a_prompt_do_not_depend_on_their_step() {
    for (heads, head_dim) in [((32, 4), 128), ((16, 2), 256)] {
        check_parts_of_a_prompt(&mut Rng::new(), heads, head_dim);
    }
}

fn check_parts_of_a_prompt(rng: &mut Rng, heads: (usize, usize), head_dim: usize) {
    let count = if tiny() { 150 } else { 700 };
    // Both sequences are in the cache. Each step takes some rows of one or both.
    let both = case(heads, head_dim, 16, &[(0, 300), (0, count)]);
    let data = both.data(rng, DType::BF16, DType::F32);
    let q = rng.floats(DType::BF16, &[300 + count, heads.0, head_dim]);
    let p = Place::new(cuda());
    let [k, v] = data.caches.each_ref().map(|cache| p.put(cache));
    let tables: Vec<Vec<u32>> =
        values::<u32>(&data.tables).chunks(data.tables.dims()[1]).map(<[u32]>::to_vec).collect();
    for sharp in [3.0, 36.0, 120.0] {
        // `from` is the first row of q. For each sequence of the step: its number, its first position and its number of
        // rows.
        let run = |from: usize, sequences: &[(usize, usize, usize)], ex: &Exec| {
            let rows: usize = sequences.iter().map(|s| s.2).sum();
            let mut starts = vec![0];
            let mut positions = Vec::new();
            let mut table = Vec::new();
            for &(sequence, first, count) in sequences {
                positions.extend(first as u32..(first + count) as u32);
                starts.push(positions.len() as u32);
                table.extend(&tables[sequence]);
            }
            let starts = p.put(&words(starts, &[sequences.len() + 1]));
            let positions = p.put(&words(positions, &[rows]));
            let table = p.put(&words(table, &[sequences.len(), tables[0].len()]));
            let meta = AttentionMeta {
                query_start_loc: starts.view(),
                positions: positions.view(),
                block_tables: table.view(),
                scale: (head_dim as f32).powf(-0.5) * sharp,
                sliding_window: None,
                sinks: None,
                gates: None,
            };
            let q = p.put(&cut(&q, from, rows));
            let mut out = p.out(DType::BF16, &[rows, heads.0 * head_dim]);
            let mut ex = ex.clone();
            paged_attention_into(q.view(), k.view(), v.view(), &meta, out.view_mut(), &mut ex).unwrap();
            out.floats(&p)
        };
        let same = |what: &str, a: &[f32], b: &[f32]| {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(a) == bits(b), "{what}, scores {sharp} times: other bits");
        };
        let exact = cuda().with_batch_invariant(true);
        let whole = run(300, &[(1, 0, count)], &exact);
        let mut parts = Vec::new();
        for (at, rows) in [(0, 1), (1, 130), (131, 400), (531, 169)] {
            let rows = rows.min(count.saturating_sub(at));
            if rows > 0 {
                parts.extend(run(300 + at, &[(1, at, rows)], &exact));
            }
        }
        same("chunks of a prompt", &parts, &whole);
        let second = run(0, &[(0, 0, 300), (1, 0, count)], &exact);
        same("a prompt after another", &second[300 * heads.0 * head_dim..], &whole);
        same("a prompt without batch invariance", &run(300, &[(1, 0, count)], &cuda()), &whole);
    }
}

/// Decoding rows that run at the same time as prompts have the bits of running one after the other, in every
/// repetition.
#[test]
fn decoding_rows_with_prompts_are_those_of_one_after_the_other() {
    let mut rng = Rng::new();
    let machine = Machine { gpu: Some(Gpu::HOPPER), ..Machine::default() };
    for round in 0..if tiny() { 1 } else { 8 } {
        let shapes = [((32, 4), 128), ((32, 8), 64), ((16, 4), 128), ((16, 2), 256)];
        let (heads, head_dim) = shapes[round % shapes.len()];
        let decoding = if tiny() { 60 } else { 150 + rng.below(100) };
        let mut sequences: Vec<Sequence> = (0..decoding).map(|_| (300 + rng.below(400), 1)).collect();
        for _ in 0..[1, 2, 5][rng.below(3)] {
            sequences.push((rng.below(300), 2 + rng.below(100)));
        }
        let case = Case { padding: 3, ..case(heads, head_dim, 16, &sequences) };
        let overlaps = case.form(&machine) == Some(MixedForm::Overlapped);
        assert!(overlaps || tiny(), "{:?}", case.step_rows());
        let data = case.data(&mut rng, DType::BF16, DType::F32);
        let mut p = Place::new(cuda());
        let placed = data.placed(&p);
        let mut run = |rows: StepRows| {
            let args = placed.args(&case);
            let meta = placed.meta(&case);
            let [mut k, mut v] = data.caches.each_ref().map(|cache| p.put(cache));
            let mut out = p.out(DType::BF16, &[data.rows, heads.0 * head_dim]);
            let to_k = k.view_mut();
            let to_v = v.view_mut();
            rope_attention_into(&args, &meta, rows, to_k, to_v, out.view_mut(), &mut p.ex).unwrap();
            [out, k, v].map(|placed| placed.host(&p))
        };
        // A step with unknown scores runs one launch after the other, with the same splits.
        let want = run(StepRows { decode_scores: 0, prompt_scores: 0, ..case.step_rows() });
        for _ in 0..4 {
            for (part, (want, got)) in
                ["rows", "keys", "values"].iter().zip(want.iter().zip(&run(case.step_rows())))
            {
                assert_same(&format!("{part} of {decoding} decoding rows, {heads:?} heads"), want, got);
            }
        }
    }
}

/// Queries, keys and values have the same bits, whatever other rows the step has. The launch of decoding rows writes
/// the same keys and values as the launch of prompts.
#[test]
fn cached_rows_do_not_depend_on_their_step() {
    let mut rng = Rng::new();
    // From 512 rows on, one block handles several rows. With 4 + 2 and 5 + 2 heads, some warps have no head or only
    // one.
    let shapes = [
        ((32, 4), 128, 70),
        ((5, 1), 64, 3),
        ((4, 1), 64, 150),
        ((32, 4), 128, 700),
        ((5, 1), 64, 513),
        ((4, 1), 128, 600),
        ((4, 1), 256, 3),
        ((16, 2), 256, 70),
        ((5, 1), 256, 513),
    ];
    for (i, (heads, head_dim, rows)) in
        small(shapes, 513, |shape| shape.0.0 * shape.2 / 6).into_iter().enumerate()
    {
        let sequences: Vec<Sequence> = (0..rows).map(|i| (i % 40, 1)).collect();
        let case = Case { norms: i % 2 == 0, ..case(heads, head_dim, 16, &sequences) };
        let data = case.data(&mut rng, DType::BF16, DType::F32);
        let mut p = Place::new(cuda());
        let placed = data.placed(&p);
        let args = placed.args(&case);
        let meta = placed.meta(&case);
        let mut run = |step: usize| {
            let [mut k, mut v] = data.caches.each_ref().map(|cache| p.put(cache));
            let mut q = p.out(DType::BF16, &[rows, heads.0, head_dim]);
            for first in (0..rows).step_by(step) {
                let count = step.min(rows - first);
                let [qkv, cos, sin, slot_mapping] = [args.qkv, args.cos, args.sin, args.slot_mapping]
                    .map(|view| view.narrow(first, count).unwrap());
                let part = QkNormRope { qkv, cos, sin, slot_mapping, ..args };
                let q = q.view_mut().narrow(first, count).unwrap();
                qk_norm_rope_cache_into(&part, q, k.view_mut(), v.view_mut(), &mut p.ex).unwrap();
            }
            [q, k, v].map(|placed| placed.host(&p))
        };
        let whole = run(rows);
        let parts = run(37);
        let what = format!("{rows} rows, {heads:?} heads of {head_dim}");
        for (part, (whole, parts)) in ["queries", "keys", "values"].iter().zip(whole.iter().zip(&parts)) {
            assert_same(&format!("{part} of {what}"), whole, parts);
        }
        let [mut k, mut v] = data.caches.each_ref().map(|cache| p.put(cache));
        let mut out = p.out(DType::BF16, &[rows, heads.0 * head_dim]);
        let to_k = k.view_mut();
        let to_v = v.view_mut();
        rope_attention_into(&args, &meta, case.step_rows(), to_k, to_v, out.view_mut(), &mut p.ex).unwrap();
        assert_same(&format!("decoded keys of {what}"), &whole[1], &k.host(&p));
        assert_same(&format!("decoded values of {what}"), &whole[2], &v.host(&p));
    }
}
/// Norms whose weights have more digits than the model dtype, with heads of kernels that take only the model dtype, and
/// with heads of Qwen3-Next.
#[test]
fn attention_agrees_with_norms_in_f32() {
    let mut rng = Rng::new();
    for model in [DType::BF16, DType::F16] {
        for (heads, head_dim) in
            small([((8, 2), 64), ((4, 1), 128), ((16, 2), 256), ((3, 1), 18)], 64, |c| c.1)
        {
            for (sequences, padding) in
                [(vec![(37, 1), (0, 1), (300, 1)], 2), (vec![(5, 1), (0, 70), (128, 9)], 3), (vec![], 2)]
            {
                let case = Case { padding, ..case(heads, head_dim, 16, &sequences) };
                let mut data = case.data(&mut rng, model, DType::F32);
                let norm = |rng: &mut Rng| rng.floats(DType::F32, &[head_dim]);
                data.norms = Some((norm(&mut rng), norm(&mut rng)));
                case.check_data(&data, model, DType::F32);
            }
        }
    }
}
