//! Arguments of latent attention.

use super::attention::AttentionMeta;
use crate::view::View;

/// Arguments of [`mla_latent_into`](crate::mla_latent_into).
#[derive(Clone, Copy, Debug)]
pub struct MlaLatent<'a> {
    /// [T, L + R] f32: the down-projected row, then the key part that is rotated.
    pub compressed: View<'a>,
    /// \[L\] model dtype: RMS norm weight of the latent.
    pub norm: View<'a>,
    /// Epsilon of that norm.
    pub eps: f32,
    /// [T, R/2] f32: cosines of the rows' angles.
    pub cos: View<'a>,
    /// [T, R/2] f32: sines of the rows' angles.
    pub sin: View<'a>,
}

/// Arguments of [`mla_query_into`](crate::mla_query_into).
#[derive(Clone, Copy, Debug)]
pub struct MlaQuery<'a> {
    /// [T, Hq, N + R] f32: the queries of all heads.
    pub q: View<'a>,
    /// [Hq, L, N] model dtype: W_UKᵀ of every head; `None` in the naive form.
    pub w_uk: Option<View<'a>>,
    /// [T, R/2] f32: cosines of the rows' angles.
    pub cos: View<'a>,
    /// [T, R/2] f32: sines of the rows' angles.
    pub sin: View<'a>,
}

/// Arguments of [`mla_rows_into`](crate::mla_rows_into).
#[derive(Clone, Copy, Debug)]
pub struct MlaRows<'a> {
    /// [T, Hq · (N + R)] f32: queries of all heads. Without `latents` [T, Hq · (N + R) + L + R]: these follow.
    pub products: View<'a>,
    /// [T, L + R] f32: the down-projected latent, then the key part that is rotated, if they come from a product of
    /// their own.
    pub latents: Option<View<'a>>,
    /// \[L\] model dtype: RMS norm weight of the latent.
    pub norm: View<'a>,
    /// Epsilon of that norm.
    pub eps: f32,
    /// [Hq, L, N] model dtype: W_UKᵀ of every head; with `None` queries stay outside of latent space.
    pub w_uk: Option<View<'a>>,
    /// [T, R/2] f32: cosines of the rows' angles.
    pub cos: View<'a>,
    /// [T, R/2] f32: sines of the rows' angles.
    pub sin: View<'a>,
    /// \[T\] u32: slot of each row in the cache; `u32::MAX` writes nothing. On CUDA no two rows may name the same slot.
    pub slot_mapping: View<'a>,
}

/// Arguments of [`mla_prompt_into`](crate::mla_prompt_into).
#[derive(Clone, Copy, Debug)]
pub struct MlaPrompt<'a> {
    /// [T, Hq, N + R] model dtype (f32, bf16, f16): queries whose last R values are rotated.
    pub q: View<'a>,
    /// [Hq, L, N] same dtype: W_UKᵀ of every head.
    pub w_uk: View<'a>,
    /// [Hq, V, L] same dtype: W_UV of every head.
    pub w_uv: View<'a>,
    /// [num_blocks, 1, block_size, L + R] same dtype: the cache, with the rows' own entries.
    pub cache: View<'a>,
    /// Which sequence and which keys each row belongs to.
    pub meta: AttentionMeta<'a>,
    /// Positions that the sequences' rows see, all sequences together: of each sequence with rows the last row's
    /// position and one.
    pub positions: usize,
}
