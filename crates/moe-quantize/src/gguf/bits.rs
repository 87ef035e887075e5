//! What the encoders of all block formats need: scales in F16 and codes of 4 bits.

use half::f16;

/// Writes a number in F16, and returns the number that was written.
pub(super) fn put_half(out: &mut [u8], at: usize, x: f32) -> Option<f32> {
    let half = f16::from_f32(x);
    out.get_mut(at..at + 2)?.copy_from_slice(&half.to_le_bytes());
    half.is_finite().then(|| half.to_f32())
}

/// Returns 1 / x, or 0 for 0.
pub(super) fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// Returns the weight with the largest magnitude, the first of several.
pub(super) fn extreme(weights: &[f32]) -> f32 {
    weights.iter().fold(0f32, |most, w| if w.abs() > most.abs() { *w } else { most })
}

/// Writes codes of 4 bits: the first half of them in the lower halves of the bytes.
pub(super) fn put_nibbles(codes: &[u8], out: &mut [u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    for ((byte, low), high) in out.iter_mut().zip(low).zip(high) {
        *byte = low & 0xf | (high & 0xf) << 4;
    }
}
