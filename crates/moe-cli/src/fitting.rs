//! The memory that a model needs, and the quantised variants on the hub that fit this machine. It is a part of
//! `inspect`.

use std::path::Path;

use anyhow::Result;
use indicatif::BinaryBytes;
use model_runtime::Config;
use model_runtime::checkpoint::Configs;
use moe_engine::engine::host_memory;
use moe_engine::{MemoryPlan, ModelSpec, RunConfig, WeightForms};
use serde_json::{Map, Value, json};
use tracing::warn;

use crate::hub::{Located, Variant};
use crate::{Program, devices, error};

/// The name of the fact that lists the variants. In JSON it is a list; in the table each variant has a line.
pub const VARIANTS: &str = "quantised variants";

/// The memory that a run of this program has: the memory of the smallest GPU, or without GPUs the free memory of the
/// host.
struct Memory {
    bytes: Option<u64>,
    on_gpu: bool,
}

impl Memory {
    fn here() -> Self {
        let gpu = devices::smallest_gpu();
        Self { bytes: gpu.or_else(host_memory), on_gpu: gpu.is_some() }
    }

    /// Whether the weights of a plan fit. `None` if the system does not report its memory.
    fn fits(&self, plan: &MemoryPlan) -> Option<bool> {
        Some(plan.to_load(self.on_gpu) < self.bytes?)
    }
}

/// Adds the memory for loading with these settings, for a token, and for the weights in forms with fewer bits.
///
/// # Errors
/// A quantisation that cannot be read, in the files of `dir` or in a GGUF file.
pub fn needs(
    model: &dyn ModelSpec,
    config: &Config,
    dir: &Path,
    settings: &RunConfig,
    facts: &mut Map<String, Value>,
) -> Result<()> {
    let quantisation = settings.held(Configs::read(dir)?.quantisation)?;
    let plan = MemoryPlan::of(model, config, quantisation.as_ref())?;
    facts.insert("to load bytes".into(), plan.to_load(Memory::here().on_gpu).into());
    facts.insert("KV cache a token bytes".into(), plan.cache_of_token.into());
    if quantisation.is_none() {
        let forms = WeightForms::of(model, config)?;
        facts.insert("weights in bf16 bytes".into(), forms.bf16.into());
        facts.insert("weights in FP8 bytes".into(), forms.fp8.into());
        facts.insert("weights in int4 bytes".into(), forms.int4.into());
    }
    Ok(())
}

/// Adds the quantised variants that the hub knows of a model in floats, what they need, and the one to choose: the
/// largest that fits. If the hub cannot be asked, this is only a warning.
pub fn variants(program: &Program, located: &Located, facts: &mut Map<String, Value>) {
    let published = located.variants().unwrap_or_else(|e| {
        warn!("the hub does not tell which quantised variants there are: {}", error::describe(&e));
        Vec::new()
    });
    if published.is_empty() {
        return;
    }
    let memory = Memory::here();
    let seen: Vec<(&Variant, Result<(String, MemoryPlan)>)> =
        published.iter().map(|variant| (variant, plan(program, variant))).collect();
    let best = seen.iter().filter_map(|(variant, plan)| {
        let (_, plan) = plan.as_ref().ok()?;
        memory.fits(plan)?.then_some((plan.weights, &variant.id))
    });
    let best = best.max().map(|(_, id)| id.clone());
    let listed: Vec<Value> =
        seen.iter().map(|(variant, plan)| described(&variant.id, plan, &memory)).collect();
    facts.insert(VARIANTS.into(), listed.into());
    facts.insert("variant that fits".into(), best.unwrap_or_else(|| "none of these".into()).into());
}

/// Returns how a variant is quantised, and the memory that it needs.
///
/// # Errors
/// The reason why this program does not run it.
fn plan(program: &Program, variant: &Variant) -> Result<(String, MemoryPlan)> {
    let config = variant.config.as_ref().map_err(|reason| anyhow::anyhow!("{reason}"))?;
    let model = program.families.parse(config)?;
    let quantisation = config.quantisation()?;
    let plan = MemoryPlan::of(model.as_ref(), config, quantisation.as_ref())?;
    let method = quantisation.map_or("not quantised", |quantisation| quantisation.method());
    Ok((method.to_string(), plan))
}

fn described(id: &str, plan: &Result<(String, MemoryPlan)>, memory: &Memory) -> Value {
    match plan {
        Ok((method, plan)) => json!({
            "id": id,
            "quantisation": method,
            "to_load_bytes": plan.to_load(memory.on_gpu),
            "fits": memory.fits(plan),
        }),
        Err(why) => json!({"id": id, "why_not": error::describe(why)}),
    }
}

/// Writes a variant as a line.
pub fn line(variant: &Value) -> String {
    let text = |key: &str| variant[key].as_str().unwrap_or_default();
    if let Some(why) = variant["why_not"].as_str() {
        return format!("{}: does not run here: {why}", text("id"));
    }
    let bytes = BinaryBytes(variant["to_load_bytes"].as_u64().unwrap_or_default());
    let fits = match variant["fits"].as_bool() {
        Some(true) => ", fits",
        Some(false) => ", does not fit",
        None => "",
    };
    format!("{}: {}, {bytes}{fits}", text("id"), text("quantisation"))
}
