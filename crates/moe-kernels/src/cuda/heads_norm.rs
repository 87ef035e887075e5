//! RMS norm of q and of k over all of their heads on CUDA (`cuda/any/heads_norm.cu`).

use candle_core::Result;

use super::args::Dtype;
use super::{ffi, small};
use crate::exec::Exec;
use crate::operands::{HeadsNorm, QkvHeads};
use crate::view::{View, ViewMut};

/// See [`crate::head_squares_into`].
pub(crate) fn head_squares(qkv: View, heads: QkvHeads, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let (op, cuda) = ("head_squares", ex.cuda("head_squares")?);
    let (tokens, normed) = (small(op, qkv.rows())?, small(op, heads.normed())?);
    let (all, head_dim) = (small(op, heads.normed() + heads.kv)?, small(op, heads.dim)?);
    let (qkv, out) = (cuda.read(op, "qkv", qkv)?, cuda.write(op, "out", &mut out)?);
    // SAFETY: the op has checked dims and dtypes.
    cuda.check(op, unsafe { ffi::moe_any_head_squares(qkv, out, tokens, normed, all, head_dim, cuda.raw()?) })
}

/// See [`crate::heads_norm_into`].
pub(crate) fn heads_norm(args: &HeadsNorm, heads: QkvHeads, mut qkv: ViewMut, ex: &Exec) -> Result<()> {
    let (op, cuda) = ("heads_norm", ex.cuda("heads_norm")?);
    let dtype = Dtype::of(op, args.q_norm.dtype())?;
    let tokens = small(op, qkv.rows())?;
    let (q_heads, kv_heads, head_dim) = (small(op, heads.q)?, small(op, heads.kv)?, small(op, heads.dim)?);
    let (ranks, kv_replicas) = (small(op, args.squares.dims()[0])?, small(op, args.kv_replicas)?);
    let (qkv, squares) = (cuda.write(op, "qkv", &mut qkv)?, cuda.read(op, "squares", args.squares)?);
    let (q_norm, k_norm) = (cuda.read(op, "q_norm", args.q_norm)?, cuda.read(op, "k_norm", args.k_norm)?);
    // SAFETY: the op has checked dims and dtypes.
    cuda.check(op, unsafe {
        ffi::moe_any_heads_norm(
            qkv,
            squares,
            q_norm,
            k_norm,
            args.eps,
            dtype,
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            ranks,
            kv_replicas,
            cuda.raw()?,
        )
    })
}
