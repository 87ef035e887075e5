//! Runs of many steps in which experts move again and again. Every text must be equal to the text before the first
//! move, and memory must not grow.
//!
//! The same requests are run in every round, so that rounds have the same steps and only the places of experts differ.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use moe_engine::engine::{DpEngine, Request, RequestId};
use moe_layer::{MoveRound, MoveStatus};

/// How long, and how often experts move.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// Steps at least; the last round is finished.
    pub steps: usize,
    /// Steps from one rebalance to the next. Each moves all experts of all layers.
    pub every: usize,
    /// Requests of a round.
    pub requests: usize,
    /// New tokens of each.
    pub tokens: usize,
}

/// The result of such a run.
#[derive(Clone, Debug, Default)]
pub struct Soaked {
    /// Steps of the rounds in which experts moved.
    pub steps: usize,
    /// How often all experts moved.
    pub rebalances: usize,
    /// Texts after the first move, and how many of them differ from the text before it.
    pub texts: [usize; 2],
    /// Bytes in use, as `memory` counts them, after a tenth of the steps and at the end.
    pub memory: [Vec<u64>; 2],
    /// CUDA graphs that were recorded before the first move, and at the end.
    pub graphs: [u64; 2],
    /// Seconds of the whole run.
    pub seconds: f64,
}

/// Runs it on an engine whose model has `layers` MoE layers and `vocab` tokens in its vocabulary.
///
/// # Errors
/// A step or a move that fails; a move that is rolled back.
pub fn soak(
    engine: &mut DpEngine<'_>,
    (layers, vocab): (usize, usize),
    soak: &Soak,
    memory: impl Fn() -> Vec<u64>,
) -> Result<Soaked> {
    let start = Instant::now();
    let mut soaked = Soaked::default();
    // The second round finds every graph and every buffer.
    let want = round(engine, vocab, soak, |_| Ok(()))?;
    ensure!(round(engine, vocab, soak, |_| Ok(()))? == want, "two rounds differ although nothing has moved");
    soaked.graphs[0] = engine.stats().graphs;
    while soaked.steps < soak.steps {
        let got = round(engine, vocab, soak, |engine| {
            soaked.steps += 1;
            if soaked.steps.is_multiple_of(soak.every) {
                rebalance(engine, layers, soaked.rebalances)?;
                soaked.rebalances += 1;
            }
            if soaked.steps == soak.steps.div_ceil(10) {
                soaked.memory[0] = memory();
            }
            Ok(())
        })?;
        soaked.texts[0] += want.len();
        soaked.texts[1] += want.iter().zip(&got).filter(|(want, got)| want != got).count();
    }
    soaked.memory[1] = memory();
    soaked.graphs[1] = engine.stats().graphs;
    soaked.seconds = start.elapsed().as_secs_f64();
    Ok(soaked)
}

/// The tokens of all requests; `before` is called before each step.
fn round(
    engine: &mut DpEngine<'_>,
    vocab: usize,
    soak: &Soak,
    mut before: impl FnMut(&mut DpEngine<'_>) -> Result<()>,
) -> Result<Vec<Vec<u32>>> {
    let mut tokens = BTreeMap::<RequestId, Vec<u32>>::new();
    for i in 0..soak.requests {
        let prompt = (0..3 + i % 5).map(|j| ((i * 31 + j * 7) % vocab) as u32).collect();
        let request = Request { max_tokens: Some(soak.tokens), ignore_eos: true, ..Request::new(prompt) };
        tokens.insert(engine.add(request)?, Vec::new());
    }
    while !engine.is_idle() {
        before(engine)?;
        for output in engine.step()? {
            tokens.entry(output.request).or_default().extend(output.token_id);
        }
    }
    ensure!(tokens.values().all(|tokens| tokens.len() == soak.tokens), "a text ended early");
    Ok(tokens.into_values().collect())
}

/// Gives every slot another expert.
fn rebalance(engine: &mut DpEngine<'_>, layers: usize, turn: usize) -> Result<()> {
    for layer in 0..layers {
        let map = engine.expert_map(layer).context("a layer without a map")?;
        let experts = map.num_experts() as u32;
        // All experts are renumbered in the same way, so that every expert keeps a slot and no rank holds one twice.
        let by = 1 + (turn + layer) as u32 % (experts - 1);
        let phy2log = map.phy2log().iter().map(|&expert| (expert + by) % experts).collect();
        let round = MoveRound { layer, phy2log, sole: Vec::new(), bytes: usize::MAX, limit: Duration::MAX };
        let status = engine.move_experts(&round)?;
        ensure!(status == MoveStatus::Moved, "layer {layer}: {status:?}");
    }
    Ok(())
}

/// Bytes of memory that this process uses.
///
/// # Errors
/// The system does not report it.
pub fn resident_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}
