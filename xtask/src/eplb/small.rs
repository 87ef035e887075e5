//! Small cases with optima proven elsewhere: does the policy reach and prove them?

use std::path::Path;

use anyhow::{Context, Result};
use moe_eplb::policy::Policy;
use moe_eplb::{Loads, Topology};
use serde_json::{Value, json};

use super::policy::objective_name;
use super::timing::timed;

/// Solves every case of `file`; prints the misses and a summary, returns a row per case.
pub fn run(file: &Path, policy: &dyn Policy, effort: u32, repeat: usize) -> Result<Vec<Value>> {
    let value: Value = serde_json::from_slice(&std::fs::read(file)?)
        .with_context(|| format!("bad small cases {}", file.display()))?;
    let cases = value["cases"].as_array().context("no array `cases`")?;
    let mut rows = Vec::new();
    let mut hits = 0;
    let mut known = 0;
    let mut proven = 0;
    let mut slowest = 0f64;
    for (index, case) in cases.iter().enumerate() {
        let number =
            |key: &str| case[key].as_u64().map(|v| v as usize).with_context(|| format!("no `{key}`"));
        let experts = number("experts")?;
        let devices = number("devices")?;
        let topology = Topology::new(experts, devices * number("slots_per_device")?, devices)?;
        let loads = case["loads"].as_array().context("no `loads`")?;
        let loads: Vec<f64> = loads.iter().map(|v| v.as_f64().unwrap_or(f64::NAN)).collect();
        let mean = loads.iter().sum::<f64>() / devices as f64;
        let loads = Loads::aggregate(1, experts, &loads)?;
        let (plan, timing) = timed(repeat, || policy.plan(&topology, &loads, None))?;
        let certificate = plan.certificates[0];
        let peak = certificate.par * mean;
        slowest = slowest.max(timing.solve_ms);
        proven += usize::from(certificate.is_optimal());
        let best = case["best_known"].as_f64().unwrap_or(f64::NAN);
        if let Some(optimum) = case["optimum"].as_f64() {
            known += 1;
            hits += usize::from((peak - optimum).abs() <= 1e-6 * optimum);
        }
        if peak > best * (1.0 + 1e-6) || !certificate.is_optimal() {
            println!("small case {index}: peak {peak:.4}, best known {best:.4}, {:?}", certificate.proof);
        }
        rows.push(json!({
            "workload": format!("small/{index}"),
            "policy": policy.name(),
            "objective": objective_name(policy.objective()),
            "effort": effort,
            "par_mean": certificate.par,
            "lower_bound_mean": certificate.lower_bound,
            "peak": peak,
            "known_optimum": case["optimum"],
            "solve_ms": timing.solve_ms,
            "optimal": certificate.is_optimal(),
        }));
    }
    println!(
        "{} small cases: {hits}/{known} known optima reached, {proven} proven here, slowest {slowest:.2} ms",
        cases.len()
    );
    Ok(rows)
}
