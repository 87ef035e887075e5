//! `parity`: compares a model with a reference recorded from Hugging Face transformers.
//!
//! In f32 nothing is replayed and everything must agree. In bf16 and f16 a token near a routing boundary may flip to
//! another expert, which does not show an error in the arithmetic. So the reference's routing is replayed (the ids come
//! from our selection rule on its router logits, the weights from our own logits), and the routing of our own logits is
//! compared separately.

mod compare;
mod judge;
mod reference;
mod run;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use model_runtime::{CausalLm, Config, Exec, MoeInfo, RoutedExperts, Router};
use moe_layer::{DType, Device, RouterSelection, Scoring, Tensor};

pub use judge::{LayerError, Report};

use compare::{Groups, top_k_gap};
use judge::{Rules, Selection, judge};
use reference::{Reference, Sizes};

/// Checks the header of a reference, before weights are read: whether it can belong to a model with this config.
pub fn check_reference(reference: &Path, config: &Config) -> Result<()> {
    Reference::check_header(reference, &Sizes::of_config(config)?)
}

/// Compares a model with a reference file.
pub fn compare(model: &dyn CausalLm, reference: &Path, ex: &mut Exec) -> Result<Report> {
    let info = model.info();
    let reference = Reference::read(reference, &Sizes::of(info))?;
    let dtype = info.dtype;
    let rules = Rules::new(dtype, matches!(ex.device(), Device::Cpu), reference.bf16_noise);

    let count = reference.generated.as_ref().map_or(0, |(count, _)| *count);
    let generated = run::greedy(model, &reference, count, ex)?;
    let replay = if dtype == DType::F32 {
        None
    } else {
        replay(&Routers { model, device: ex.device() }, &reference)?.map(Arc::new)
    };
    let ours = run::teacher_forced(model, &reference, replay, ex)?;
    let mut report =
        judge(info, &reference, &ours, &generated, &rules, &Routers { model, device: ex.device() })?;
    report.device = format!("{:?}", ex.device().location()).to_lowercase();
    report.dtype = dtype.as_str().to_string();
    Ok(report)
}

/// The reference's routing, if it has the router logits of every MoE layer.
fn replay(routers: &Routers<'_>, reference: &Reference) -> Result<Option<RoutedExperts>> {
    let Some(moe) = &routers.model.info().moe else { return Ok(None) };
    let tokens = reference.batch * reference.length;
    let mut routed = RoutedExperts::empty(tokens, moe.layers.len(), moe.top_k)?;
    for (m, layer) in moe.layers.iter().enumerate() {
        let Some(logits) = reference.router_logits.get(layer) else { return Ok(None) };
        for (token, ids) in routers.ids(*layer, logits)?.chunks_exact(moe.top_k).enumerate() {
            routed.set(token, m, ids)?;
        }
    }
    Ok(Some(routed))
}

/// The selection rule of a model's routers, whose parameters are on a device.
struct Routers<'a> {
    model: &'a dyn CausalLm,
    device: &'a Device,
}

impl<'a> Routers<'a> {
    fn router(&self, layer: usize) -> Result<(&'a Router, &'a MoeInfo)> {
        let info = self.model.info().moe.as_ref().context("the model has no routed experts")?;
        let m = info.layers.iter().position(|l| *l == layer).context("the layer has no router")?;
        Ok((self.model.router(m).context("the layer has no router")?, info))
    }
}

impl Selection for Routers<'_> {
    fn ids(&self, layer: usize, logits: &[f32]) -> Result<Vec<u32>> {
        let (router, info) = self.router(layer)?;
        let shape = (logits.len() / info.num_experts, info.num_experts);
        let routed = router.route(&Tensor::from_slice(logits, shape, self.device)?)?;
        // If shared experts are slots, they follow the routed ones.
        Ok(routed.topk_ids.narrow(1, 0, info.top_k)?.flatten_all()?.to_vec1()?)
    }

    fn gap(&self, layer: usize, row: &[f32]) -> Result<f32> {
        let (router, info) = self.router(layer)?;
        let biased = router.biased_scores(row)?;
        let keys = biased.as_deref().unwrap_or(row);
        let gap = match router.config().selection {
            RouterSelection::Grouped { num_expert_group, topk_group } => {
                let summed = if biased.is_some() { 2 } else { 1 };
                Groups { count: num_expert_group, kept: topk_group, summed }.gap(keys, info.top_k)
            }
            _ => top_k_gap(keys, info.top_k),
        };
        // Scores change less than their logits: sigmoid by at most a quarter, the others by at most half.
        let steepest = match router.config().scoring {
            _ if biased.is_none() => 1.0,
            Scoring::Sigmoid => 0.25,
            _ => 0.5,
        };
        Ok(gap / steepest)
    }
}
