//! RMS norm of q and of k over all of their heads on CUDA (`cuda/any/heads_norm.cu`).

use candle_core::Result;

use super::args::Dtype;
use super::{ffi, small};
use crate::exec::Exec;
use crate::operands::{HeadsNorm, QkvHeads};
use crate::view::{View, ViewMut};

/// See [`crate::head_squares_into`].
pub(crate) fn head_squares(qkv: View, heads: QkvHeads, mut out: ViewMut, ex: &Exec) -> Result<()> {
    let op = "head_squares";
    let cuda = ex.cuda("head_squares")?;
    let tokens = small(op, qkv.rows())?;
    let normed = small(op, heads.normed())?;
    let all = small(op, heads.normed() + heads.kv)?;
    let head_dim = small(op, heads.dim)?;
    let qkv = cuda.read(op, "qkv", qkv)?;
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: the op has checked dims and dtypes.
    cuda.check(op, unsafe { ffi::moe_any_head_squares(qkv, out, tokens, normed, all, head_dim, cuda.raw()?) })
}

/// See [`crate::heads_norm_into`].
pub(crate) fn heads_norm(args: &HeadsNorm, heads: QkvHeads, mut qkv: ViewMut, ex: &Exec) -> Result<()> {
    let op = "heads_norm";
    let cuda = ex.cuda("heads_norm")?;
    let dtype = Dtype::of(op, args.q_norm.dtype())?;
    let tokens = small(op, qkv.rows())?;
    let q_heads = small(op, heads.q)?;
    let kv_heads = small(op, heads.kv)?;
    let head_dim = small(op, heads.dim)?;
    let ranks = small(op, args.squares.dims()[0])?;
    let kv_replicas = small(op, args.kv_replicas)?;
    let qkv = cuda.write(op, "qkv", &mut qkv)?;
    let squares = cuda.read(op, "squares", args.squares)?;
    let q_norm = cuda.read(op, "q_norm", args.q_norm)?;
    let k_norm = cuda.read(op, "k_norm", args.k_norm)?;
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
