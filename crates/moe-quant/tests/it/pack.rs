//! Packing, the other way round than the readers: element by element, for round trips.

use moe_quant::safetensors::{Dtype, tensor::TensorView};
use moe_quant::{Format, GptqZeros, IntFormat, QuantGroup};

/// A tensor that owns its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub suffix: &'static str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(self.dtype, self.shape.clone(), &self.bytes).unwrap()
    }
}

/// Integers of a matrix [n, k] with zero points and scales [n, groups].
#[derive(Clone, Debug)]
pub struct Matrix {
    pub n: usize,
    pub k: usize,
    pub codes: Vec<u8>,
    pub zeros: Vec<u8>,
    pub scales: Vec<f32>,
    pub g_idx: Vec<u32>,
}

impl Matrix {
    pub fn weights(&self) -> Vec<f32> {
        let groups = self.scales.len() / self.n;
        let weight = |at: usize| {
            let row = at / self.k;
            let group = self.g_idx[at % self.k] as usize;
            let value = i32::from(self.codes[at]) - i32::from(self.zeros[row * groups + group]);
            self.scales[row * groups + group] * value as f32
        };
        (0..self.n * self.k).map(weight).collect()
    }
}

/// Words of a tensor [lines, words]; `at` says line, word and place of an element.
fn words(
    shape: [usize; 2],
    bits: u8,
    elements: impl Iterator<Item = ((usize, usize, usize), u8)>,
) -> Vec<u32> {
    let mut words = vec![0u32; shape[0] * shape[1]];
    for ((line, word, place), code) in elements {
        words[line * shape[1] + word] |= u32::from(code) << (place * usize::from(bits));
    }
    words
}

fn tensor(suffix: &'static str, shape: [usize; 2], words: Vec<u32>) -> Tensor {
    let bytes = words.into_iter().flat_map(u32::to_le_bytes).collect();
    Tensor { suffix, dtype: Dtype::I32, shape: shape.to_vec(), bytes }
}

fn floats(suffix: &'static str, shape: [usize; 2], values: impl Iterator<Item = f32>) -> Tensor {
    let bytes = values.flat_map(f32::to_le_bytes).collect();
    Tensor { suffix, dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

fn indices(suffix: &'static str, values: &[u32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { suffix, dtype: Dtype::I32, shape: vec![values.len()], bytes }
}

/// The tensors of a matrix in an integer format.
pub fn pack(format: Format, m: &Matrix) -> Vec<Tensor> {
    let int = format.int().unwrap();
    let n = m.n;
    let k = m.k;
    let size = int.per_word();
    let groups = m.scales.len() / n;
    let elements = |width: usize, codes: &[u8]| -> Vec<((usize, usize), u8)> {
        codes.iter().enumerate().map(|(at, code)| ((at / width, at % width), *code)).collect()
    };
    let codes = elements(k, &m.codes).into_iter();
    let zeros = elements(groups, &m.zeros).into_iter();
    let turned = |at: usize| m.scales[at % n * groups + at / n];
    let scales = |suffix| floats(suffix, [groups, n], (0..n * groups).map(turned));
    match format {
        Format::Gptq { zeros: version, .. } => {
            let qweight =
                words([k / size, n], int.bits, codes.map(|((r, c), q)| ((c / size, r, c % size), q)));
            let mut qzeros =
                words([groups, n / size], int.bits, zeros.map(|((r, g), z)| ((g, r / size, r % size), z)));
            let ones = words([1, 1], int.bits, (0..size).map(|place| ((0, 0, place), 1)))[0];
            if version == GptqZeros::V1 {
                qzeros.iter_mut().for_each(|word| *word = word.wrapping_sub(ones));
            }
            vec![
                tensor("qweight", [k / size, n], qweight),
                tensor("qzeros", [groups, n / size], qzeros),
                scales("scales"),
                indices("g_idx", &m.g_idx),
            ]
        }
        Format::Awq { .. } => {
            // The nibble of output 8 * i + j.
            let place = |row: usize| (row % 8) / 2 + 4 * (row % 2);
            let qweight = words([k, n / 8], 4, codes.map(|((r, c), q)| ((c, r / 8, place(r)), q)));
            let qzeros = words([groups, n / 8], 4, zeros.map(|((r, g), z)| ((g, r / 8, place(r)), z)));
            vec![
                tensor("qweight", [k, n / 8], qweight),
                tensor("qzeros", [groups, n / 8], qzeros),
                scales("scales"),
            ]
        }
        Format::PackQuantized { .. } => {
            let wide = [n, k.div_ceil(size)];
            let tall = [n.div_ceil(size), groups];
            let packed = words(wide, int.bits, codes.map(|((r, c), q)| ((r, c / size, c % size), q)));
            let packed_zeros = words(tall, int.bits, zeros.map(|((r, g), z)| ((r / size, g, r % size), z)));
            vec![
                tensor("weight_packed", wide, packed),
                tensor("weight_zero_point", tall, packed_zeros),
                floats("weight_scale", [n, groups], m.scales.iter().copied()),
                indices("weight_shape", &[n as u32, k as u32]),
                indices("weight_g_idx", &m.g_idx),
            ]
        }
        other => unreachable!("{other:?} has no integers"),
    }
}

/// An integer format: 0 GPTQ v1, 1 GPTQ v2, 2 AWQ, 3 pack-quantized.
pub fn format(kind: usize, bits: u8, group: usize, zero_point: bool, act_order: bool) -> Format {
    let group = if group == 0 { QuantGroup::Channel } else { QuantGroup::Size(group) };
    let int = IntFormat { bits, group, zero_point, act_order: act_order && group != QuantGroup::Channel };
    match kind {
        0 => Format::Gptq { int, zeros: GptqZeros::V1 },
        1 => Format::Gptq { int, zeros: GptqZeros::V2 },
        2 => Format::Awq { int: IntFormat { bits: 4, act_order: false, ..int } },
        _ => Format::PackQuantized { int },
    }
}
