//! Random quantised matrices, and their definition in f32.

use std::ops::Range;

use candle_core::Result;
use half::f16;
use moe_kernels::quant::{LogicalRows, QuantMatrix, QuantRows, QuantUse, TwoLevels};
use moe_kernels::{
    Codes, Element, Exec, Float, Levels, QuantGroup, QuantScheme, Weight, linear_into,
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
        let shared = self.scheme.shared_scales(self.k);
        let levels = [&self.rows.scale_levels, &self.rows.minimum_levels];
        for (to, from) in [&mut out.scale_levels, &mut out.minimum_levels].into_iter().zip(levels) {
            to.factor.extend_from_slice(from.factor.get(of(&rows, groups)).unwrap_or_default());
            to.shared.extend_from_slice(from.shared.get(of(&rows, shared)).unwrap_or_default());
        }
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
        let mut scale: Vec<f32> = scale.map(|s| if narrow { f16::from_f32(s).to_f32() } else { s }).collect();
        let mut q = bytes(n * k, seed);
        let mut zero = Vec::new();
        let mut perm = None;
        let most = scheme.largest_code();
        q.iter_mut().for_each(|q| *q &= most);
        let mut minimum = Vec::new();
        let (mut scale_levels, mut minimum_levels) = (TwoLevels::default(), TwoLevels::default());
        if scheme.has_minima() {
            let float = |m: f32| if narrow { f16::from_f32(m * 0.1).to_f32() } else { m * 0.1 };
            minimum = data::<f32>(n * groups, seed ^ 2).into_iter().map(float).collect();
        } else if scheme.is_int() {
            zero = vec![most / 2 + 1; n * groups];
        } else if scheme.bits() == 8 {
            q.iter_mut().filter(|q| **q & 0x7f == 0x7f).for_each(|q| *q = 0x31);
        }
        if scheme.has_zero_points() {
            zero = bytes(n * groups, seed ^ 2).into_iter().map(|z| z & most).collect();
        }
        if scheme.levels != Levels::One {
            (scale_levels, scale) = levels(n, k, scheme, seed ^ 3);
            if scheme.has_minima() {
                (minimum_levels, minimum) = levels(n, k, scheme, seed ^ 4);
            }
        }
        if scheme.act_order {
            let mut order: Vec<u32> = (0..k as u32).collect();
            order.sort_by_key(|i| (u64::from(*i) + 1).wrapping_mul(seed | 0x9e37_79b9_7f4a_7c15));
            perm = Some(order);
        }
        Self {
            n,
            k,
            scheme,
            rows: LogicalRows { q, scale, zero, minimum, scale_levels, minimum_levels },
            perm,
        }
    }

    /// The matrix as f32, in the order of x.
    pub fn dequantised(&self) -> Vec<f32> {
        self.in_order_of_x(|product, minimum| product - minimum)
    }

    /// What a value is at most before its minimum is subtracted: f32 rounds the two parts, and not their difference.
    pub fn magnitudes(&self) -> Vec<f32> {
        self.in_order_of_x(|product, minimum| product.abs() + minimum.abs())
    }

    /// Joins the product of scale and code with the minimum, value by value.
    fn in_order_of_x(&self, join: impl Fn(f32, f32) -> f32) -> Vec<f32> {
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
                    Codes::Iq4Nl => f32::from(IQ4_NL[usize::from(q)]),
                    _ => f32::from(q) - self.rows.zero.get(g).map_or(0.0, |zero| f32::from(*zero)),
                };
                let column = self.perm.as_ref().map_or(j, |perm| perm[j] as usize);
                let minimum = self.rows.minimum.get(g).copied().unwrap_or_default();
                w[n * self.k + column] = join(self.rows.scale[g] * value, minimum);
            }
        }
        w
    }
}

/// Random scales in two levels, and their products. Factors have every value but NaN, the shared floats both signs.
fn levels(n: usize, k: usize, scheme: QuantScheme, seed: u64) -> (TwoLevels, Vec<f32>) {
    let (groups, shared) = (scheme.groups(k), scheme.shared_scales(k));
    let mut factor = bytes(n * groups, seed);
    let shared_of = data::<f32>(n * shared, seed ^ 5).into_iter().map(|x| x * 2e-4);
    let (sharing, shared_of): (_, Vec<f32>) = match scheme.levels {
        Levels::Two(sharing) => (sharing, shared_of.map(|x| f16::from_f32(x).to_f32()).collect()),
        _ => (groups, shared_of.collect()),
    };
    if scheme.levels == Levels::Fp8 {
        factor.iter_mut().filter(|q| **q & 0x7f == 0x7f).for_each(|q| *q = 0x31);
    }
    let value = |q: u8| if scheme.levels == Levels::Fp8 { e4m3(q) } else { f32::from(q.cast_signed()) };
    let product = |i: usize| shared_of[i / groups * shared + i % groups / sharing] * value(factor[i]);
    let products = (0..n * groups).map(product).collect();
    (TwoLevels { factor, shared: shared_of }, products)
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

/// ggml's table.
const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

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
    all.push(QuantScheme::iq4_nl(QuantGroup::Size(40)));
    all.extend([4, 5, 6, 8].map(|bits| int(bits, 40, false, false).with_minima()));
    all.extend([5, 6].map(|bits| int(bits, 40, true, true)));
    // In two levels, of groups as in Q4_K, Q5_K, Q6_K and IQ4_XS, and with a last one that is shorter.
    all.extend([4, 5].map(|bits| int(bits, 32, false, false).with_minima().with_shared_scales(8)));
    all.push(int(6, 16, false, false).with_shared_scales(16));
    all.push(int(8, 40, false, false).with_shared_scales(2));
    all.push(QuantScheme::iq4_nl(QuantGroup::Size(32)).with_shared_scales(4));
    all.extend([16, 40].map(|group| QuantScheme::fp4(QuantGroup::Size(group)).with_fp8_scales()));
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
