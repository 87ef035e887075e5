//! Arguments of the norms over all heads.

use crate::view::View;

/// The heads in a row of q, k and v: q heads, then k heads, then v heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvHeads {
    /// Query heads Hq.
    pub q: usize,
    /// Key heads Hkv, and as many value heads.
    pub kv: usize,
    /// Head size D.
    pub dim: usize,
}

impl QkvHeads {
    /// Heads that have norms.
    pub fn normed(&self) -> usize {
        self.q + self.kv
    }

    pub(crate) fn width(&self) -> usize {
        (self.q + 2 * self.kv) * self.dim
    }
}

/// Arguments of [`heads_norm_into`](crate::heads_norm_into).
#[derive(Clone, Copy, Debug)]
pub struct HeadsNorm<'a> {
    /// [R, T, Hq + Hkv] f32: the sums of squares of R ranks' heads, from
    /// [`head_squares_into`](crate::head_squares_into).
    pub squares: View<'a>,
    /// How many ranks in succession hold the same k heads; a divisor of R.
    pub kv_replicas: usize,
    /// [Hq · D] model dtype: this rank's part of the weight of q.
    pub q_norm: View<'a>,
    /// [Hkv · D] model dtype: this rank's part of the weight of k.
    pub k_norm: View<'a>,
    /// Epsilon of both norms.
    pub eps: f32,
}
