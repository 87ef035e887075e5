//! Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, "Gated Delta Networks: Improving Mamba2
//! with Delta Rule").
//!
//! A sequence has two states that do not grow: the last rows before the convolution, and for each value head a matrix
//! S [Dk, Dv], from which a query reads and into which each row writes.

use std::cell::RefCell;

use candle_core::{DType, Result, bail};

use super::state_rows::{StateSequence, check_sequences};
use crate::arguments::{expect, expect_dims, expect_dtype, expect_matrix};
use crate::cpu::delta::{ConvRow, DeltaRow, GatedNorm, MAX_TAPS, STATE_COLUMNS, UnitHeads};
use crate::cpu::dispatch;
use crate::cpu::parallel::{for_each, for_each_item, rows_per_task};
use crate::cpu::shared::Shared;
use crate::cpu::simd::Lanes;
use crate::exec::Exec;
use crate::operands::{CausalConv, DeltaHeads, GatedDelta, GatedRmsNorm};
use crate::view::ViewMut;
use crate::with_float;

/// Channels of the convolution that are one task.
const CONV_COLUMNS: usize = 256;
/// Added to the sum of squares of a head of q or k before its root is taken.
const UNIT_EPS: f32 = 1e-6;

/// `out[t, c] = SiLU(sum over j of weight[j, c] · x[t - W + 1 + j, c])`: a causal convolution of each channel over the
/// last W rows of its sequence, where rows before its first one are 0. The last W - 1 rows before the convolution are
/// its state. Rows that belong to no sequence (padding) are zeroed. Arithmetic is f32; W is 1 to 8.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`CausalConv`] |
/// | `states` | [N, W - 1, C] f32, updated |
/// | `out` | [T, C] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; on the CPU also row ranges that do not ascend, and a sequence whose state does not
/// exist or is another one's, too.
pub fn causal_conv_into(
    args: &CausalConv,
    mut states: ViewMut,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "causal_conv";
    let (width, channels) = expect_matrix(op, "weight", &args.weight)?;
    let (t, projected) = expect_matrix(op, "projected", &args.projected)?;
    if !(1..=MAX_TAPS).contains(&width) || projected < channels {
        bail!(
            "{op}: expected a weight [1 to {MAX_TAPS}, at most {projected} channels], got [{width}, {channels}]"
        )
    }
    expect_dtype(op, "weight", &args.weight, DType::F32)?;
    expect_dtype(op, "projected", &args.projected, DType::F32)?;
    let num_states = states.dims().first().copied().unwrap_or(0);
    expect(op, "states", &states, DType::F32, &[num_states, width - 1, channels])?;
    expect(op, "out", &out, DType::F32, &[t, channels])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        super::state_rows::check_rows(op, &args.rows, t)?;
        ex.launched(|| op);
        return crate::cuda::delta::causal_conv(args, states, out, ex);
    }
    let sequences = check_sequences(op, &args.rows, t, num_states)?;
    ex.launched(|| op);
    zero_padding(&sequences, channels, out.cpu_mut()?);
    let conv = Conv {
        x: args.projected.cpu()?,
        stride: projected,
        weight: args.weight.cpu()?,
        width,
        channels,
        states: Shared::new(states.cpu_mut()?),
        out: Shared::new(out.cpu_mut()?),
    };
    let parts = channels.div_ceil(CONV_COLUMNS);
    for_each(ex, sequences.len() * parts, t * channels * width, |task| {
        conv.run(&sequences[task / parts], task % parts * CONV_COLUMNS, ex);
    });
    Ok(())
}

/// The convolution of a step.
struct Conv<'a> {
    x: &'a [f32],
    stride: usize,
    weight: &'a [f32],
    width: usize,
    channels: usize,
    states: Shared<'a, f32>,
    out: Shared<'a, f32>,
}

impl Conv<'_> {
    /// The rows of a sequence in the channels from `start`.
    fn run(&self, sequence: &StateSequence, start: usize, ex: &Exec) {
        let len = CONV_COLUMNS.min(self.channels - start);
        let kept = self.width - 1;
        let place = |i: usize| (sequence.state * kept + i) * self.channels + start;
        let mut tail: [&mut [f32]; MAX_TAPS] = std::array::from_fn(|i| match i < kept {
            // SAFETY: these channels of the state belong to this task alone, and its rows do not overlap.
            true => unsafe { self.states.range(place(i), len) },
            false => &mut [],
        });
        if sequence.begins {
            tail.iter_mut().for_each(|row| row.fill(0.0));
        }
        let rows = sequence.rows.clone();
        let input = |row: usize| &self.x[row * self.stride + start..][..len];
        let weights: [&[f32]; MAX_TAPS] = std::array::from_fn(|tap| match tap < self.width {
            true => &self.weight[tap * self.channels + start..][..len],
            false => &[],
        });
        for row in rows.clone() {
            // Counted backwards from this row, the rows of this step come first, then the rows of the state.
            let taps: [&[f32]; MAX_TAPS] = std::array::from_fn(|tap| {
                if tap >= self.width {
                    return &[][..];
                }
                let back = kept - tap;
                let ahead = row - rows.start;
                if back <= ahead { input(row - back) } else { &*tail[kept + ahead - back] }
            });
            // SAFETY: each (row, channels) is written by one task.
            let out = unsafe { self.out.range(row * self.channels + start, len) };
            dispatch(ex.isa(), ConvRow { taps, weights, width: self.width, out });
        }
        for i in 0..kept {
            match (rows.end - rows.start + i).checked_sub(kept) {
                Some(ahead) => tail[i].copy_from_slice(input(rows.start + ahead)),
                None => {
                    let (to, from) = tail.split_at_mut(i + rows.len());
                    to[i].copy_from_slice(from[0]);
                }
            }
        }
    }
}

/// The gated delta rule, for each value head h with the key head that it shares, row after row of a sequence:
///
/// ```text
/// q = q / |q| / sqrt(Dk), k = k / |k|                      with 1e-6 under the root of |.|²
/// decay = exp(-exp(a_log[h]) · softplus(a + dt_bias[h])), beta = sigmoid(b)
/// S = decay · S
/// S = S + k ⊗ beta (v - k · S)
/// out = q · S
/// ```
///
/// Rows that belong to no sequence (padding) are zeroed. Arithmetic is f32, but for prompts of models in bf16 on a GPU
/// ([`plan::DeltaForm`](crate::plan::DeltaForm)).
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`GatedDelta`] |
/// | `states` | [N, Hv, Dk, Dv] f32, updated |
/// | `out` | [T, Hv · Dv] f32 |
///
/// # Errors
/// A wrong dtype or wrong dims; key heads that do not divide the value heads; no memory left; on the CPU also row
/// ranges that do not ascend, and a sequence whose state does not exist or is another one's, too.
pub fn gated_delta_into(
    args: &GatedDelta,
    mut states: ViewMut,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let op = "gated_delta";
    let heads = args.heads;
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = heads;
    if key_heads == 0 || !value_heads.is_multiple_of(key_heads) || key_dim == 0 || value_dim == 0 {
        bail!("{op}: expected heads with dimensions, and value heads divisible by key heads, got {heads:?}")
    }
    let t = args.mixed.rows();
    expect(op, "mixed", &args.mixed, DType::F32, &[t, heads.channels()])?;
    expect(op, "projected", &args.projected, DType::F32, &[t, heads.projected()])?;
    expect(op, "a_log", &args.a_log, DType::F32, &[value_heads])?;
    expect(op, "dt_bias", &args.dt_bias, DType::F32, &[value_heads])?;
    let num_states = states.dims().first().copied().unwrap_or(0);
    expect(op, "states", &states, DType::F32, &[num_states, value_heads, key_dim, value_dim])?;
    expect(op, "out", &out, DType::F32, &[t, heads.value_width()])?;
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        super::state_rows::check_rows(op, &args.rows, t)?;
        return crate::cuda::delta::gated_delta(args, states, out, ex);
    }
    let sequences = check_sequences(op, &args.rows, t, num_states)?;
    ex.launched(|| op);
    zero_padding(&sequences, heads.value_width(), out.cpu_mut()?);
    let mut units = ex.scratch(DType::F32, &[t, 2 * heads.key_width()])?;
    unit_heads(args, units.view_mut(), ex)?;
    let mut gates = ex.scratch(DType::F32, &[t, 2 * value_heads])?;
    gate_values(args, gates.view_mut())?;
    let delta = Delta {
        heads,
        units: units.view().cpu()?,
        mixed: args.mixed.cpu()?,
        gates: gates.view().cpu()?,
        states: Shared::new(states.cpu_mut()?),
        out: Shared::new(out.cpu_mut()?),
    };
    let parts = value_dim.div_ceil(STATE_COLUMNS);
    let work = t * heads.value_width() * key_dim;
    for_each(ex, sequences.len() * value_heads * parts, work, |task| {
        let head = task / parts % value_heads;
        delta.run(&sequences[task / parts / value_heads], head, task % parts * STATE_COLUMNS, ex);
    });
    Ok(())
}

/// q and k of length 1, q also over sqrt(Dk): [T, 2 Hk · Dk].
fn unit_heads(args: &GatedDelta, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let mixed = args.mixed.cpu::<f32>()?;
    let dim = args.heads.key_dim;
    let width = args.heads.key_width();
    let channels = args.heads.channels();
    let out = out.cpu_mut::<f32>()?;
    let work = out.len();
    let Some(chunk) = rows_per_task(ex, work, 2 * width) else { return Ok(()) };
    let tasks = out.chunks_mut(chunk).zip(mixed.chunks(chunk / (2 * width) * channels)).collect();
    for_each_item(ex, tasks, work, |(out, rows): (&mut [f32], &[f32])| {
        for (out, row) in out.chunks_exact_mut(2 * width).zip(rows.chunks_exact(channels)) {
            let (q, k) = out.split_at_mut(width);
            let scale = 1.0 / (dim as f32).sqrt();
            dispatch(ex.isa(), UnitHeads { x: &row[..width], dim, eps: UNIT_EPS, scale, out: q });
            let x = &row[width..2 * width];
            dispatch(ex.isa(), UnitHeads { x, dim, eps: UNIT_EPS, scale: 1.0, out: k });
        }
    });
    Ok(())
}

/// Decay and beta of each value head: [T, Hv, 2].
fn gate_values(args: &GatedDelta, mut out: ViewMut) -> Result<()> {
    let heads = args.heads.value_heads;
    let a_log = args.a_log.cpu::<f32>()?;
    let dt_bias = args.dt_bias.cpu::<f32>()?;
    let rows = args.projected.cpu::<f32>()?.chunks_exact(args.heads.projected());
    let out = out.cpu_mut::<f32>()?;
    for (out, row) in out.chunks_exact_mut(2 * heads).zip(rows) {
        let (b, a) = row[args.heads.gates_start()..].split_at(heads);
        for (head, out) in out.chunks_exact_mut(2).enumerate() {
            let step = softplus(a[head] + dt_bias[head]);
            out[0] = (-a_log[head].exp() * step).exp();
            out[1] = 1.0 / (1.0 + (-b[head]).exp());
        }
    }
    Ok(())
}

/// ln(1 + e^x), which is x where the rest is lost in rounding.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

thread_local! {
    /// The columns of the state that this thread works on; kept so that steps do not allocate.
    static STATE: RefCell<Vec<[f32; STATE_COLUMNS]>> = const { RefCell::new(Vec::new()) };
}

/// The recurrence of a step.
struct Delta<'a> {
    heads: DeltaHeads,
    units: &'a [f32],
    mixed: &'a [f32],
    gates: &'a [f32],
    states: Shared<'a, f32>,
    out: Shared<'a, f32>,
}

impl Delta<'_> {
    /// The rows of a sequence in the columns of one value head from `start`.
    fn run(&self, sequence: &StateSequence, head: usize, start: usize, ex: &Exec) {
        let DeltaHeads { value_heads, key_dim, value_dim, .. } = self.heads;
        let columns = STATE_COLUMNS.min(value_dim - start);
        let first = (sequence.state * value_heads + head) * key_dim;
        // SAFETY: these columns of the state belong to this task alone, and one row of them is borrowed at a time.
        let stored = |i: usize| unsafe { self.states.range((first + i) * value_dim + start, columns) };
        STATE.with_borrow_mut(|state| {
            state.clear();
            state.resize(key_dim, [0.0; STATE_COLUMNS]);
            if !sequence.begins {
                for (i, row) in state.iter_mut().enumerate() {
                    row[..columns].copy_from_slice(stored(i));
                }
            }
            for row in sequence.rows.clone() {
                self.row(row, head, start..start + columns, state, ex);
            }
            for (i, row) in state.iter().enumerate() {
                stored(i).copy_from_slice(&row[..columns]);
            }
        });
    }

    fn row(
        &self,
        row: usize,
        head: usize,
        columns: std::ops::Range<usize>,
        state: &mut [[f32; STATE_COLUMNS]],
        ex: &Exec,
    ) {
        let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = self.heads;
        let key_width = self.heads.key_width();
        let key_head = head / (value_heads / key_heads);
        let (q, k) = self.units[row * 2 * key_width..][..2 * key_width].split_at(key_width);
        let v =
            &self.mixed[row * self.heads.channels() + 2 * key_width + head * value_dim..][columns.clone()];
        let gates = &self.gates[(row * value_heads + head) * 2..][..2];
        let at = (row * value_heads + head) * value_dim + columns.start;
        // SAFETY: each (row, head, columns) is written by one task.
        let out = unsafe { self.out.range(at, columns.len()) };
        let key = key_head * key_dim..(key_head + 1) * key_dim;
        let [decay, beta] = [gates[0], gates[1]];
        dispatch(ex.isa(), DeltaRow { state, q: &q[key.clone()], k: &k[key], v, decay, beta, out });
    }
}

/// out = x / sqrt(mean(x²) + eps) · weight · SiLU(z) by value heads, in f32, rounded once.
///
/// | argument | shape, dtype |
/// |---|---|
/// | `args` | see [`GatedRmsNorm`] |
/// | `out` | [T, Hv · Dv] model dtype (f32, bf16, f16) |
///
/// # Errors
/// A wrong dtype or wrong dims.
pub fn gated_rms_norm_into(args: &GatedRmsNorm, out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "gated_rms_norm";
    let heads = args.heads;
    let t = args.x.rows();
    expect(op, "x", &args.x, DType::F32, &[t, heads.value_width()])?;
    expect(op, "projected", &args.projected, DType::F32, &[t, heads.projected()])?;
    expect(op, "weight", &args.weight, DType::F32, &[heads.value_dim])?;
    expect_dims(op, "out", &out, &[t, heads.value_width()])?;
    ex.launched(|| op);
    #[cfg(feature = "cuda")]
    if ex.is_cuda() {
        return crate::cuda::delta::gated_rms_norm(args, out, ex);
    }
    with_float!(out.dtype(), op, T => gated_norm::<T>(args, out, ex))
}

fn gated_norm<T: Lanes>(args: &GatedRmsNorm, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let heads = args.heads;
    let width = heads.value_width();
    let x = args.x.cpu::<f32>()?;
    let projected = args.projected.cpu::<f32>()?;
    let weight = args.weight.cpu::<f32>()?;
    let out = out.cpu_mut::<T>()?;
    let Some(chunk) = rows_per_task(ex, x.len(), width) else { return Ok(()) };
    let rows = chunk / width * heads.projected();
    let tasks = out.chunks_mut(chunk).zip(x.chunks(chunk)).zip(projected.chunks(rows)).collect();
    for_each_item(ex, tasks, x.len(), |((out, x), projected): ((&mut [T], &[f32]), &[f32])| {
        let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((out, x), projected) in rows.zip(projected.chunks_exact(heads.projected())) {
            let gate = &projected[heads.channels()..][..width];
            dispatch(ex.isa(), GatedNorm { x, gate, weight, eps: args.eps, out });
        }
    });
    Ok(())
}

/// Zeroes rows of `out` that no sequence has.
fn zero_padding(sequences: &[StateSequence], width: usize, out: &mut [f32]) {
    let end = sequences.last().map_or(0, |sequence| sequence.rows.end);
    out[end * width..].fill(0.0);
}
