//! Random quantised matrices, and their definition in f32.

use std::ops::Range;

use candle_core::Result;
use half::f16;
use moe_kernels::quant::{LogicalRows, QuantMatrix, QuantRows, QuantUse};
use moe_kernels::{
    Codes, Element, Exec, Float, Offset, QuantGroup, QuantScheme, Weight, linear_into,
    linear_row_parallel_into,
};

use crate::common::{data, filled, values, view};

/// FP8 with one scale.
pub const PER_TENSOR: QuantScheme = QuantScheme::fp8(QuantGroup::Tensor);

/// A quantised matrix as a reader hands it over.
pub struct Plain {
    pub n: usize,
    pub k: usize,
    pub scheme: QuantScheme,
    pub rows: LogicalRows,
    pub perm: Option<Vec<u32>>,
}

impl QuantRows for Plain {
    fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }
    fn scheme(&self) -> QuantScheme {
        self.scheme
    }
    fn perm(&self) -> Option<&[u32]> {
        self.perm.as_deref()
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let groups = self.scheme.groups(self.k);
        let of = |range: &Range<usize>, width| range.start * width..range.end * width;
        out.clear();
        out.q.extend_from_slice(&self.rows.q[of(&rows, self.k)]);
        out.scale.extend_from_slice(&self.rows.scale[of(&rows, groups)]);
        out.zero.extend_from_slice(self.rows.zero.get(of(&rows, groups)).unwrap_or_default());
        out.minimum.extend_from_slice(self.rows.minimum.get(of(&rows, groups)).unwrap_or_default());
        Ok(())
    }
}

/// Random bytes.
fn bytes(n: usize, seed: u64) -> Vec<u8> {
    data::<f32>(n, seed).iter().map(|x| ((x + 1.0) * 128.0).clamp(0.0, 255.0) as u8).collect()
}

impl Plain {
    /// A random matrix; `narrow`: scales are f16.
    pub fn new(n: usize, k: usize, scheme: QuantScheme, narrow: bool, seed: u64) -> Self {
        let groups = scheme.groups(k);
        let scale = data::<f32>(n * groups, seed ^ 1).into_iter().map(|s| s * 0.01 + 0.011);
        let scale = scale.map(|s| if narrow { f16::from_f32(s).to_f32() } else { s }).collect();
        let mut q = bytes(n * k, seed);
        let mut zero = Vec::new();
        let mut perm = None;
        let most = scheme.largest_code();
        q.iter_mut().for_each(|q| *q &= most);
        let mut minimum = Vec::new();
        if scheme.has_minima() {
            minimum = data::<f32>(n * groups, seed ^ 2).into_iter().map(|m| m * 0.1).collect();
        } else if scheme.is_int() {
            zero = vec![most / 2 + 1; n * groups];
        } else if scheme.bits() == 8 {
            q.iter_mut().filter(|q| **q & 0x7f == 0x7f).for_each(|q| *q = 0x31);
        }
        if scheme.has_zero_points() {
            zero = bytes(n * groups, seed ^ 2).into_iter().map(|z| z & most).collect();
        }
        if scheme.act_order {
            let mut order: Vec<u32> = (0..k as u32).collect();
            order.sort_by_key(|i| (u64::from(*i) + 1).wrapping_mul(seed | 0x9e37_79b9_7f4a_7c15));
            perm = Some(order);
        }
        Self { n, k, scheme, rows: LogicalRows { q, scale, zero, minimum }, perm }
    }

    /// The matrix as f32, in the order of x.
    pub fn dequantised(&self) -> Vec<f32> {
        let groups = self.scheme.groups(self.k);
        let group = self.scheme.group_size(self.k);
        let mut w = vec![0.0; self.n * self.k];
        for n in 0..self.n {
            for j in 0..self.k {
                let q = self.rows.q[n * self.k + j];
                let g = n * groups + j / group;
                let value = match self.scheme.codes {
                    Codes::E4m3 => e4m3(q),
                    Codes::E2m1 => e2m1(q),
                    _ => f32::from(q) - self.rows.zero.get(g).map_or(0.0, |zero| f32::from(*zero)),
                };
                let column = self.perm.as_ref().map_or(j, |perm| perm[j] as usize);
                w[n * self.k + column] =
                    self.rows.scale[g] * value - self.rows.minimum.get(g).unwrap_or(&0.0);
            }
        }
        w
    }
}

fn e4m3(q: u8) -> f32 {
    let exponent = i32::from(q >> 3 & 15);
    let mantissa = f32::from(q & 7) / 8.0;
    let magnitude = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if q & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e2m1(q: u8) -> f32 {
    let exponent = i32::from(q >> 1 & 3);
    let mantissa = f32::from(q & 1) / 2.0;
    let magnitude = if exponent == 0 { mantissa } else { (1.0 + mantissa) * 2f32.powi(exponent - 1) };
    if q & 8 == 0 { magnitude } else { -magnitude }
}

/// An integer scheme; group 0 is the row.
pub fn int(bits: u8, group: usize, zero_point: bool, act_order: bool) -> QuantScheme {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    QuantScheme::int(bits, group).with_zero_points(zero_point).with_act_order(act_order)
}

/// Every kind of scheme, for K that 96 divides, or any K where the group is the row or the last one is shorter.
pub fn schemes(k: usize) -> Vec<QuantScheme> {
    let mut all = Vec::new();
    for bits in [4, 8] {
        for group in [0, 32, 48, 40].into_iter().filter(|g| matches!(g, 0 | 40) || k.is_multiple_of(*g)) {
            all.extend([(false, false), (true, false), (true, true)].map(|(z, a)| int(bits, group, z, a)));
        }
    }
    let scales = [QuantGroup::Tensor, QuantGroup::Channel, QuantGroup::Block { n: 16, k: 40 }];
    all.extend(scales.map(QuantScheme::fp8));
    all.extend([32, 40].map(|group| QuantScheme::fp4(QuantGroup::Size(group))));
    all.extend([4, 8].map(|bits| QuantScheme { offset: Offset::Minimum, ..int(bits, 40, false, false) }));
    all
}

/// Packs one matrix.
pub fn pack(m: &Plain, usage: QuantUse) -> Result<QuantMatrix> {
    QuantMatrix::pack(&[m], usage, &Exec::cpu())
}

/// The product that the matrix is packed for.
pub fn linear<T: Float, O: Float>(
    x: &[T],
    w: &QuantMatrix,
    bias: Option<&[T]>,
    ex: &mut Exec,
) -> Result<Vec<O>> {
    let [_, n, k] = w.dims();
    let t = x.len().checked_div(k).unwrap_or(0);
    let mut out = filled::<O>(&[t, n])?;
    let bias = bias.map(|b| view(b, &[n]));
    let is_linear = w.usage() == QuantUse::Linear;
    let w = weight::<T>(w)?;
    let guard = w.read()?;
    let x = view(x, &[t, k]);
    match is_linear {
        true => linear_into(x, guard.view()?, bias, out.view_mut(), ex)?,
        false => linear_row_parallel_into(x, guard.view()?, bias, out.view_mut(), ex)?,
    }
    Ok(values(&out))
}

/// As the weight of products with such activations.
pub fn weight<T: Float>(w: &QuantMatrix) -> Result<Weight> {
    Weight::of_quantised(w.clone(), <T as Element>::DTYPE)
}
