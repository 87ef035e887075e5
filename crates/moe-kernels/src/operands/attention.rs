//! Arguments of attention.

#[cfg(feature = "cuda")]
use candle_core::Result;

use crate::view::View;

/// The sequence of each row, and the keys to which each row attends.
///
/// # On CUDA
/// Kernels use these arrays in device memory, and the host cannot check them without waiting. So the caller must make
/// sure of what the CPU checks:
/// - `query_start_loc` ascends from 0 to at most T;
/// - positions ascend within a sequence, and its block table contains an entry for the last one;
/// - blocks with positions to which some row attends are below `num_blocks`. Other entries may have any value.
///
/// Otherwise the fast kernels read outside of tables and cache, and with row ranges beyond T they write after the end
/// of `out`. Slots ([`QkNormRope::slot_mapping`](crate::QkNormRope::slot_mapping)) need no such care: a slot beyond the
/// cache is never written.
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
    /// Number of positions to which a row attends, its own included; `None` = all.
    pub sliding_window: Option<usize>,
    /// \[Hq\] f32: a logit of each head that takes part in the softmax of its rows and has no value (attention sinks,
    /// Xiao et al. 2023, learned as in gpt-oss); not scaled.
    pub sinks: Option<View<'a>>,
    /// [T, at least Hq · Dv] f32: the last Hq · Dv values of a row are gates, whose sigmoids scale what the row has
    /// attended to (Qwen3-Next), after it was rounded; with another rounding. Not for latent rows.
    pub gates: Option<View<'a>>,
}

#[cfg(any(feature = "cuda", test))]
impl AttentionMeta<'_> {
    /// The window in the form that launchers take. It is 0 if a row attends to all positions, which includes windows of
    /// more positions than an i32 can count.
    pub(crate) fn window_i32(&self) -> i32 {
        self.sliding_window.and_then(|n| i32::try_from(n).ok()).unwrap_or(0)
    }
}

/// Arguments of [`qk_norm_rope_cache_into`](crate::qk_norm_rope_cache_into).
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// [T, (Hq + 2 Hkv) · D] model dtype or f32: q heads, then k heads, then v heads. Hq · D more values may follow in
    /// each row, which are not read: gates ([`AttentionMeta::gates`]).
    pub qkv: View<'a>,
    /// \[D\] model dtype or f32: RMS norm weight of every q head.
    pub q_norm: Option<View<'a>>,
    /// \[D\] of the same dtype: RMS norm weight of every k head.
    pub k_norm: Option<View<'a>>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// [T, D/2] f32: cosines of the rows' angles.
    pub cos: View<'a>,
    /// [T, D/2] f32: sines of the rows' angles.
    pub sin: View<'a>,
    /// \[T\] u32: cache slot (block · block_size + offset) of each row; `u32::MAX` writes nothing. A slot beyond the
    /// cache is an error on the CPU. On CUDA it writes nothing, and a decoding row without a slot is padding.
    pub slot_mapping: View<'a>,
    /// Query heads Hq.
    pub num_heads: usize,
    /// Key and value heads Hkv.
    pub num_kv_heads: usize,
    /// Head size D, even.
    pub head_dim: usize,
}

/// Which rows of a step decode, and the amount of attention, which determines the choice of launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRows {
    /// The number of rows at the beginning that are the only new row of their sequence: row i belongs to sequence i.
    pub decode: usize,
    /// Number of (row, position) pairs to which the decoding rows attend; 0 if it is not known.
    pub decode_scores: usize,
    /// Number of (row, position) pairs to which the rows after the decoding ones attend; 0 if it is not known.
    pub prompt_scores: usize,
}

#[cfg(feature = "cuda")]
impl<'a> QkNormRope<'a> {
    /// The arguments for some of the rows.
    pub(crate) fn narrow(&self, start: usize, rows: usize) -> Result<QkNormRope<'a>> {
        let narrow = |view: View<'a>| view.narrow(start, rows);
        let qkv = narrow(self.qkv)?;
        let slot_mapping = narrow(self.slot_mapping)?;
        Ok(Self { qkv, slot_mapping, cos: narrow(self.cos)?, sin: narrow(self.sin)?, ..*self })
    }
}
