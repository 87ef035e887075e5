//! The ops of linear attention by the gated delta rule, and the output gates of models that have it.

use candle_core::{DType, Result};
use moe_kernels::{
    Buffer, CausalConv, DeltaHeads, GatedDelta, GatedRmsNorm, StateArrays, StateRows, causal_conv_into,
    copy_states_into, gated_delta_into, gated_rms_norm_into, sigmoid_gate_into,
};

use crate::common::*;

/// States of a layer.
pub const STATES: usize = 7;
/// Positions at which a continued sequence may be.
const SEEN: u32 = 9;

pub const fn heads(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaHeads {
    DeltaHeads { key_heads, value_heads, key_dim, value_dim }
}

/// Sizes of one element, odd ones, the published ones, and key dimensions that no registers hold.
const HEADS: [DeltaHeads; 10] = [
    heads(1, 1, 1, 1),
    heads(2, 6, 9, 70),
    heads(1, 2, 64, 32),
    heads(2, 4, 128, 128),
    heads(1, 1, 33, 5),
    heads(3, 3, 256, 40),
    heads(2, 2, 100, 4),
    heads(1, 3, 129, 36),
    heads(1, 2, 300, 17),
    heads(1, 1, 257, 260),
];

/// A sequence of a step: its rows, whether it begins with them, and its state.
pub type Part = (usize, bool, u32);

/// Steps of no sequence, of decoding sequences, of unequal prompts, and of both; the second number is rows of padding.
fn steps() -> Vec<(Vec<Part>, usize)> {
    vec![
        (vec![], 0),
        (vec![], 5),
        (vec![(1, false, 3)], 0),
        (vec![(1, false, 6), (1, true, 0), (1, false, 2)], 3),
        // A sequence of padding has no rows, and the number of its state is not a state.
        (vec![(1, false, 1), (1, false, 4), (0, false, u32::MAX), (0, false, u32::MAX)], 2),
        (vec![(17, true, 5)], 0),
        (vec![(3, true, 2), (40, false, 0), (1, true, 6), (0, true, 1), (2, false, 1), (16, true, 4)], 20),
        (vec![(1, false, 0), (130, true, 3), (7, false, 5)], 1),
    ]
}

/// The arrays that say which rows belong to which sequence, in host memory.
pub struct Rows {
    pub count: usize,
    starts: Buffer,
    positions: Buffer,
    numbers: Buffer,
}

/// The same arrays where an op runs.
pub struct RowsAt([Placed; 3]);

impl Rows {
    pub fn new(parts: &[Part], padding: usize) -> Self {
        let mut starts = vec![0];
        let mut positions = Vec::new();
        for &(rows, begins, _) in parts {
            let first = if begins { 0 } else { SEEN };
            positions.extend(first..first + rows as u32);
            starts.push(positions.len() as u32);
        }
        let count = positions.len() + padding;
        positions.resize(count, 0);
        Self {
            count,
            starts: words(starts, &[parts.len() + 1]),
            positions: words(positions, &[count]),
            numbers: words(parts.iter().map(|part| part.2).collect(), &[parts.len()]),
        }
    }

    fn put(&self, p: &Place) -> RowsAt {
        RowsAt([&self.starts, &self.positions, &self.numbers].map(|array| p.put(array)))
    }
}

impl RowsAt {
    fn views(&self) -> StateRows<'_> {
        let [starts, positions, numbers] = &self.0;
        StateRows { query_start_loc: starts.view(), positions: positions.view(), states: numbers.view() }
    }
}

/// Random states [`STATES`, ..]. The states of sequences that begin are NaN.
pub fn states(rng: &mut Rng, parts: &[Part], dims: &[usize]) -> Buffer {
    let all: Vec<usize> = [STATES].iter().chain(dims).copied().collect();
    let len: usize = dims.iter().product();
    let mut values = rng.floats(DType::F32, &all).view().to_f32_vec().unwrap();
    for &(_, _, number) in parts.iter().filter(|part| part.0 > 0 && part.1) {
        values[number as usize * len..][..len].fill(f32::NAN);
    }
    Buffer::from_vec(values, &all).unwrap()
}

/// Fails unless the states of the step's sequences agree, and all others have their bits of before the step.
pub fn check_states(what: &str, parts: &[Part], before: &Buffer, [cpu, gpu]: [&Buffer; 2], bound: f64) {
    for number in 0..STATES {
        let state = |all: &Buffer| cut(all, number, 1);
        if parts.iter().any(|part| part.0 > 0 && part.2 as usize == number) {
            assert!(state(cpu).view().to_f32_vec().unwrap().iter().all(|x| x.is_finite()), "{what}");
            assert_close(what, &state(cpu), &state(gpu), bound);
        } else {
            assert_same(what, &state(before), &state(gpu));
        }
    }
}

#[test]
fn convolutions_agree() {
    let mut rng = Rng::new();
    for width in 1..=8 {
        for (channels, more) in small([(1, 0), (12, 4), (37, 3), (512, 0), (700, 12)], 40, |case| case.0) {
            for (parts, padding) in steps() {
                let rows = Rows::new(&parts, padding);
                let projected = rng.floats(DType::F32, &[rows.count, channels + more]);
                let weight = rng.floats(DType::F32, &[width, channels]);
                let before = states(&mut rng, &parts, &[width - 1, channels]);
                let op = |p: &mut Place| {
                    let at = rows.put(p);
                    let projected = p.put(&projected);
                    let weight = p.put(&weight);
                    let mut states = p.put(&before);
                    let mut out = p.out(DType::F32, &[rows.count, channels]);
                    let args =
                        CausalConv { projected: projected.view(), weight: weight.view(), rows: at.views() };
                    causal_conv_into(&args, states.view_mut(), out.view_mut(), &mut p.ex)?;
                    Ok(vec![out, states])
                };
                let what = format!("{channels} channels, width {width}, {parts:?}, {padding}");
                on_both(op, |c, g| {
                    assert_close(&what, &c[0], &g[0], 4e-6);
                    check_states(&what, &parts, &before, [&c[1], &g[1]], 0.0);
                });
            }
        }
    }
}

/// The inputs of the rule, in a model of some dtype.
pub struct Inputs {
    pub heads: DeltaHeads,
    pub mixed: Buffer,
    pub projected: Buffer,
    pub a_log: Buffer,
    pub dt_bias: Buffer,
    pub dtype: DType,
}

impl Inputs {
    pub fn new(rng: &mut Rng, heads: DeltaHeads, rows: usize) -> Self {
        Self {
            heads,
            mixed: rng.floats(DType::F32, &[rows, heads.channels()]),
            projected: rng.floats(DType::F32, &[rows, heads.projected()]),
            a_log: rng.floats(DType::F32, &[heads.value_heads]),
            dt_bias: rng.floats(DType::F32, &[heads.value_heads]),
            dtype: DType::F32,
        }
    }

    /// Some rows of them.
    pub fn narrow(&self, first: usize, count: usize) -> Self {
        let same = |data: &Buffer| cut(data, 0, data.dims()[0]);
        Self {
            heads: self.heads,
            mixed: cut(&self.mixed, first, count),
            projected: cut(&self.projected, first, count),
            a_log: same(&self.a_log),
            dt_bias: same(&self.dt_bias),
            dtype: self.dtype,
        }
    }

    /// The results of the rule; `states` are advanced.
    pub fn run(&self, rows: &Rows, states: &mut Placed, p: &mut Place) -> Result<Placed> {
        let at = rows.put(p);
        let [mixed, projected, a_log, dt_bias] =
            [&self.mixed, &self.projected, &self.a_log, &self.dt_bias].map(|data| p.put(data));
        let mut out = p.out(DType::F32, &[rows.count, self.heads.value_width()]);
        let args = GatedDelta {
            heads: self.heads,
            mixed: mixed.view(),
            projected: projected.view(),
            a_log: a_log.view(),
            dt_bias: dt_bias.view(),
            rows: at.views(),
            prompt_rows: rows.count,
            dtype: self.dtype,
        };
        gated_delta_into(&args, states.view_mut(), out.view_mut(), &mut p.ex)?;
        Ok(out)
    }
}

pub fn state_dims(heads: DeltaHeads) -> [usize; 3] {
    [heads.value_heads, heads.key_dim, heads.value_dim]
}

#[test]
fn gated_delta_rules_agree() {
    let mut rng = Rng::new();
    for heads in small(HEADS, 5000, |heads| heads.key_dim * heads.value_dim) {
        for (parts, padding) in steps() {
            let rows = Rows::new(&parts, padding);
            let inputs = Inputs::new(&mut rng, heads, rows.count);
            let before = states(&mut rng, &parts, &state_dims(heads));
            let op = |p: &mut Place| {
                let mut states = p.put(&before);
                let out = inputs.run(&rows, &mut states, p)?;
                Ok(vec![out, states])
            };
            let what = format!("{heads:?}, {parts:?}, {padding}");
            on_both(op, |c, g| {
                assert_close(&what, &c[0], &g[0], 2e-5);
                check_states(&what, &parts, &before, [&c[1], &g[1]], 2e-5);
            });
        }
    }
}

/// Lengths of pieces that end and begin within tiles of the convolution, and at their edges.
const PIECES: [usize; 9] = [1, 1, 2, 5, 23, 16, 1, 64, 17];

/// A sequence in pieces, each next to another sequence, has the bits of the whole sequence alone.
#[test]
fn a_prompt_in_pieces_has_the_bits_of_the_whole() {
    let mut rng = Rng::new();
    let all: usize = PIECES.iter().sum();
    let heads = heads(1, 2, 128, 96);
    let channels = heads.channels();
    let mut p = Place::new(cuda());
    for width in [1, 2, 4, 8] {
        let inputs = Inputs::new(&mut rng, heads, all);
        let other = Inputs::new(&mut rng, heads, 3);
        let weight = p.put(&rng.floats(DType::F32, &[width, channels]));
        let mut layer = |parts: &[&Inputs], rows: &Rows, states: &mut [Placed; 2]| {
            let joined = |data: fn(&Inputs) -> &Buffer, columns: usize| {
                let values: Vec<f32> =
                    parts.iter().flat_map(|part| data(part).view().to_f32_vec().unwrap()).collect();
                Buffer::from_vec(values, &[rows.count, columns]).unwrap()
            };
            let projected = joined(|inputs| &inputs.projected, heads.projected());
            let at = rows.put(&p);
            let x = p.put(&projected);
            let mut mixed = p.out(DType::F32, &[rows.count, channels]);
            let conv = CausalConv { projected: x.view(), weight: weight.view(), rows: at.views() };
            causal_conv_into(&conv, states[0].view_mut(), mixed.view_mut(), &mut p.ex).unwrap();
            let rest = Inputs { mixed: mixed.host(&p), projected, ..inputs.narrow(0, 1) };
            let out = rest.run(rows, &mut states[1], &mut p).unwrap();
            out.host(&p)
        };
        let place = Place::new(cuda());
        let fresh = |rng: &mut Rng| {
            let begins = [(1, true, 0)];
            [
                place.put(&states(rng, &begins, &[width - 1, channels])),
                place.put(&states(rng, &begins, &state_dims(heads))),
            ]
        };
        let mut whole_states = fresh(&mut rng);
        let whole = layer(&[&inputs], &Rows::new(&[(all, true, 0)], 0), &mut whole_states);
        let mut states = fresh(&mut rng);
        let mut first = 0;
        for (number, rows) in PIECES.into_iter().enumerate() {
            let piece = inputs.narrow(first, rows);
            // The other sequence has another state in each step, and is after the piece or before it.
            let state = 1 + number as u32 % 6;
            let own = (rows, first == 0, 0);
            let out = match number % 2 {
                0 => layer(&[&piece, &other], &Rows::new(&[own, (3, true, state)], 0), &mut states),
                _ => layer(&[&other, &piece], &Rows::new(&[(3, true, state), own], 0), &mut states),
            };
            let out = cut(&out, if number % 2 == 0 { 0 } else { 3 }, rows);
            let what = format!("width {width}, rows {first} to {}", first + rows);
            assert_same(&what, &cut(&whole, first, rows), &out);
            first += rows;
        }
        for (whole, pieces) in whole_states.iter().zip(&states) {
            let state = |placed: &Placed| cut(&placed.host(&place), 0, 1);
            assert_same(&format!("width {width}: the state"), &state(whole), &state(pieces));
        }
    }
}

#[test]
fn gated_norms_agree() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for heads in small(HEADS, 5000, |heads| heads.key_dim * heads.value_dim) {
            for rows in [0, 1, 3, 70] {
                let x = rng.floats(DType::F32, &[rows, heads.value_width()]);
                let projected = rng.floats(DType::F32, &[rows, heads.projected()]);
                let weight = rng.floats(DType::F32, &[heads.value_dim]);
                let op = |p: &mut Place| {
                    let x = p.put(&x);
                    let projected = p.put(&projected);
                    let weight = p.put(&weight);
                    let mut out = p.out(dtype, &[rows, heads.value_width()]);
                    let args = GatedRmsNorm {
                        heads,
                        x: x.view(),
                        projected: projected.view(),
                        weight: weight.view(),
                        eps: 1e-6,
                    };
                    gated_rms_norm_into(&args, out.view_mut(), &mut p.ex)?;
                    Ok(vec![out])
                };
                on_both(op, |c, g| assert_close(&format!("{heads:?}, {rows} rows"), &c[0], &g[0], 4e-6));
            }
        }
    }
}

#[test]
fn sigmoid_gates_agree() {
    let mut rng = Rng::new();
    for dtype in FLOATS {
        for dims in [[0, 5], [1, 1], [3, 7], [130, 257]] {
            let gate = rng.floats(DType::F32, &dims);
            let x = rng.floats(dtype, &dims);
            let op = |p: &mut Place| {
                let gate = p.put(&gate);
                let mut x = p.put(&x);
                sigmoid_gate_into(gate.view(), x.view_mut(), &mut p.ex)?;
                Ok(vec![x])
            };
            on_both(op, |c, g| assert_close("sigmoid_gate", &c[0], &g[0], 1e-6));
        }
    }
}

/// One launch copies states of all layers; more arrays or copies than its parameters hold take several.
#[test]
fn copied_states_are_those_of_the_cpu() {
    let mut rng = Rng::new();
    for (arrays, copies, columns) in
        [(1, 1, 1), (4, 3, 4096), (60, 1, 9_000), (97, 2, 12), (3, 98, 7), (2, 0, 8)]
    {
        // The arrays of a layer have rows of different sizes.
        let dims = |array: usize, states: usize| [states, 1 + array % 3, columns];
        let states = |rng: &mut Rng| -> Vec<Buffer> {
            (0..arrays).map(|array| rng.floats(DType::F32, &dims(array, 100))).collect()
        };
        let before = states(&mut rng);
        let kept = states(&mut rng);
        let from = rng.permutation(100);
        let to = rng.permutation(100);
        let rows: Vec<[u32; 2]> =
            from.into_iter().zip(to).map(|(from, to)| [from, to]).take(copies).collect();
        let op = |p: &mut Place| {
            let from: Vec<Placed> = kept.iter().map(|array| p.put(array)).collect();
            let mut to: Vec<Placed> = before.iter().map(|array| p.put(array)).collect();
            let all = from.iter().zip(&mut to);
            let all = all.map(|(from, to)| StateArrays { from: from.view(), to: to.view_mut() }).collect();
            copy_states_into(all, &rows, &p.ex)?;
            Ok(to)
        };
        let what = format!("{arrays} arrays, {copies} copies of {columns}");
        on_both(op, |c, g| c.iter().zip(g).for_each(|(c, g)| assert_same(&what, c, g)));
    }
}
