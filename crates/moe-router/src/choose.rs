//! Chooses the experts of a step's rows, row by row over threads, or by the caller's function.

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, NO_EXPERT, TensorView, ViewMut};
use rayon::prelude::*;

use crate::custom::RoutingFunction;
use crate::io::RouteInput;
use crate::router::Router;
use crate::row::{RowRouter, RowScratch, StepRows};

/// With fewer logits than this in a call, one thread does the work, because dividing it would cost more than it saves.
const PARALLEL_MIN: usize = 1 << 15;

impl Router {
    /// Fills the routed slots of every row.
    pub(crate) fn choose(
        &self,
        input: &RouteInput<'_>,
        rows: StepRows<'_>,
        topk_ids: &mut ViewMut<'_>,
        topk_weights: &mut ViewMut<'_>,
        ex: &Exec,
    ) -> Result<()> {
        let bias = self.bias.as_ref().map(TensorView::new).transpose()?;
        let table = self.table.as_ref().map(TensorView::new).transpose()?;
        let router = RowRouter {
            config: &self.config,
            bias: bias.as_ref().map(|b| b.view()?.cpu()).transpose()?,
            table: table.as_ref().map(|t| t.view()?.cpu()).transpose()?,
            strategy: self.strategy.as_deref(),
            rows,
        };
        let experts = self.config.num_logits();
        let slots = self.config.num_slots();
        let logits = input.logits.cpu::<f32>()?;
        let ids = topk_ids.cpu_mut::<u32>()?;
        let weights = topk_weights.cpu_mut::<f32>()?;
        let tokens = input.logits.rows();
        let threads = if tokens * experts < PARALLEL_MIN { 1 } else { ex.num_threads() };
        let per_thread = tokens.div_ceil(threads).max(1);
        let chunks = tokens.div_ceil(per_thread);

        let (floats, groups) = RowScratch::sizes(&self.config);
        let mut float_scratch = ex.scratch(DType::F32, &[chunks, floats])?;
        let mut group_scratch = ex.scratch(DType::U32, &[chunks, groups])?;
        let mut float_scratch = float_scratch.view_mut();
        let mut group_scratch = group_scratch.view_mut();
        let work = float_scratch.cpu_mut::<f32>()?.par_chunks_mut(floats);
        let work = work.zip(group_scratch.cpu_mut::<u32>()?.par_chunks_mut(groups));
        let work = work.zip(logits.par_chunks(per_thread * experts));
        let work = work.zip(ids.par_chunks_mut(per_thread * slots));
        let work = work.zip(weights.par_chunks_mut(per_thread * slots));
        // The first fault in the order of rows is reported, whichever thread finds one first.
        let fault = ex.install(|| {
            work.enumerate().find_map_first(|(chunk, ((((floats, groups), logits), ids), weights))| {
                let mut scratch = RowScratch::new(&self.config, floats, groups);
                router.route_rows(chunk * per_thread, logits, &mut scratch, ids, weights).err()
            })
        });
        fault.map_or(Ok(()), Err)
    }

    /// Fills the routed slots by calling the caller's function.
    pub(crate) fn choose_by_function(
        &self,
        function: &dyn RoutingFunction,
        input: &RouteInput<'_>,
        rows: StepRows<'_>,
        topk_ids: &mut ViewMut<'_>,
        topk_weights: &mut ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let tokens = topk_ids.rows();
        let experts = self.config.num_logits();
        let top_k = self.config.top_k;
        let slots = self.config.num_slots();
        let logits = input.logits.cpu::<f32>()?.chunks_exact(experts);
        let sound = logits.enumerate().map(|(t, logits)| rows.is_sound(t, logits));
        let sound = sound.collect::<Result<Vec<bool>>>()?;
        let mut ids = ex.scratch(DType::U32, &[tokens, top_k])?;
        let mut weights = ex.scratch(DType::F32, &[tokens, top_k])?;
        function.select(&self.config, input, ids.view_mut(), ex)?;
        for (t, row) in ids.view_mut().cpu_mut::<u32>()?.chunks_exact_mut(top_k).enumerate() {
            match rows.forced(t)? {
                forced if !sound[t] => StepRows::spoil(forced, row, &mut []),
                Some(forced) => row.copy_from_slice(forced),
                None => rows.check_chosen(t, function.name(), row)?,
            }
        }
        function.weigh(&self.config, input, ids.view(), weights.view_mut(), ex)?;
        let chosen = ids.view().cpu::<u32>()?.chunks_exact(top_k);
        let weighed = weights.view().cpu::<f32>()?.chunks_exact(top_k);
        let out = topk_ids.cpu_mut::<u32>()?.chunks_exact_mut(slots);
        let out = out.zip(topk_weights.cpu_mut::<f32>()?.chunks_exact_mut(slots));
        for (t, ((ids, weights), (out_ids, out_weights))) in chosen.zip(weighed).zip(out).enumerate() {
            if !sound[t] {
                StepRows::spoil(Some(ids), &mut out_ids[..top_k], &mut out_weights[..top_k]);
                continue;
            }
            if let Some(k) = weights.iter().position(|w| !w.is_finite()) {
                let name = function.name();
                let place = rows.place(t);
                bail!("routing function `{name}`, {place}: the weight of slot {k} is {}", weights[k])
            }
            out_ids[..top_k].copy_from_slice(ids);
            for ((out, &w), &id) in out_weights.iter_mut().zip(weights).zip(ids) {
                *out = if id == NO_EXPERT { 0.0 } else { w };
            }
        }
        Ok(())
    }
}
