//! The whole expert layer on CUDA: from token rows and their top-k to the weighted sum.

mod arguments;
mod combine;
mod epilogue;
mod fp8;
mod launch;
mod one_launch;
mod packs;
mod routed;

use candle_core::{DType, Result, bail};

use super::args::Output;
use super::{ExpertSlots, quant};
use crate::align::{group_token_slots_into, list_slots_into};
use crate::arguments::expect_dims;
use crate::buffer::Scratch;
use crate::exec::Exec;
use crate::operands::ExpertGroups;
use crate::plan::{EXPERTS_FROM_HOST, ExpertsCall, ExpertsForm, Form};
use crate::view::ViewMut;
use crate::weight::WeightView;
use arguments::check;
use launch::{Buckets, Inputs, Rows};
use one_launch::{Choice, OneLaunch};

pub use arguments::{ExpertLists, FusedExperts};
pub use epilogue::ExpertEpilogue;
pub use routed::{MonolithicExperts, monolithic_experts_into};

/// out\[t\] = Σ_k topk_weights[t, k] · w2\[e\] (silu(gate) · up), gate and up from w13\[e\] x\[t\], e =
/// topk_ids[t, k]; k ascending in f32. `args.epilogue` has biases and other activations. `out` is [T, H] f32 or bf16.
///
/// # Errors
/// A CPU context; a wrong dtype or wrong dims; H or I that are no multiple of 64.
pub fn fused_experts_into(args: &FusedExperts, out: ViewMut, ex: &mut Exec) -> Result<()> {
    run(args, None, out, ex)
}

/// The unweighted rows [T K, H] f32 of the slots, with the bits that [`fused_experts_into`] adds, for a caller that
/// adds them on the way to another rank. Rows of slots without a local expert are unspecified. `None` if the kernels of
/// this step add the rows themselves.
///
/// # Errors
/// The errors of [`fused_experts_into`].
pub fn expert_slot_rows(args: &FusedExperts, ex: &mut Exec) -> Result<Option<Scratch>> {
    let op = "expert_slot_rows";
    let sizes = check(op, args)?;
    if sizes.tokens == 0 || !sizes.leaves_slots(&ex.machine()) {
        return Ok(None);
    }
    ex.launched(|| ExpertsForm::Tensor.kernel(&sizes));
    let inputs = Inputs::of(op, args, ex)?;
    let rows = inputs.scratch(&sizes, DType::F32, ex)?;
    products(&inputs, args, &sizes, ExpertsForm::Tensor, &rows, ex)?;
    Ok(Some(rows.slot_rows.into_scratch()))
}

/// Both products over the slots of each expert. The slots are listed here, unless the caller has listed them.
fn products(
    inputs: &Inputs,
    args: &FusedExperts,
    sizes: &ExpertsCall,
    form: ExpertsForm,
    rows: &Rows,
    ex: &mut Exec,
) -> Result<()> {
    let listed;
    let lists = match args.lists {
        Some(lists) => lists,
        None => {
            listed = list(args, sizes, ex)?;
            ExpertLists { counts: listed[0].view(), slots: listed[1].view() }
        }
    };
    let slots = Buckets::of(inputs.op, &lists, sizes, ex)?;
    match form {
        ExpertsForm::Fp8 => inputs.fp8(sizes, &slots, rows, ex),
        _ => inputs.tensor(sizes, slots, rows, ex),
    }
}

/// [`fused_experts_into`] for more experts than the device has slots for. w13 and w2 have a matrix for each slot, and
/// ids name any expert. The launches bring the named experts into the slots, in several passes if there are more of
/// them than slots. The bits are the same as with all experts on the device, with the same kernel.
///
/// # Errors
/// The errors of [`fused_experts_into`]; an expert map or lists in addition to the slots; packs of another number of
/// slots; passes that no kernel of this device supports.
pub fn slotted_experts_into(
    slots: &ExpertSlots,
    args: &FusedExperts,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    if args.expert_map.is_some() || args.lists.is_some() {
        bail!("slotted_experts: slots have a map of their own and list themselves who is in them")
    }
    run(&FusedExperts { expert_map: Some(slots.map()), ..*args }, Some(slots), out, ex)
}

fn run(args: &FusedExperts, resident: Option<&ExpertSlots>, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
    let op = "fused_experts";
    let passes = resident.map_or(1, |slots| slots.passes(args.topk_ids.elem_count()));
    let sizes = ExpertsCall { passes, ..check(op, args)? };
    expect_dims(op, "out", &out, &[sizes.tokens, sizes.hidden])?;
    if !matches!(out.dtype(), DType::F32 | DType::BF16) {
        bail!("{op}: expected out of dtype f32 or bf16, got {}", out.dtype().as_str())
    }
    if sizes.tokens == 0 {
        return Ok(());
    }
    let Some(form) = ExpertsForm::choose(&sizes, &ex.machine()) else {
        if passes > 1 {
            bail!("{op}: no kernel of this device computes experts that come to it in {passes} passes")
        }
        bail!("{op}: no kernel of this device computes {sizes:?}")
    };
    let fetch = |pass: usize| match resident {
        Some(slots) => slots.fetch(pass == 0, args.topk_ids, [args.w13, args.w2]),
        None => Ok(()),
    };
    if resident.is_some() {
        ex.launched(|| EXPERTS_FROM_HOST);
    }
    fetch(0)?;
    ex.launched(|| form.kernel(&sizes));
    let output = Output::stored_as(out.dtype());
    let inputs = Inputs::of(op, args, ex)?;
    let out = ex.cuda(op)?.write(op, "out", &mut out)?;
    if form == ExpertsForm::OneLaunch {
        let FusedExperts { topk_ids, topk_weights, expert_map, epilogue, .. } = *args;
        let choice = Choice::Given(topk_ids, topk_weights);
        let x = inputs.x;
        let packs = inputs.packs;
        let launch = OneLaunch { op, x, norm: None, choice, packs, expert_map, sizes, epilogue };
        return launch.run((out, output), ex);
    }
    let mut scratch = match form {
        ExpertsForm::Fp8 => inputs.fp8_scratch(&sizes, ex)?,
        ExpertsForm::Wide => inputs.scratch(&sizes, DType::BF16, ex)?,
        _ => inputs.scratch(&sizes, DType::F32, ex)?,
    };
    match form {
        ExpertsForm::Stream => return inputs.stream(&sizes, scratch, (out, output), ex),
        ExpertsForm::Fp8 | ExpertsForm::Tensor | ExpertsForm::Wide => {
            for pass in 0..passes {
                if pass > 0 {
                    fetch(pass)?;
                }
                products(&inputs, args, &sizes, form, &scratch, ex)?;
            }
        }
        ExpertsForm::QuantAny => any_quantised(op, args, &sizes, &mut scratch, ex)?,
        _ => inputs.grouped(&sizes, &scratch, ex)?,
    }
    if passes > 1 {
        // All experts have been computed, and the map of the last pass does not name the experts of the earlier ones.
        // So the sum takes every expert.
        let whole = ExpertsCall { num_local: sizes.num_ids, ..sizes };
        let inputs = Inputs { expert_map: std::ptr::null(), ..inputs };
        return inputs.combine(&whole, &scratch, (out, output), ex);
    }
    inputs.combine(&sizes, &scratch, (out, output), ex)
}

/// Lists the slots of each local expert, where the caller has not: how many, and which.
fn list(args: &FusedExperts, sizes: &ExpertsCall, ex: &mut Exec) -> Result<[Scratch; 2]> {
    let mut counts = ex.scratch(DType::U32, &[sizes.num_local])?;
    let mut slots = ex.scratch(DType::U32, &[sizes.num_local, sizes.slots()])?;
    list_slots_into(args.topk_ids, args.expert_map, counts.view_mut(), slots.view_mut(), ex)?;
    Ok([counts, slots])
}

/// Both products by the kernels for quantised weights of any scheme: the rows of all slots that have a local expert.
fn any_quantised(
    op: &str,
    args: &FusedExperts,
    sizes: &ExpertsCall,
    rows: &mut Rows,
    ex: &mut Exec,
) -> Result<()> {
    let (WeightView::Quantised(w13), WeightView::Quantised(w2), Some(act)) =
        (args.w13, args.w2, &mut rows.act)
    else {
        bail!("{op}: expected quantised weights and activations in bf16")
    };
    let slots = sizes.slots();
    let mut offsets = ex.scratch(DType::U32, &[sizes.num_local + 1])?;
    let mut sorted = ex.scratch(DType::U32, &[slots])?;
    let mut in_rows = ex.scratch(DType::U32, &[slots])?;
    let to = (offsets.view_mut(), sorted.view_mut(), in_rows.view_mut());
    group_token_slots_into(args.topk_ids, args.expert_map, to.0, to.1, to.2, ex)?;
    let offsets = offsets.view();
    let in_rows = in_rows.view();
    let out_rows = sorted.view();
    let groups = ExpertGroups { offsets, in_rows, out_rows };
    let w13 = (w13.device_pack(op)?, args.epilogue.w13_bias);
    quant::gate_up(op, args.x, &groups, w13, args.epilogue.activation, act.view_mut(), ex)?;
    let w2 = (w2.device_pack(op)?, args.epilogue.w2_bias);
    let out = rows.slot_rows.view_mut().reshape(&[slots, sizes.hidden])?;
    quant::down(op, act.view(), &groups, w2, out, ex)
}
