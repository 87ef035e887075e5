//! CPU experts over token rows: slots are sorted by expert, computed in groups, and each row is
//! written to its own slot of the output.

use candle_core::{DType, Result};
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::{
    Activation, ActivationFormat, Dispatched, Exec, ExpertGroups, ExpertsSpec, NO_EXPERT, View, ViewMut,
    group_slots_into,
};
use rayon::prelude::*;

use super::CpuMlp;
use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::reason::Reason;
use crate::weights::{ExpertWeights, ExpertsShape};

/// Experts on the CPU in the Standard format: token rows with the ids of their slots.
///
/// Weights in f32, bf16 or f16; sums in f32; the activation is rounded once to the weights' dtype.
#[derive(Clone, Debug)]
pub struct CpuExperts(CpuMlp);

impl CpuExperts {
    /// Experts with these weights, which must be on the CPU.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        CpuMlp::new(Backend::Cpu.name(), weights, activation).map(Self)
    }

    /// Experts of which `tp_size` ranks hold an equal part of the intermediate size each: they
    /// return the sums of their segments apart, so that whoever gathers them adds all in order.
    ///
    /// # Errors
    /// A size whose segments the ranks do not divide; a bias of w2.
    pub fn with_tp(self, tp_size: usize) -> Result<Self> {
        self.0.cut(Backend::Cpu.name(), tp_size).map(Self)
    }
}

impl Experts for CpuExperts {
    fn name(&self) -> &str {
        Backend::Cpu.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn shape(&self) -> ExpertsShape {
        self.0.shape()
    }

    fn segments(&self) -> Option<usize> {
        self.0.segments
    }

    fn supports(&self, spec: &ExpertsSpec) -> std::result::Result<(), Reason> {
        Backend::Cpu.supports(spec)
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let shape = self.shape();
        Reservation::new()
            .with(DType::U32, &[shape.num_local_experts + 1])?
            .with(DType::U32, &[max_tokens, top_k])?
            .with(DType::U32, &[max_tokens, top_k])?
            .with(shape.dtype, &[max_tokens, top_k, shape.intermediate_size])
    }

    fn apply(&self, dispatched: &Dispatched, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (name, shape) = (self.name(), self.shape());
        self.0.check_rows(name, self.activation_format(), dispatched)?;
        let rows = dispatched.rows.view();
        let (tokens, hidden) = expect_matrix(name, "rows", &rows)?;
        let ids = dispatched.topk_ids()?;
        let (_, top_k) = expect_matrix(name, "topk_ids", &ids)?;
        expect_dims(name, "topk_ids", &ids, &[tokens, top_k])?;
        expect_dtype(name, "out", &out, DType::F32)?;
        expect_dims(name, "out", &out, &self.out_dims(dispatched)?)?;

        let mut offsets = ex.scratch(DType::U32, &[shape.num_local_experts + 1])?;
        let mut slots = ex.scratch(DType::U32, &[ids.elem_count()])?;
        group_slots_into(ids, dispatched.expert_map, offsets.view_mut(), slots.view_mut(), ex)?;
        let used = offsets.view().cpu::<u32>()?.last().map_or(0, |&end| end as usize);
        let slots = slots.view().narrow(0, used)?;
        let mut in_rows = ex.scratch(DType::U32, &[used])?;
        for (row, slot) in in_rows.view_mut().cpu_mut::<u32>()?.iter_mut().zip(slots.cpu::<u32>()?) {
            *row = slot / top_k as u32;
        }
        if used < ids.elem_count() {
            zero_absent(ids, dispatched.expert_map, &mut out, ex)?;
        }
        let groups = ExpertGroups { offsets: offsets.view(), in_rows: in_rows.view(), out_rows: slots };
        self.0.run(rows, &groups, out.reshape(&[self.0.segments.unwrap_or(1) * tokens * top_k, hidden])?, ex)
    }
}

/// Zeroes the rows of slots without a local expert. The ids have been checked against the map.
fn zero_absent(ids: View, map: Option<View>, out: &mut ViewMut, ex: &Exec) -> Result<()> {
    let hidden = out.dims().last().copied().unwrap_or(0).max(1);
    let map = map.map(|m| m.cpu::<i32>()).transpose()?;
    let elsewhere = |id: u32| map.is_some_and(|m| m.get(id as usize).is_none_or(|&slot| slot < 0));
    let (ids, out) = (ids.cpu::<u32>()?, out.cpu_mut::<f32>()?);
    ex.install(|| {
        // The slots of each segment.
        let rows = out.par_chunks_mut(hidden).enumerate().map(|(i, row)| (row, ids[i % ids.len()]));
        rows.filter(|(_, id)| *id == NO_EXPERT || elsewhere(*id)).for_each(|(row, _)| row.fill(0.));
    });
    Ok(())
}
