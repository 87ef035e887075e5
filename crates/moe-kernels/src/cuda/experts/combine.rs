//! The weighted sum of slot rows, alone or with the addition to the residual stream and the norm after it.

use candle_core::Result;

use super::launch::{Inputs, Rows};
use crate::cuda::args::{CombineArgs, Dtype, Out, Output};
use crate::cuda::{ffi, small};
use crate::exec::Exec;
use crate::monolithic::PreNorm;
use crate::plan::ExpertsCall;
use crate::rows_view::RowsViewMut;
use crate::view::ViewMut;

impl Inputs {
    fn combine_args(
        &self,
        s: &ExpertsCall,
        rows: &Rows,
        (out, output): (Out, Output),
    ) -> Result<CombineArgs> {
        let op = self.op;
        Ok(CombineArgs {
            slot_rows: rows.slot_rows.at,
            topk_ids: self.topk_ids,
            topk_weights: self.topk_weights,
            expert_map: self.expert_map,
            out,
            tokens: small(op, s.tokens)?,
            top_k: small(op, s.top_k)?,
            num_ids: small(op, s.num_ids)?,
            num_local: small(op, s.num_local)?,
            hidden: small(op, s.hidden)?,
            rows: Dtype::of(op, rows.dtype)?,
            output,
        })
    }

    /// The weighted sum.
    pub(super) fn combine(
        &self,
        s: &ExpertsCall,
        rows: &Rows,
        (out, output): (Out, Output),
        ex: &Exec,
    ) -> Result<()> {
        let cuda = ex.cuda(self.op)?;
        // SAFETY: as in `tensor`, whose rows this reads.
        cuda.check("combine", unsafe {
            ffi::moe_combine(&self.combine_args(s, rows, (out, output))?, cuda.raw()?)
        })
    }

    /// The weighted sum, added to `residual` [T, H] f32, and the norm of that to `out` [T, H].
    pub(super) fn combine_add_norm(
        &self,
        s: &ExpertsCall,
        rows: &Rows,
        norm: &PreNorm,
        (residual, out): (&mut ViewMut, RowsViewMut),
        ex: &Exec,
    ) -> Result<()> {
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let residual = cuda.write(op, "residual", residual)?;
        let weight = cuda.read(op, "norm", norm.weight)?;
        let mut out = match out {
            RowsViewMut::Floats(out) => out,
            RowsViewMut::Fp8(out) => {
                let to = out.place(op, cuda)?;
                let args = self.combine_args(s, rows, (to.q.cast(), Output::Bf16))?;
                // SAFETY: as below.
                return cuda.check("combine_add_rms_norm_fp8", unsafe {
                    ffi::moe_combine_add_rms_norm_fp8(
                        &args,
                        residual,
                        weight,
                        norm.eps,
                        to.scales,
                        to.lines,
                        to.quads,
                        cuda.raw()?,
                    )
                });
            }
        };
        let args = self.combine_args(s, rows, (cuda.write(op, "out", &mut out)?, Output::Bf16))?;
        // SAFETY: as in `tensor`, whose rows this reads; the caller has checked `residual`, `norm` and `out`.
        cuda.check("combine_add_rms_norm", unsafe {
            ffi::moe_combine_add_rms_norm(&args, residual, weight, norm.eps, cuda.raw()?)
        })
    }
}
