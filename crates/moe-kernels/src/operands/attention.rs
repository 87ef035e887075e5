//! Arguments of attention.

#[cfg(feature = "cuda")]
use candle_core::Result;

use crate::view::View;

/// Which sequence and which keys each row belongs to.
///
/// # On CUDA
/// Kernels follow these arrays as they lie on the device, which no host can check without waiting for it. So whoever makes
/// them there promises what the CPU checks:
/// - `query_start_loc` ascends from 0 to at most T;
/// - positions ascend within a sequence, and its block table holds the last;
/// - blocks that hold positions which some row sees are below `num_blocks`. Other entries may be anything.
///
/// Otherwise the fast kernels read outside of tables and cache, and row ranges beyond T let them write behind `out`. Slots
/// ([`QkNormRope::slot_mapping`](crate::QkNormRope::slot_mapping)) need no promise: none beyond the cache is written.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMeta<'a> {
    /// [S + 1] u32, ascending from 0 to at most T: the rows of each sequence.
    pub query_start_loc: View<'a>,
    /// \[T\] u32: each row's position in its sequence.
    pub positions: View<'a>,
    /// [S, max_blocks] u32: cache block of positions `i * block_size..` of each sequence.
    pub block_tables: View<'a>,
    /// Factor of the scores, usually 1 / sqrt(D).
    pub scale: f32,
    /// Number of positions that a row sees, itself included; `None` = all.
    pub sliding_window: Option<usize>,
}

#[cfg(any(feature = "cuda", test))]
impl AttentionMeta<'_> {
    /// The window as launchers take it, 0 where a row sees everything: also for a window of more positions than their
    /// numbers count.
    pub(crate) fn window_i32(&self) -> i32 {
        self.sliding_window.and_then(|n| i32::try_from(n).ok()).unwrap_or(0)
    }
}

/// Arguments of [`qk_norm_rope_cache_into`](crate::qk_norm_rope_cache_into).
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// [T, (Hq + 2 Hkv) · D] model dtype or f32: q heads, then k heads, then v heads.
    pub qkv: View<'a>,
    /// \[D\] model dtype: RMS norm weight of every q head.
    pub q_norm: Option<View<'a>>,
    /// \[D\] model dtype: RMS norm weight of every k head.
    pub k_norm: Option<View<'a>>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// [T, D/2] f32: cosines of the rows' angles.
    pub cos: View<'a>,
    /// [T, D/2] f32: sines of the rows' angles.
    pub sin: View<'a>,
    /// \[T\] u32: cache slot (block · block_size + offset) of each row; `u32::MAX` writes nothing. One beyond the cache is an
    /// error on the CPU and writes nothing on CUDA, where a decoding row without a slot is padding.
    pub slot_mapping: View<'a>,
    /// Query heads Hq.
    pub num_heads: usize,
    /// Key and value heads Hkv.
    pub num_kv_heads: usize,
    /// Head size D, even.
    pub head_dim: usize,
}

/// Which rows of a step decode, and how much attention there is, by which the launches are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRows {
    /// How many rows at the beginning are the one new row of their sequence: row i of sequence i.
    pub decode: usize,
    /// (Row, position) pairs that the decoding rows see; 0: not known.
    pub decode_scores: usize,
    /// (Row, position) pairs that the rows behind the decoding ones see; 0: not known.
    pub prompt_scores: usize,
}

#[cfg(feature = "cuda")]
impl<'a> QkNormRope<'a> {
    /// Some rows of it.
    pub(crate) fn narrow(&self, start: usize, rows: usize) -> Result<QkNormRope<'a>> {
        let narrow = |view: View<'a>| view.narrow(start, rows);
        let qkv = narrow(self.qkv)?;
        let slot_mapping = narrow(self.slot_mapping)?;
        Ok(Self { qkv, slot_mapping, cos: narrow(self.cos)?, sin: narrow(self.sin)?, ..*self })
    }
}
