//! Both products of an expert layer with activations in FP8.

use candle_core::{DType, Result, bail};

use super::launch::{Buckets, Inputs, Rows};
use super::packs::Packs;
use crate::cuda::args::Fp8ExpertsArgs;
use crate::cuda::{ffi, fp8, small};
use crate::exec::Exec;
use crate::fp8::Fp8Order;
use crate::plan::ExpertsCall;
use crate::rows_view::Fp8Rows;

impl Inputs {
    /// Computes the rows of all slots that have a local expert, in bf16. x is quantised, with a row for each slot in
    /// order of experts, and multiplied by gate and up. The resulting activations are in FP8, too, and are multiplied
    /// by down.
    pub(super) fn fp8(&self, s: &ExpertsCall, slots: &Buckets, rows: &Rows, ex: &Exec) -> Result<()> {
        let op = self.op;
        let cuda = ex.cuda(self.op)?;
        let (Packs::Quantised { w13, w2 }, DType::BF16) = (self.packs, rows.dtype) else {
            bail!("{op}: products with FP8 activations take FP8 weights and rows in bf16")
        };
        let lists = (slots.at, slots.counts);
        let x = fp8::quantised(op, self.x, [s.tokens, s.hidden], Fp8Order::Rows, ex)?;
        let x = fp8::to_slots(op, &x, lists, (slots.places, s.num_local, s.top_k), ex)?;
        let mut act = Fp8Rows::unspecified([s.slots(), s.inter], Fp8Order::Rows, ex)?;
        let [q, scales] = x.at(op, cuda)?;
        let to = act.place(op, cuda)?;
        let gate_up = Fp8ExpertsArgs {
            q,
            scales,
            w: w13,
            slots: slots.at,
            counts: slots.counts,
            bucket: small(op, slots.places)?,
            out: to.q.cast(),
            out_scales: to.scales.cast(),
            tokens: small(op, s.tokens)?,
            top_k: small(op, s.top_k)?,
        };
        // SAFETY: `super::check` has checked dims and dtypes, and the form the launchers' conditions. The scratch
        // memory has the sizes that the launchers need, and routing has listed the slots.
        cuda.check("fp8_experts_gate_up", unsafe { ffi::moe_fp8_experts_gate_up(&gate_up, cuda.raw()?) })?;
        let [q, scales] = act.at(op, cuda)?;
        let out = rows.slot_rows.at;
        let down = Fp8ExpertsArgs { q, scales, w: w2, out, out_scales: std::ptr::null_mut(), ..gate_up };
        // SAFETY: as above; its rows were written by the launch before.
        cuda.check("fp8_experts_down", unsafe { ffi::moe_fp8_experts_down(&down, cuda.raw()?) })
    }
}
