//! Encodes blocks of 256 columns with scales in two levels: Q4_K, Q5_K and Q6_K.

use super::bits::{extreme, inverse, put_half, put_nibbles};

/// The columns of a block.
const SUPER: usize = 256;
/// The columns of a group with a minimum, and of one without.
const WITH_MINIMUM: usize = 32;
const SYMMETRIC: usize = 16;
/// The largest factor of a group's scale or minimum: 6 bits.
const MOST_FACTOR: f32 = 63.0;
/// Steps of the search around the scale that covers all weights of a group, and their width in codes.
const STEPS: i32 = 10;
const STEP: f32 = 0.1;

/// The scale and the minimum of a group: w = scale * code - minimum.
#[derive(Clone, Copy)]
struct Affine {
    scale: f32,
    minimum: f32,
}

impl Affine {
    fn code(self, weight: f32, most: f32) -> f32 {
        ((weight + self.minimum) * inverse(self.scale)).round().clamp(0.0, most)
    }

    /// Returns the squared error of the nearest codes.
    fn error(self, weights: &[f32], most: f32) -> f32 {
        let off = |w: &f32| self.scale * self.code(*w, most) - self.minimum - w;
        weights.iter().map(|w| off(w).powi(2)).sum()
    }

    /// Returns the scale and the minimum, neither below 0, with the least squared error of these codes.
    fn of_codes(weights: &[f32], codes: impl Iterator<Item = f32>) -> Option<Self> {
        let count = weights.len() as f32;
        let [mut q, mut qq, mut w, mut qw] = [0f32; 4];
        for (weight, code) in weights.iter().zip(codes) {
            q += code;
            qq += code * code;
            w += weight;
            qw += code * weight;
        }
        let determinant = count * qq - q * q;
        if determinant <= 0.0 {
            return None;
        }
        let scale = (count * qw - q * w) / determinant;
        let minimum = (q * qw - qq * w) / determinant;
        let fitted =
            if minimum < 0.0 { Self { scale: qw / qq, minimum: 0.0 } } else { Self { scale, minimum } };
        (fitted.scale > 0.0).then_some(fitted)
    }

    /// Returns the best scale and minimum of a group that the search finds.
    fn fit(weights: &[f32], most: f32) -> Self {
        let low = weights.iter().copied().fold(0f32, f32::min);
        let high = weights.iter().copied().fold(low, f32::max);
        let covering = Self { scale: (high - low) / most, minimum: -low };
        if high == low {
            return covering;
        }
        let candidates = (-STEPS..=STEPS).filter_map(|step| {
            let scale = (high - low) / (most + STEP * step as f32);
            let guess = Self { scale, minimum: -low };
            Self::of_codes(weights, weights.iter().map(|w| guess.code(*w, most)))
        });
        best(covering, candidates, |candidate| candidate.error(weights, most))
    }
}

/// Returns the candidate with the least error, the first of several.
fn best<T: Copy>(first: T, others: impl Iterator<Item = T>, error: impl Fn(&T) -> f32) -> T {
    let mut chosen = first;
    let mut least = error(&first);
    for other in others {
        let error = error(&other);
        if error < least {
            least = error;
            chosen = other;
        }
    }
    chosen
}

/// The two levels of a block whose groups have minima, and the codes of its columns.
struct Levels {
    factors: [u8; SUPER / WITH_MINIMUM],
    minima: [u8; SUPER / WITH_MINIMUM],
    codes: [u8; SUPER],
}

/// Chooses the levels of a block and writes the two numbers that all groups share.
fn levels(weights: &[f32], most: f32, out: &mut [u8]) -> Option<Levels> {
    let fitted: Vec<Affine> =
        weights.chunks(WITH_MINIMUM).map(|weights| Affine::fit(weights, most)).collect();
    let largest = |value: fn(&Affine) -> f32| fitted.iter().map(value).fold(0f32, f32::max);
    let scale = put_half(out, 0, largest(|group| group.scale) / MOST_FACTOR)?;
    let minimum = put_half(out, 2, largest(|group| group.minimum) / MOST_FACTOR)?;
    let mut levels =
        Levels { factors: [0; SUPER / WITH_MINIMUM], minima: [0; SUPER / WITH_MINIMUM], codes: [0; SUPER] };
    for (group, (weights, fitted)) in weights.chunks(WITH_MINIMUM).zip(&fitted).enumerate() {
        let near = [
            (fitted.scale * inverse(scale)).round().min(MOST_FACTOR),
            (fitted.minimum * inverse(minimum)).round().min(MOST_FACTOR),
        ];
        let of = |[s, m]: [f32; 2]| Affine { scale: scale * s, minimum: minimum * m };
        let around = around(near[0]).flat_map(|s| around(near[1]).map(move |m| [s, m]));
        let chosen = best(near, around, |factors| of(*factors).error(weights, most));
        levels.factors[group] = chosen[0] as u8;
        levels.minima[group] = chosen[1] as u8;
        let codes = &mut levels.codes[group * WITH_MINIMUM..][..WITH_MINIMUM];
        codes.iter_mut().zip(weights).for_each(|(code, w)| *code = of(chosen).code(*w, most) as u8);
    }
    Some(levels)
}

/// Returns the factors next to one.
fn around(factor: f32) -> impl Iterator<Item = f32> {
    [-1.0, 0.0, 1.0].into_iter().map(move |step| (factor + step).clamp(0.0, MOST_FACTOR))
}

/// Writes eight scales and eight minima of 6 bits into 12 bytes.
fn put_six_bits(levels: &Levels, out: &mut [u8]) {
    for group in 0..4 {
        out[group] = levels.factors[group] | levels.factors[group + 4] >> 4 << 6;
        out[group + 4] = levels.minima[group] | levels.minima[group + 4] >> 4 << 6;
        out[group + 8] = levels.factors[group + 4] & 0xf | (levels.minima[group + 4] & 0xf) << 4;
    }
}

pub(super) fn q4_k(weights: &[f32], out: &mut [u8]) -> Option<()> {
    let levels = levels(weights, 15.0, out)?;
    put_six_bits(&levels, &mut out[4..16]);
    levels.codes.chunks(64).zip(out[16..].chunks_mut(32)).for_each(|(codes, out)| put_nibbles(codes, out));
    Some(())
}

pub(super) fn q5_k(weights: &[f32], out: &mut [u8]) -> Option<()> {
    let levels = levels(weights, 31.0, out)?;
    put_six_bits(&levels, &mut out[4..16]);
    for (at, code) in levels.codes.iter().enumerate() {
        out[16 + at % 32] |= (code >> 4) << (at / 32);
    }
    levels.codes.chunks(64).zip(out[48..].chunks_mut(32)).for_each(|(codes, out)| put_nibbles(codes, out));
    Some(())
}

/// Returns the code of a weight in Q6_K, from -32 to 31.
fn signed_code(weight: f32, scale: f32) -> f32 {
    (weight * inverse(scale)).round().clamp(-32.0, 31.0)
}

fn signed_error(weights: &[f32], scale: f32) -> f32 {
    weights.iter().map(|w| (scale * signed_code(*w, scale) - w).powi(2)).sum()
}

/// Returns the scale of a group without a minimum. It is below 0 if the largest magnitude is of a weight above 0, since
/// codes reach further below 0.
fn signed_fit(weights: &[f32]) -> f32 {
    let largest = extreme(weights);
    let candidates = (-STEPS..=STEPS).filter_map(|step| {
        let guess = largest / -(32.0 + STEP * step as f32);
        let codes = weights.iter().map(|w| signed_code(*w, guess));
        let [mut qq, mut qw] = [0f32; 2];
        for (weight, code) in weights.iter().zip(codes) {
            qq += code * code;
            qw += code * weight;
        }
        (qq > 0.0).then(|| qw / qq)
    });
    best(largest / -32.0, candidates, |scale| signed_error(weights, *scale))
}

pub(super) fn q6_k(weights: &[f32], out: &mut [u8]) -> Option<()> {
    let fitted: Vec<f32> = weights.chunks(SYMMETRIC).map(signed_fit).collect();
    let shared = put_half(out, 208, extreme(&fitted) / -128.0)?;
    let mut codes = [0u8; SUPER];
    for (group, (weights, fitted)) in weights.chunks(SYMMETRIC).zip(&fitted).enumerate() {
        let near = (fitted * inverse(shared)).round().clamp(-128.0, 127.0);
        let around = [near - 1.0, near + 1.0].into_iter().filter(|factor| (-128.0..=127.0).contains(factor));
        let factor = best(near, around, |factor| signed_error(weights, shared * factor));
        out[192 + group] = (factor as i8).cast_unsigned();
        let codes = &mut codes[group * SYMMETRIC..][..SYMMETRIC];
        for (code, w) in codes.iter_mut().zip(weights) {
            *code = (signed_code(*w, shared * factor) + 32.0) as u8;
        }
    }
    for (at, code) in codes.iter().enumerate() {
        let part = at / 128;
        let column = at % 128;
        out[part * 64 + column % 64] |= (code & 0xf) << (4 * (column / 64));
        out[128 + part * 32 + column % 32] |= (code >> 4) << (2 * (column / 32));
    }
    Some(())
}
