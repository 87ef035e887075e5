//! Expert layers whose launches contain the router: the monolithic kernels.

use candle_core::{DType, Result, bail};

use super::arguments::{FusedExperts, check, quantisation};
use super::epilogue::ExpertEpilogue;
use super::launch::{Buckets, Inputs, Rows, ScratchArray, bucket_counts, clear_bucket_counts};
use super::one_launch::{Choice, OneLaunch};
use super::packs::Packs;
use crate::arguments::{expect, expect_dims, expect_matrix, expect_rank3};
use crate::buffer::Scratch;
use crate::cuda::args::{In, Output};
use crate::cuda::expect_aligned;
use crate::cuda::router::{self, gate_route};
use crate::exec::Exec;
use crate::monolithic::{Gate, PreNorm, SublayerIo};
use crate::plan::{ExpertsCall, Form, MonolithicCall, MonolithicForm};
use crate::rows_view::RowsViewMut;
use crate::view::{View, ViewMut};
use crate::weight::WeightView;

/// Experts on this rank with the gate that chooses among all.
#[derive(Clone, Copy, Debug)]
pub struct MonolithicExperts<'a> {
    /// The gate, [E, H] bf16, and its rule. The S shared experts have the numbers from E on.
    pub gate: &'a Gate<'a>,
    /// [E_local, 2I, H] bf16, gate rows, then up rows; or quantised. E_local of the E + S experts are here.
    pub w13: WeightView<'a>,
    /// [E_local, H, I] bf16, or quantised if w13 is.
    pub w2: WeightView<'a>,
    /// i32, expert to local slot, -1 = elsewhere; `None` = all are here. Its length is E + S, or, if the gate names
    /// copies, the number of copies.
    pub expert_map: Option<View<'a>>,
    /// Biases and activation.
    pub epilogue: ExpertEpilogue<'a>,
}

/// Σ_k weight_k · w2\[e\] (silu(gate) · up), over the experts that the gate chooses and that are on this rank, k
/// ascending in f32. `io` has the inputs and the place of the sums.
///
/// # Errors
/// A CPU context; wrong dims or dtypes; sizes or a fusion that `form` does not fit.
pub fn monolithic_experts_into(
    form: MonolithicForm,
    args: &MonolithicExperts,
    io: SublayerIo,
    ex: &mut Exec,
) -> Result<()> {
    let op = "monolithic_experts";
    let sizes = args.check(op, &io)?;
    let call = MonolithicCall {
        experts: sizes,
        dtype: DType::BF16,
        gate: args.gate.weight.dtype(),
        fusion: io.fusion(),
    };
    if let Err(reason) = form.fits(&call, &ex.machine()) {
        bail!("{op}: {} {reason}", form.name())
    }
    if form == MonolithicForm::OneLaunch && args.gate.log2phy.is_some() {
        bail!("{op}: {} takes a map of experts, got one of their copies", form.name())
    }
    if sizes.tokens == 0 {
        return Ok(());
    }
    match (form, io) {
        (MonolithicForm::OneLaunch, SublayerIo::Store { x, mut out }) => {
            let x = ex.cuda(op)?.read(op, "x", x)?;
            let out = ex.cuda(op)?.write(op, "out", &mut out)?;
            args.one_launch(op, sizes, x, None, ex)?.run((out, Output::F32), ex)
        }
        (MonolithicForm::OneLaunch, SublayerIo::NormAdd { norm, mut residual }) => {
            // The kernel reads the rows that it adds to: every block reads all of them before any block adds.
            let at: *mut f32 = ex.cuda(op)?.write(op, "residual", &mut residual)?;
            args.one_launch(op, sizes, at.cast_const().cast(), Some(norm), ex)?
                .run((at.cast(), Output::AddF32), ex)
        }
        (
            MonolithicForm::Fp8 | MonolithicForm::Tensor | MonolithicForm::Wide,
            SublayerIo::Store { x, mut out },
        ) => {
            let products = Products::new(op, form, x, args, sizes, ex)?;
            let out = ex.cuda(op)?.write(op, "out", &mut out)?;
            products.inputs.combine(&sizes, &products.rows, (out, Output::F32), ex)
        }
        (
            MonolithicForm::Fp8 | MonolithicForm::Tensor | MonolithicForm::Wide,
            SublayerIo::AddNorm { x, mut residual, norm, out },
        ) => {
            let products = Products::new(op, form, x, args, sizes, ex)?;
            let to = (&mut residual, out);
            products.inputs.combine_add_norm(&sizes, &products.rows, &norm, to, ex)
        }
        (form, io) => bail!("{op}: {} has no {:?}", form.name(), io.fusion()),
    }
}

impl MonolithicExperts<'_> {
    /// Checks dims and dtypes.
    fn check(&self, op: &'static str, io: &SublayerIo) -> Result<ExpertsCall> {
        let (experts, hidden) = expect_matrix(op, "gate", &self.gate.weight)?;
        self.gate.check(op, experts, hidden, DType::BF16)?;
        let num_ids = experts + self.gate.shared;
        let (num_local, _, inter) = expect_rank3(op, "w2", &self.w2)?;
        expect(op, "w13", &self.w13, DType::BF16, &[num_local, 2 * inter, hidden])?;
        expect(op, "w2", &self.w2, DType::BF16, &[num_local, hidden, inter])?;
        let num_ids = match (&self.expert_map, &self.gate.log2phy) {
            (Some(map), Some(_)) => map.elem_count(),
            (None, Some(_)) => bail!("{op}: expected an expert_map in addition to log2phy"),
            _ => num_ids,
        };
        match &self.expert_map {
            Some(map) => expect(op, "expert_map", map, DType::I32, &[num_ids])?,
            None => expect_dims(op, "w2", &self.w2, &[num_ids, hidden, inter])?,
        }
        let tokens = check_io(op, io, hidden)?;
        expect_aligned(op, &[self.gate.weight, io.rows()])?;
        let quant = quantisation(op, [self.w13, self.w2])?;
        Ok(ExpertsCall {
            tokens,
            top_k: self.gate.slots(),
            num_ids,
            num_local,
            hidden,
            inter,
            quant,
            passes: 1,
            epilogue: self.epilogue.check(op, [num_local, hidden, inter])?,
        })
    }

    fn one_launch<'b>(
        &'b self,
        op: &'static str,
        sizes: ExpertsCall,
        x: In,
        norm: Option<PreNorm<'b>>,
        ex: &Exec,
    ) -> Result<OneLaunch<'b>> {
        let choice = Choice::Gate(self.gate);
        let packs = Packs::of(op, [self.w13, self.w2], ex)?;
        Ok(OneLaunch {
            op,
            x,
            norm,
            choice,
            packs,
            expert_map: self.expert_map,
            sizes,
            epilogue: self.epilogue,
        })
    }
}

/// Checks rows of H columns, and returns their number.
fn check_io(op: &str, io: &SublayerIo, hidden: usize) -> Result<usize> {
    let rows = |name: &str, view: &View, dtype: DType| {
        let tokens = view.rows();
        expect(op, name, view, dtype, &[tokens, hidden]).map(|()| tokens)
    };
    let same = |name: &str, view: &ViewMut, tokens: usize, dtype: DType| {
        expect(op, name, view, dtype, &[tokens, hidden])
    };
    let norm = |norm: &PreNorm| expect(op, "norm", &norm.weight, DType::BF16, &[hidden]);
    let rows_out = |out: &RowsViewMut, tokens: usize| match out {
        RowsViewMut::Floats(out) => same("out", out, tokens, DType::BF16),
        RowsViewMut::Fp8(out) if out.dims() == [tokens, hidden] => Ok(()),
        RowsViewMut::Fp8(out) => {
            bail!("{op}: expected out [{tokens}, {hidden}] in FP8, got {:?}", out.dims())
        }
    };
    match io {
        SublayerIo::Store { x, out } | SublayerIo::Add { x, residual: out } => {
            let tokens = rows("x", x, DType::BF16)?;
            same("out", out, tokens, DType::F32).map(|()| tokens)
        }
        SublayerIo::NormAdd { norm: before, residual } => {
            norm(before)?;
            rows("residual", &residual.as_view(), DType::F32)
        }
        SublayerIo::AddNorm { x, residual, norm: next, out } => {
            let tokens = rows("x", x, DType::BF16)?;
            norm(next)?;
            same("residual", residual, tokens, DType::F32)?;
            rows_out(out, tokens).map(|()| tokens)
        }
    }
}

/// Slot rows after router and products, before their sum.
struct Products {
    inputs: Inputs,
    rows: Rows,
    // The launches that follow read them.
    _ids: Scratch,
    _weights: Scratch,
}

impl Products {
    fn new(
        op: &'static str,
        form: MonolithicForm,
        x: View,
        args: &MonolithicExperts,
        sizes: ExpertsCall,
        ex: &Exec,
    ) -> Result<Self> {
        let ExpertsCall { tokens, top_k, num_local, .. } = sizes;
        let mut logits = ex.scratch(DType::F32, &[tokens, args.gate.weight.rows()])?;
        let mut ids = ex.scratch(DType::U32, &[tokens, top_k])?;
        let mut weights = ex.scratch(DType::F32, &[tokens, top_k])?;
        let slots = ScratchArray::new(op, DType::U32, &[num_local, tokens], ex)?;
        let buckets = router::Buckets {
            counts: bucket_counts(num_local, ex)?,
            slots: slots.at,
            expert_map: ex.cuda(op)?.read_or_null(op, "expert_map", args.expert_map)?,
        };
        let outputs = (logits.view_mut(), ids.view_mut(), weights.view_mut());
        gate_route(x, args.gate, outputs, buckets, ex)?;
        let MonolithicExperts { w13, w2, expert_map, epilogue, .. } = *args;
        let topk_ids = ids.view();
        let topk_weights = weights.view();
        let fused = FusedExperts { x, w13, w2, topk_ids, topk_weights, expert_map, lists: None, epilogue };
        check(op, &fused)?;
        let inputs = Inputs::of(op, &fused, ex)?;
        let rows = match form {
            MonolithicForm::Fp8 => inputs.fp8_scratch(&sizes, ex)?,
            MonolithicForm::Tensor => inputs.scratch(&sizes, DType::F32, ex)?,
            _ => inputs.scratch(&sizes, DType::BF16, ex)?,
        };
        let at = slots.at.cast_const();
        let counts = bucket_counts(num_local, ex)?.cast_const();
        let listed = Buckets { at, counts, places: tokens };
        if form == MonolithicForm::Fp8 {
            inputs.fp8(&sizes, &listed, &rows, ex)?;
            clear_bucket_counts(num_local, ex)?;
        } else {
            inputs.tensor(&sizes, listed, &rows, ex)?;
        }
        Ok(Self { inputs, rows, _ids: ids, _weights: weights })
    }
}
