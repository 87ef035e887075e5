//! The gated delta rule of prompts in chunks against the CPU's, row after row.

use candle_core::DType;
use moe_kernels::{Buffer, DeltaHeads, LaunchLog};

use crate::common::*;
use crate::delta::{Inputs, Part, Rows, check_states, heads, state_dims, states};

/// Value heads that share a key head: one, two, three and five, in pairs and not; columns of one block and of several.
const HEADS: [DeltaHeads; 4] =
    [heads(1, 2, 128, 128), heads(2, 2, 128, 32), heads(2, 6, 128, 64), heads(1, 5, 128, 96)];

/// Numbers of a step's rows: prompts that begin and go on, at edges of chunks, next to decoding rows, short prompts,
/// sequences without rows, and padding.
fn steps() -> Vec<(Vec<Part>, usize)> {
    let alone = [64, 65, 127, 128, 129, 130, 1000].map(|rows| (vec![(rows, rows % 2 == 0, 2)], 0));
    let mut steps = alone.to_vec();
    steps.extend([
        (vec![(1, false, 3), (1, false, 0), (63, true, 1), (64, false, 6), (200, true, 2), (0, true, 4)], 9),
        (vec![(1, true, 5), (130, false, 4), (63, false, 3), (66, true, 0), (64, true, 1)], 64),
        // Nothing is in chunks.
        (vec![(63, true, 1), (1, false, 2)], 1),
        (vec![], 70),
    ]);
    steps
}

/// How the inputs of a test are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gates {
    /// Any.
    Usual,
    /// Decays near 1 and all of each row is written: errors stay in the state.
    Kept,
    /// Decays of almost 0 and of almost 1, and rows that are written in full and not at all.
    Extreme,
}

/// Random inputs of a model in bf16.
fn inputs(rng: &mut Rng, heads: DeltaHeads, rows: usize, gates: Gates) -> Inputs {
    let inputs = Inputs::new(rng, heads, rows);
    let mut projected = inputs.projected.view().to_f32_vec().unwrap();
    let first = heads.projected() - 2 * heads.value_heads;
    for row in projected.chunks_exact_mut(heads.projected()) {
        let (betas, decays) = row[first..].split_at_mut(heads.value_heads);
        for (b, a) in betas.iter_mut().zip(decays) {
            (*b, *a) = match gates {
                Gates::Usual => (*b, *a),
                Gates::Kept => (4.0 + 2.0 * *b, 2.0 * *a - 7.0),
                Gates::Extreme => (30.0 * *b, [-40.0, -8.0, 1.0, 1000.0][rng.below(4)]),
            };
        }
    }
    let projected = Buffer::from_vec(projected, &[rows, heads.projected()]).unwrap();
    Inputs { projected, dtype: DType::BF16, ..inputs }
}

/// Keys and queries whose unit vectors bf16 has: 4, 16 or 64 dimensions of one magnitude, the others 0.
fn with_exact_units(rng: &mut Rng, inputs: Inputs) -> Inputs {
    let heads = inputs.heads;
    let mut mixed = inputs.mixed.view().to_f32_vec().unwrap();
    for row in mixed.chunks_exact_mut(heads.channels()) {
        for unit in row[..2 * heads.key_width()].chunks_exact_mut(heads.key_dim) {
            let count = [4, 16, 64][rng.below(3)];
            let size = [1.0, 3.0, 0.75][rng.below(3)];
            unit.fill(0.0);
            for at in rng.permutation(heads.key_dim).into_iter().take(count) {
                unit[at as usize] = if rng.below(2) == 0 { size } else { -size };
            }
        }
    }
    let dims = inputs.mixed.dims().to_vec();
    Inputs { mixed: Buffer::from_vec(mixed, &dims).unwrap(), ..inputs }
}

/// Compares a step, in chunks on the GPU, with the CPU.
fn compare(
    rng: &mut Rng,
    inputs: &Inputs,
    (parts, padding): &(Vec<Part>, usize),
    what: &str,
    bounds: [f64; 2],
) {
    let rows = Rows::new(parts, *padding);
    let before = states(rng, parts, &state_dims(inputs.heads));
    let op = |p: &mut Place| {
        let mut states = p.put(&before);
        let out = inputs.run(&rows, &mut states, p)?;
        Ok(vec![out, states])
    };
    let what = format!("{:?}, {what}, {parts:?}, {padding}", inputs.heads);
    on_both(op, |c, g| {
        assert_close(&what, &c[0], &g[0], bounds[0]);
        check_states(&what, parts, &before, [&c[1], &g[1]], bounds[1]);
    });
}

fn rows_of((parts, padding): &(Vec<Part>, usize)) -> usize {
    parts.iter().map(|part| part.0).sum::<usize>() + padding
}

#[test]
fn chunks_compute_the_rule_of_rows() {
    let mut rng = Rng::new();
    for heads in small(HEADS, 5000, |heads| heads.key_dim * heads.value_dim) {
        for step in steps() {
            for gates in [Gates::Usual, Gates::Kept, Gates::Extreme] {
                let inputs = inputs(&mut rng, heads, rows_of(&step), gates);
                let inputs = with_exact_units(&mut rng, inputs);
                compare(&mut rng, &inputs, &step, &format!("{gates:?}"), [1e-5, 1e-4]);
            }
        }
    }
}

/// Keys and queries are rounded to bf16, which the state shows.
#[test]
fn chunks_round_keys_and_queries_alone() {
    let mut rng = Rng::new();
    for heads in small(HEADS, 5000, |heads| heads.key_dim * heads.value_dim) {
        for step in steps() {
            for gates in [Gates::Usual, Gates::Kept, Gates::Extreme] {
                let inputs = inputs(&mut rng, heads, rows_of(&step), gates);
                compare(&mut rng, &inputs, &step, &format!("{gates:?}"), [2e-3, 2.5e-2]);
            }
        }
    }
}

/// A sequence whose state does not exist reads and writes nothing, however long it is.
#[test]
fn prompts_without_a_state_are_zeros() {
    let mut rng = Rng::new();
    let heads = HEADS[1];
    let parts = [(130, true, 2), (200, false, u32::MAX), (64, false, 5), (70, true, 7)];
    let rows = Rows::new(&parts, 3);
    let inputs = inputs(&mut rng, heads, rows.count, Gates::Usual);
    let mut p = Place::new(cuda());
    let kept = [parts[0], parts[2]];
    let before = states(&mut rng, &kept, &state_dims(heads));
    let mut after = p.put(&before);
    let out = inputs.run(&rows, &mut after, &mut p).unwrap().host(&p);
    let is_zero =
        |first, count| cut(&out, first, count).view().to_f32_vec().unwrap().iter().all(|x| *x == 0.0);
    assert!(is_zero(130, 200) && is_zero(394, 73) && !is_zero(0, 64) && !is_zero(330, 64));
    let after = after.host(&p);
    for number in [0, 1, 3, 4, 6] {
        assert_same("another state", &cut(&before, number, 1), &cut(&after, number, 1));
    }
}

/// A prompt that is cut at multiples of 64 rows has the bits of the uncut prompt, whatever other sequences are in the
/// step. The uncut prompt has more chunks than the memory between the two launches can hold at a time.
#[test]
fn prompts_cut_at_chunks_have_the_bits_of_the_whole() {
    let mut rng = Rng::new();
    let (heads, all) = if tiny() { (heads(1, 1, 128, 32), 256) } else { (heads(64, 64, 128, 32), 4100) };
    let inputs = inputs(&mut rng, heads, all, Gates::Kept);
    let mut p = Place::new(cuda());
    let log = LaunchLog::default();
    p.ex = p.ex.clone().with_launch_log(Some(log.clone()));
    let begins = [(1, true, 0)];
    let before = states(&mut rng, &begins, &state_dims(heads));
    let mut whole_state = p.put(&before);
    let whole = inputs.run(&Rows::new(&[(all, true, 0)], 0), &mut whole_state, &mut p).unwrap().host(&p);
    assert_eq!(log.take()[0].kernel, "gated_delta_chunks");
    let mut state = p.put(&before);
    let mut first = 0;
    for rows in [64, 128, if tiny() { 64 } else { 1984 }, usize::MAX] {
        let rows = rows.min(all - first);
        let part = inputs.narrow(first, rows);
        let out = part.run(&Rows::new(&[(rows, first == 0, 0)], 0), &mut state, &mut p).unwrap();
        assert_same(&format!("rows from {first}"), &cut(&whole, first, rows), &out.host(&p));
        first += rows;
    }
    assert_same("the state", &cut(&whole_state.host(&p), 0, 1), &cut(&state.host(&p), 0, 1));
}
