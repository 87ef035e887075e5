//! Random quantised matrices with their definition in floats, and a checkpoint of them.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{DType, Result};
use moe_kernels::half::{bf16, f16};
use moe_kernels::quant::{LogicalRows, Opened, QuantPart, QuantRows, QuantSource, QuantUse, TwoLevels};
use moe_kernels::{Codes, Exec, Levels, QuantGroup, QuantScheme, Weight};

use crate::common::Rng;

/// A random matrix with weights in -1..1, in the form that a reader provides.
#[derive(Debug)]
pub struct Matrix {
    n: usize,
    k: usize,
    scheme: QuantScheme,
    rows: LogicalRows,
    perm: Option<Vec<u32>>,
}

impl Matrix {
    /// Matrices with the same `perm_seed` share the order of their columns.
    pub fn new(rng: &mut Rng, n: usize, k: usize, scheme: QuantScheme, perm_seed: u64) -> Self {
        let groups = scheme.groups(k);
        let mut q = Vec::with_capacity(n * k);
        let mut zero = Vec::new();
        let mut perm = None;
        let mut unit = 0.5f32;
        if scheme.is_int() {
            let most = scheme.largest_code();
            q.extend((0..n * k).map(|_| rng.bits() as u8 & most));
            let zeros = if scheme.has_minima() { 0 } else { n * groups };
            zero.extend((0..zeros).map(|_| match scheme.has_zero_points() {
                true => rng.bits() as u8 & most,
                false => scheme.middle(),
            }));
            unit = 1.0 / (f32::from(most) + 1.0);
            perm = scheme.act_order.then(|| Rng::seeded(perm_seed).permutation(k));
        } else {
            // The values of FP8 are below 2 in magnitude, the values of FP4 are at most 6.
            let fp4 = scheme.codes == Codes::E2m1;
            q.extend((0..n * k).map(|_| rng.bits() as u8 & if fp4 { 0xf } else { 0xbf }));
            unit = if fp4 { 0.125 } else { unit };
        }
        let rows_of = |row: usize| scheme.group.scale_row(row);
        let blocks = rows_of(n.saturating_sub(1)) + 1;
        let of_block: Vec<f32> = (0..blocks * groups)
            .map(|_| f16::from_f32(unit * (0.75 + 0.25 * rng.float())).to_f32())
            .collect();
        let mut scale: Vec<f32> =
            (0..n * groups).map(|i| of_block[rows_of(i / groups) * groups + i % groups]).collect();
        let mut scale_levels = TwoLevels::default();
        if scheme.codes == Codes::E2m1 && scheme.levels == Levels::One {
            // Powers of two, of which the largest is the unit.
            scale.iter_mut().for_each(|scale| *scale = unit * 2f32.powi(-(rng.below(6) as i32)));
        }
        let mut minimum = Vec::new();
        let mut minimum_levels = TwoLevels::default();
        if let Levels::Two(sharing) = scheme.levels {
            let mut levels = |least: u32, shared: f32| -> (TwoLevels, Vec<f32>) {
                let factor: Vec<u8> =
                    (0..n * groups).map(|_| (least + rng.bits() as u32 % (64 - least)) as u8).collect();
                let shared: Vec<f32> = (0..n * groups.div_ceil(sharing))
                    .map(|_| f16::from_f32(shared * (0.75 + 0.25 * rng.float())).to_f32())
                    .collect();
                let of = |i: usize| shared[i / groups * groups.div_ceil(sharing) + i % groups / sharing];
                let product = factor.iter().enumerate().map(|(i, factor)| f32::from(*factor) * of(i));
                let product = product.collect();
                (TwoLevels { factor, shared }, product)
            };
            (scale_levels, scale) = levels(0, unit / 64.0);
            if scheme.has_minima() {
                (minimum_levels, minimum) = levels(0, 1.0 / 64.0);
            }
        }
        if scheme.levels == Levels::Fp8 {
            // Factors below 1, some of them 0 or subnormal.
            scale_levels.factor.extend((0..n * groups).map(|_| (rng.bits() % 0x38) as u8));
            scale_levels.shared.extend((0..n).map(|_| unit * (0.75 + 0.25 * rng.float())));
            let product = |(i, factor): (usize, &u8)| e4m3(*factor) * scale_levels.shared[i / groups];
            scale = scale_levels.factor.iter().enumerate().map(product).collect();
        }
        Self {
            n,
            k,
            scheme,
            rows: LogicalRows { q, scale, zero, minimum, scale_levels, minimum_levels },
            perm,
        }
    }

    /// The same matrix with scales that bf16 can represent and f16 cannot.
    pub fn with_bf16_scales(mut self) -> Self {
        self.rows.scale.iter_mut().for_each(|scale| *scale = bf16::from_f32(*scale).to_f32());
        self.rows.scale[0] = bf16::from_f32(1e-9).to_f32();
        self
    }

    /// The same matrix with other scales for some groups, by row and group; scales in one level.
    pub fn with_scales(mut self, scale: impl Fn(usize, usize) -> Option<f32>) -> Self {
        let groups = self.scheme.groups(self.k);
        for (i, to) in self.rows.scale.iter_mut().enumerate() {
            *to = scale(i / groups, i % groups).unwrap_or(*to);
        }
        self
    }

    /// The same matrix with any finite number of E4M3, not only numbers below 2. Other formats always have all their
    /// values.
    pub fn with_every_code(mut self, rng: &mut Rng) -> Self {
        if self.scheme.codes == Codes::E4m3 {
            let finite = |code: u8| if code & 0x7f == 0x7f { code & 0x80 } else { code };
            self.rows.q.iter_mut().for_each(|q| *q = finite(rng.bits() as u8));
        }
        self
    }

    /// Changes the integers and floats of scales and minima, row by row and group by group: [s, m] and [d, e].
    pub fn with_levels(mut self, change: impl Fn(usize, usize, &mut [u8; 2], &mut [f32; 2])) -> Self {
        let Levels::Two(sharing) = self.scheme.levels else { panic!("{}", self.scheme) };
        let groups = self.scheme.groups(self.k);
        let shared = groups.div_ceil(sharing);
        let LogicalRows { scale, minimum, scale_levels, minimum_levels, .. } = &mut self.rows;
        for i in 0..self.n * groups {
            let at = i / groups * shared + i % groups / sharing;
            let mut integers = [scale_levels.factor[i], minimum_levels.factor[i]];
            let mut floats = [scale_levels.shared[at], minimum_levels.shared[at]];
            change(i / groups, i % groups, &mut integers, &mut floats);
            [scale_levels.factor[i], minimum_levels.factor[i]] = integers;
            [scale_levels.shared[at], minimum_levels.shared[at]] = floats;
        }
        for i in 0..self.n * groups {
            let at = i / groups * shared + i % groups / sharing;
            scale[i] = f32::from(scale_levels.factor[i]) * scale_levels.shared[at];
            minimum[i] = f32::from(minimum_levels.factor[i]) * minimum_levels.shared[at];
        }
        self
    }

    /// What the fast kernels round of each weight of Q4_K, [N, K]: its value, its scale times eight, and the value of
    /// the code in the middle.
    pub fn rounded_parts(&self) -> Vec<f32> {
        let groups = self.scheme.groups(self.k);
        let group = self.scheme.group_size(self.k);
        let floats = self.floats();
        let part = |(i, w): (usize, &f32)| {
            let at = i / self.k * groups + i % self.k / group;
            let middle = 8.0 * self.rows.scale[at];
            w.abs() + middle.abs() + (middle - self.rows.minimum[at]).abs()
        };
        floats.iter().enumerate().map(part).collect()
    }

    /// [N, K] in the order of x.
    pub fn floats(&self) -> Vec<f32> {
        let groups = self.scheme.groups(self.k);
        let group = self.scheme.group_size(self.k);
        let mut w = vec![0.0; self.n * self.k];
        for i in 0..self.n * self.k {
            let row = i / self.k;
            let j = i % self.k;
            let at = row * groups + j / group;
            let value = match self.scheme.codes {
                Codes::E4m3 => e4m3(self.rows.q[i]),
                Codes::E2m1 => e2m1(self.rows.q[i]),
                _ => f32::from(self.rows.q[i]) - self.rows.zero.get(at).map_or(0.0, |zero| f32::from(*zero)),
            };
            let column = self.perm.as_ref().map_or(j, |perm| perm[j] as usize);
            let minimum = self.rows.minimum.get(at).copied().unwrap_or_default();
            w[row * self.k + column] = self.rows.scale[at] * value - minimum;
        }
        w
    }
}

fn e4m3(q: u8) -> f32 {
    let exponent = i32::from(q >> 3 & 15);
    let mantissa = f32::from(q & 7) / 8.0;
    let x = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if q & 0x80 == 0 { x } else { -x }
}

fn e2m1(q: u8) -> f32 {
    let mantissa = f32::from(q & 1) / 2.0;
    let exponent = i32::from(q >> 1 & 3);
    let x = if exponent == 0 { mantissa } else { (1.0 + mantissa) * 2f32.powi(exponent - 1) };
    if q & 8 == 0 { x } else { -x }
}

struct Rows<'a>(&'a Matrix);

impl QuantRows for Rows<'_> {
    fn shape(&self) -> (usize, usize) {
        (self.0.n, self.0.k)
    }
    fn scheme(&self) -> QuantScheme {
        self.0.scheme
    }
    fn perm(&self) -> Option<&[u32]> {
        self.0.perm.as_deref()
    }
    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let m = self.0;
        let groups = self.0.scheme.groups(self.0.k);
        let of = |width: usize| rows.start * width..rows.end * width;
        out.q = m.rows.q[of(m.k)].to_vec();
        out.scale = m.rows.scale[of(groups)].to_vec();
        out.zero = m.rows.zero.get(of(groups)).unwrap_or_default().to_vec();
        out.minimum = m.rows.minimum.get(of(groups)).unwrap_or_default().to_vec();
        let shared = m.scheme.shared_scales(m.k);
        for (levels, out) in
            [(&m.rows.scale_levels, &mut out.scale_levels), (&m.rows.minimum_levels, &mut out.minimum_levels)]
        {
            out.factor = levels.factor.get(of(groups)).unwrap_or_default().to_vec();
            out.shared = levels.shared.get(of(shared)).unwrap_or_default().to_vec();
        }
        Ok(())
    }
}

/// Matrices by the names of their modules, or the part of their inputs that a rank holds.
#[derive(Debug, Default)]
pub struct Source {
    pub matrices: HashMap<String, Matrix>,
    pub inputs: Option<Range<usize>>,
}

impl QuantSource for Source {
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        Ok(self.matrices.get(module).map_or(QuantScheme::NONE, |m| m.scheme))
    }
    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>> {
        let part = |m| QuantPart { rows: Box::new(Rows(m)), inputs: self.inputs.clone().unwrap_or(0..m.k) };
        Ok(self.matrices.get(module).map(part))
    }
}

impl Source {
    pub fn weight(&self, modules: &[&[String]], usage: QuantUse, dtype: DType, ex: &Exec) -> Weight {
        let modules: Vec<_> = modules.iter().map(|names| names.to_vec()).collect();
        match Weight::quantised(self, &modules, usage, dtype, ex).unwrap() {
            Opened::Packed(weight) => weight,
            other => panic!("{other:?}"),
        }
    }

    /// Gate and up, and down of experts.
    pub fn experts(
        &self,
        modules: [&[Vec<String>]; 2],
        segments: usize,
        dtype: DType,
        ex: &Exec,
    ) -> [Weight; 2] {
        match Weight::quantised_experts(self, modules, segments, dtype, ex).unwrap() {
            Opened::Packed(packs) => packs,
            other => panic!("{other:?}"),
        }
    }
}

pub fn int(bits: u8, group: usize, zero_point: bool, act_order: bool) -> QuantScheme {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    QuantScheme::int(bits, group).with_zero_points(zero_point).with_act_order(act_order)
}

pub fn fp8(scales: QuantGroup) -> QuantScheme {
    QuantScheme::fp8(scales)
}

/// The schemes of MXFP4 and of NVFP4.
pub fn fp4() -> [QuantScheme; 2] {
    let group = |columns| QuantScheme::fp4(QuantGroup::Size(columns));
    [group(32), group(16).with_fp8_scales()]
}

/// The scheme of ggml's Q4_K.
pub fn q4k() -> QuantScheme {
    int(4, 32, false, false).with_minima().with_shared_scales(8)
}

/// Every kind of scheme that is possible for K columns. The last group of 128 may be shorter.
pub fn schemes(k: usize) -> Vec<QuantScheme> {
    let mut all = Vec::new();
    for bits in [4, 8] {
        let fits = |g: &usize| *g == 0 || k.is_multiple_of(*g) || (*g == 128 && k > 128);
        for group in [0, 32, 48, 128].into_iter().filter(fits) {
            all.extend([(false, false), (true, false), (true, true)].map(|(z, a)| int(bits, group, z, a)));
        }
    }
    let blocks = [(128, 128), (16, 40)].map(|(n, k)| QuantGroup::Block { n, k });
    all.extend(blocks.into_iter().chain([QuantGroup::Channel, QuantGroup::Tensor]).map(fp8));
    all.extend(fp4().into_iter().chain([q4k()]).filter(|scheme| k.is_multiple_of(scheme.group_size(k))));
    all
}
