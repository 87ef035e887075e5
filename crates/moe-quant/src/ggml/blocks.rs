//! Decodes single blocks. A block must have the length of its type. If it is shorter, the missing part decodes to
//! zeros.

use half::f16;

use super::Block;
use crate::read::e8m0;

/// Codes of 8 bits with a sign are stored with this value added, so that they fit an unsigned byte.
const MIDDLE: u8 = 128;

fn half(block: &[u8], at: usize) -> f16 {
    block
        .get(at..)
        .and_then(|bytes| bytes.first_chunk())
        .map_or(f16::ZERO, |bytes| f16::from_le_bytes(*bytes))
}

fn float(block: &[u8], at: usize) -> f32 {
    half(block, at).to_f32()
}

/// Writes the nibbles of 16 bytes: first the 16 low ones, then the 16 high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 0xf;
        *high = byte >> 4;
    }
}

/// Adds the fifth bits of 32 codes.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= (bytes[at / 8] >> (at % 8) & 1) << 4;
    }
}

pub(super) fn q4_0(block: &[u8], out: &mut Block) {
    out.scales[0] = float(block, 0);
    nibbles(&block[2..18], &mut out.codes[..32]);
}

pub(super) fn q4_1(block: &[u8], out: &mut Block) {
    out.scales[0] = float(block, 0);
    out.minima[0] = -float(block, 2);
    nibbles(&block[4..20], &mut out.codes[..32]);
}

pub(super) fn q5_0(block: &[u8], out: &mut Block) {
    out.scales[0] = float(block, 0);
    nibbles(&block[6..22], &mut out.codes[..32]);
    fifth_bits(&block[2..6], &mut out.codes[..32]);
}

pub(super) fn q5_1(block: &[u8], out: &mut Block) {
    out.scales[0] = float(block, 0);
    out.minima[0] = -float(block, 2);
    nibbles(&block[8..24], &mut out.codes[..32]);
    fifth_bits(&block[4..8], &mut out.codes[..32]);
}

pub(super) fn q8_0(block: &[u8], out: &mut Block) {
    out.scales[0] = float(block, 0);
    for (code, byte) in out.codes.iter_mut().zip(&block[2..34]) {
        *code = byte ^ MIDDLE;
    }
}

pub(super) fn iq4_nl(block: &[u8], out: &mut Block) {
    q4_0(block, out);
}

pub(super) fn mxfp4(block: &[u8], out: &mut Block) {
    out.scales[0] = e8m0(block[0]);
    nibbles(&block[1..17], &mut out.codes[..32]);
}

pub(super) fn q2_k(block: &[u8], out: &mut Block) {
    out.shared = [half(block, 80), half(block, 82)];
    for (group, byte) in block[..16].iter().enumerate() {
        out.factors[group] = (byte & 0xf).cast_signed();
        out.minimum_factors[group] = (byte >> 4).cast_signed();
    }
    two_bits(&block[16..80], &mut out.codes);
}

/// Writes codes of 2 bits. 32 bytes hold 128 columns, and the lowest bits belong to the first 32 of them.
fn two_bits(bytes: &[u8], codes: &mut [u8]) {
    for (at, code) in codes.iter_mut().enumerate() {
        let (half, place, byte) = (at / 128, at / 32 % 4, at % 32);
        *code = bytes[half * 32 + byte] >> (2 * place) & 3;
    }
}

pub(super) fn q3_k(block: &[u8], out: &mut Block) {
    out.shared[0] = half(block, 108);
    let scales = &block[96..108];
    for group in 0..16 {
        let low = scales[group % 8] >> (4 * (group / 8)) & 0xf;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        out.factors[group] = (low | high << 4).cast_signed() - 32;
    }
    two_bits(&block[32..96], &mut out.codes);
    for (at, code) in out.codes.iter_mut().enumerate() {
        // If the third bit is not set, 4 is subtracted. Codes are stored with 8 added.
        let third = block[at % 32] >> (at / 32) & 1;
        *code += 4 + 4 * third;
    }
}

/// Returns the scale and the minimum of a group. The 12 bytes hold eight scales and eight minima of 6 bits.
fn six_bits(bytes: &[u8], group: usize) -> [u8; 2] {
    match group {
        0..4 => [bytes[group] & 63, bytes[group + 4] & 63],
        _ => {
            let both = bytes[group + 4];
            [both & 0xf | bytes[group - 4] >> 6 << 4, both >> 4 | bytes[group] >> 6 << 4]
        }
    }
}

fn scales_and_minima(block: &[u8], out: &mut Block) {
    out.shared = [half(block, 0), half(block, 2)];
    for group in 0..8 {
        let [scale, minimum] = six_bits(&block[4..16], group).map(u8::cast_signed);
        out.factors[group] = scale;
        out.minimum_factors[group] = minimum;
    }
}

pub(super) fn q4_k(block: &[u8], out: &mut Block) {
    scales_and_minima(block, out);
    for (bytes, codes) in block[16..144].chunks(32).zip(out.codes.chunks_mut(64)) {
        nibbles(bytes, codes);
    }
}

pub(super) fn q5_k(block: &[u8], out: &mut Block) {
    scales_and_minima(block, out);
    for (bytes, codes) in block[48..176].chunks(32).zip(out.codes.chunks_mut(64)) {
        nibbles(bytes, codes);
    }
    for (at, code) in out.codes.iter_mut().enumerate() {
        *code |= (block[16 + at % 32] >> (at / 32) & 1) << 4;
    }
}

pub(super) fn q6_k(block: &[u8], out: &mut Block) {
    out.shared[0] = half(block, 208);
    for (factor, byte) in out.factors.iter_mut().zip(&block[192..208]) {
        *factor = byte.cast_signed();
    }
    for (at, code) in out.codes.iter_mut().enumerate() {
        let (part, column) = (at / 128, at % 128);
        let low = block[part * 64 + column % 64] >> (4 * (column / 64)) & 0xf;
        let high = block[128 + part * 32 + column % 32] >> (2 * (column / 32)) & 3;
        *code = low | high << 4;
    }
}

pub(super) fn iq4_xs(block: &[u8], out: &mut Block) {
    out.shared[0] = half(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for group in 0..8 {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 0xf;
        let high = (high >> (2 * group) & 3) as u8;
        out.factors[group] = (low | high << 4).cast_signed() - 32;
    }
    for (bytes, codes) in block[8..136].chunks(16).zip(out.codes.chunks_mut(32)) {
        nibbles(bytes, codes);
    }
}
