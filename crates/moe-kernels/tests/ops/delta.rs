//! Linear attention by the gated delta rule against its definition in f64, and in parts against itself as a whole.

use candle_core::{DType, Result};
use half::bf16;
use moe_kernels::{
    CausalConv, CpuIsa, DeltaHeads, Exec, Float, GatedDelta, GatedRmsNorm, StateArrays, StateRows, View,
    ViewMut, causal_conv_into, copy_states_into, gated_delta_into, gated_rms_norm_into,
};

use crate::common::{bits, data, exec, isas, view, wide};

/// Columns of a state that are more than one task, and no multiple of a vector.
const HEADS: DeltaHeads = DeltaHeads { key_heads: 2, value_heads: 6, key_dim: 9, value_dim: 70 };
const WIDTH: usize = 4;
const STATES: usize = 5;
const EPS: f32 = 1e-6;

/// What a layer has of weights.
struct Layer {
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    fn new() -> Self {
        let shifted = |n, seed, by: f32| data::<f32>(n, seed).iter().map(|x| x + by).collect();
        Self {
            conv: data(WIDTH * HEADS.channels(), 1),
            a_log: shifted(HEADS.value_heads, 2, -2.0),
            dt_bias: shifted(HEADS.value_heads, 3, 0.5),
            norm: shifted(HEADS.value_dim, 4, 1.0),
        }
    }
}

/// The input products of a sequence.
fn projected(rows: usize, seed: u64) -> Vec<f32> {
    data::<f32>(rows * HEADS.projected(), seed).iter().map(|x| 2.0 * x).collect()
}

/// The states of a layer, full of what must not be read.
struct States {
    conv: Vec<f32>,
    delta: Vec<f32>,
}

impl States {
    fn poisoned() -> Self {
        let delta = HEADS.value_heads * HEADS.key_dim * HEADS.value_dim;
        Self {
            conv: vec![f32::NAN; STATES * (WIDTH - 1) * HEADS.channels()],
            delta: vec![f32::NAN; STATES * delta],
        }
    }
}

/// Some rows of a sequence: their input products, the position of the first, the number of the state.
struct Part<'a> {
    projected: &'a [f32],
    start: usize,
    state: u32,
}

/// A step of some sequences and `padding` rows after them; the results.
fn step<T: Float>(
    layer: &Layer,
    parts: &[Part],
    padding: usize,
    states: &mut States,
    ex: &mut Exec,
) -> Result<Vec<T>> {
    let mut rows = parts.iter().flat_map(|part| part.projected).copied().collect::<Vec<f32>>();
    rows.extend(projected(padding, 99));
    let t = rows.len() / HEADS.projected();
    let mut starts = vec![0u32];
    let mut positions = Vec::new();
    let mut numbers = Vec::new();
    for part in parts {
        let count = part.projected.len() / HEADS.projected();
        positions.extend((part.start..part.start + count).map(|position| position as u32));
        starts.push(positions.len() as u32);
        numbers.push(part.state);
    }
    positions.resize(t, 0);
    let rows_of = StateRows {
        query_start_loc: view(&starts, &[parts.len() + 1]),
        positions: view(&positions, &[t]),
        states: view(&numbers, &[parts.len()]),
    };
    let projected = view(&rows, &[t, HEADS.projected()]);
    let mut mixed = vec![77f32; t * HEADS.channels()];
    let weight = view(&layer.conv, &[WIDTH, HEADS.channels()]);
    let conv = CausalConv { projected, weight, rows: rows_of };
    let conv_states = ViewMut::new(&mut states.conv, &[STATES, WIDTH - 1, HEADS.channels()])?;
    causal_conv_into(&conv, conv_states, ViewMut::new(&mut mixed, &[t, HEADS.channels()])?, ex)?;
    let mut read = vec![77f32; t * HEADS.value_width()];
    let delta = GatedDelta {
        heads: HEADS,
        mixed: view(&mixed, &[t, HEADS.channels()]),
        projected,
        a_log: view(&layer.a_log, &[HEADS.value_heads]),
        dt_bias: view(&layer.dt_bias, &[HEADS.value_heads]),
        rows: rows_of,
        prompt_rows: t,
        dtype: DType::F32,
    };
    let dims = [STATES, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim];
    let delta_states = ViewMut::new(&mut states.delta, &dims)?;
    gated_delta_into(&delta, delta_states, ViewMut::new(&mut read, &[t, HEADS.value_width()])?, ex)?;
    let mut out = vec![T::narrow(77.0); t * HEADS.value_width()];
    let x = view(&read, &[t, HEADS.value_width()]);
    let weight = view(&layer.norm, &[HEADS.value_dim]);
    let norm = GatedRmsNorm { heads: HEADS, x, projected, weight, eps: EPS };
    gated_rms_norm_into(&norm, ViewMut::new(&mut out, &[t, HEADS.value_width()])?, ex)?;
    Ok(out)
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The whole layer for one sequence, in f64, position by position.
fn defined(layer: &Layer, rows: &[f32]) -> Vec<f64> {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = HEADS;
    let rows: Vec<Vec<f64>> = rows.chunks(HEADS.projected()).map(wide).collect();
    let channels = HEADS.channels();
    let key_width = HEADS.key_width();
    let mut states = vec![vec![vec![0f64; value_dim]; key_dim]; value_heads];
    let mut out = Vec::new();
    for t in 0..rows.len() {
        let mixed: Vec<f64> = (0..channels)
            .map(|c| {
                let tap = |back: usize| t.checked_sub(back).map_or(0.0, |row| rows[row][c]);
                silu((0..WIDTH).map(|j| layer.conv[j * channels + c] as f64 * tap(WIDTH - 1 - j)).sum())
            })
            .collect();
        let gates = &rows[t][channels + HEADS.value_width()..];
        for head in 0..value_heads {
            let unit = |start: usize| {
                let x = &mixed[start + head / (value_heads / key_heads) * key_dim..][..key_dim];
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(move |x| x / length).collect::<Vec<f64>>()
            };
            let q = unit(0);
            let k = unit(key_width);
            let v = &mixed[2 * key_width + head * value_dim..][..value_dim];
            let beta = 1.0 / (1.0 + (-gates[head]).exp());
            let a = gates[value_heads + head] + layer.dt_bias[head] as f64;
            let decay = (-(layer.a_log[head] as f64).exp() * a.exp().ln_1p()).exp();
            let state = &mut states[head];
            state.iter_mut().flatten().for_each(|s| *s *= decay);
            let read = |state: &[Vec<f64>], x: &[f64], j: usize| -> f64 {
                state.iter().zip(x).map(|(row, x)| row[j] * x).sum()
            };
            let delta: Vec<f64> = (0..value_dim).map(|j| beta * (v[j] - read(state, &k, j))).collect();
            for (row, k) in state.iter_mut().zip(&k) {
                row.iter_mut().zip(&delta).for_each(|(s, delta)| *s += k * delta);
            }
            let scale = 1.0 / (key_dim as f64).sqrt();
            let o: Vec<f64> = (0..value_dim).map(|j| scale * read(state, &q, j)).collect();
            let mean = o.iter().map(|o| o * o).sum::<f64>() / value_dim as f64;
            let rms = (mean + EPS as f64).sqrt();
            let z = &rows[t][channels + head * value_dim..][..value_dim];
            out.extend((0..value_dim).map(|j| o[j] / rms * layer.norm[j] as f64 * silu(z[j])));
        }
    }
    out
}

#[test]
fn a_sequence_gives_what_the_definition_says() -> Result<()> {
    let layer = Layer::new();
    let rows = projected(70, 5);
    let want = defined(&layer, &rows);
    for isa in isas() {
        let ex = &mut exec(isa, 2);
        let part = [Part { projected: &rows, start: 0, state: 3 }];
        let got = step::<f32>(&layer, &part, 0, &mut States::poisoned(), ex)?;
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((*got as f64 - want).abs() < 2e-5 * want.abs().max(1.0), "{isa:?} {at}: {got} {want}");
        }
        let got = step::<bf16>(&layer, &part, 0, &mut States::poisoned(), ex)?;
        for (got, want) in got.iter().zip(&want) {
            assert!((got.to_f64() - want).abs() < f64::powi(2.0, -8) * want.abs().max(0.1), "{got} {want}");
        }
    }
    Ok(())
}

/// Rows of each part of a sequence, for a few ways to cut 70 of them.
fn cuts() -> Vec<Vec<usize>> {
    vec![vec![1; 70], vec![63, 1, 1, 5], vec![64, 6], vec![65, 5], vec![2, 3, 1, 30, 34], vec![70]]
}

#[test]
fn parts_threads_batches_and_padding_change_no_bit() -> Result<()> {
    let layer = Layer::new();
    let rows = projected(70, 5);
    let other = projected(70, 6);
    let width = HEADS.projected();
    for isa in isas() {
        let whole = Part { projected: &rows, start: 0, state: 0 };
        let want = step::<f32>(&layer, &[whole], 0, &mut States::poisoned(), &mut exec(isa, 1))?;
        let want = bits(&want);
        for (number, cut) in cuts().into_iter().enumerate() {
            let ex = &mut exec(isa, 1 + number % 3);
            let mut states = States::poisoned();
            let mut got = Vec::new();
            let mut start = 0;
            for len in cut {
                let rows = &rows[start * width..][..len * width];
                // Another sequence, which begins anew in each step where the last one left its state.
                let other_part = Part { projected: &other[..(1 + number) * width], start: 0, state: 4 };
                let own = Part { projected: rows, start, state: 2 };
                let out = match number % 2 {
                    0 => step::<f32>(&layer, &[own, other_part], number, &mut states, ex)?,
                    _ => step::<f32>(&layer, &[other_part, own], number, &mut states, ex)?,
                };
                let first = if number % 2 == 0 { 0 } else { 1 + number };
                got.extend_from_slice(&out[first * HEADS.value_width()..][..len * HEADS.value_width()]);
                start += len;
            }
            assert_eq!(bits(&got), want, "{isa:?}, way {number}");
        }
    }
    Ok(())
}

#[test]
fn paths_that_fuse_multiply_and_add_agree() -> Result<()> {
    let layer = Layer::new();
    let rows = projected(20, 7);
    let part = [Part { projected: &rows, start: 0, state: 1 }];
    let fused = isas().filter(|isa| *isa != CpuIsa::Scalar);
    let all: Vec<Vec<u32>> = fused
        .map(|isa| step::<f32>(&layer, &part, 0, &mut States::poisoned(), &mut exec(isa, 2)))
        .map(|out| out.map(|out| bits(&out)))
        .collect::<Result<_>>()?;
    assert!(all.windows(2).all(|two| two[0] == two[1]));
    Ok(())
}

#[test]
fn rows_without_a_sequence_and_no_rows_at_all() -> Result<()> {
    let layer = Layer::new();
    let rows = projected(2, 8);
    let part = [Part { projected: &rows, start: 0, state: 1 }];
    let out = step::<f32>(&layer, &part, 3, &mut States::poisoned(), &mut Exec::cpu())?;
    assert!(out[2 * HEADS.value_width()..].iter().all(|x| *x == 0.0), "padding");
    assert!(out.iter().all(|x| x.is_finite()));
    assert!(step::<f32>(&layer, &[], 0, &mut States::poisoned(), &mut Exec::cpu())?.is_empty());
    let none = [Part { projected: &[], start: 7, state: 1 }];
    assert!(step::<f32>(&layer, &none, 0, &mut States::poisoned(), &mut Exec::cpu())?.is_empty());
    Ok(())
}

#[test]
fn states_that_are_shared_or_missing_are_refused() {
    let layer = Layer::new();
    let rows = projected(1, 9);
    let part = |state| Part { projected: &rows, start: 0, state };
    let refused = |parts: &[Part]| {
        let states = &mut States::poisoned();
        step::<f32>(&layer, parts, 0, states, &mut Exec::cpu()).unwrap_err().to_string()
    };
    let e = refused(&[part(1), part(1)]);
    assert!(e.contains("sequences 0 and 1 have the same state 1"), "{e}");
    let e = refused(&[part(STATES as u32)]);
    assert!(e.contains("has state 5, expected one below 5"), "{e}");
    let narrow = View::new(&rows[1..], &[1, rows.len() - 1]).unwrap();
    let args = GatedRmsNorm {
        heads: HEADS,
        x: view(&layer.conv[..HEADS.value_width()], &[1, HEADS.value_width()]),
        projected: narrow,
        weight: view(&layer.norm, &[HEADS.value_dim]),
        eps: EPS,
    };
    let mut out = vec![0f32; HEADS.value_width()];
    let out = ViewMut::new(&mut out, &[1, HEADS.value_width()]).unwrap();
    let e = gated_rms_norm_into(&args, out, &mut Exec::cpu()).unwrap_err().to_string();
    assert!(e.contains("expected projected with dims"), "{e}");
}

#[test]
fn states_of_all_arrays_are_copied_to_their_places() -> Result<()> {
    let ex = Exec::cpu();
    let wide: Vec<f32> = (0..12).map(|x| x as f32).collect();
    let narrow = [70f32, 71.0, 72.0];
    let mut to_wide = [9f32; 8];
    let mut to_narrow = [9f32; 2];
    let mut copy = |rows: &[[u32; 2]], row: &[usize]| {
        let arrays = vec![
            StateArrays {
                from: view(&wide, &[3, 2, 2]),
                to: ViewMut::new(&mut to_wide, &[2, row[0], row[1]])?,
            },
            StateArrays { from: view(&narrow, &[3, 1]), to: ViewMut::new(&mut to_narrow, &[2, 1])? },
        ];
        copy_states_into(arrays, rows, &ex)
    };
    copy(&[[2, 0]], &[2, 2])?;
    copy(&[], &[2, 2])?;
    for outside in [[3, 0], [0, 2], [u32::MAX, 0]] {
        let error = copy(&[outside], &[2, 2]).unwrap_err().to_string();
        assert!(error.contains("but the arrays have 3 and 2"), "{error}");
    }
    let error = copy(&[[0, 0]], &[4, 1]).unwrap_err().to_string();
    assert!(
        error.contains("expected arrays of the same rows, got [3, 2, 2] of f32 and [2, 4, 1]"),
        "{error}"
    );
    assert_eq!(to_wide, [8.0, 9.0, 10.0, 11.0, 9.0, 9.0, 9.0, 9.0]);
    assert_eq!(to_narrow, [72.0, 9.0]);
    Ok(())
}
