//! The data of a step other than its tensors: token ids, routing capture and replay, heat.
//!
//! Capture, replay and heat all use *logical* experts and MoE layers counted from 0 (dense layers do not count). So a
//! recording under one placement or parallel geometry can be replayed under another.

use std::sync::Arc;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::step_routing::DeviceRouting;

/// The id that means no expert: in padding rows and masked slots.
pub const NO_EXPERT: u32 = u32::MAX;

/// Routing decisions of a run of tokens: logical expert ids, shape [T, L_moe, K].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RoutedIds")]
pub struct RoutedExperts {
    tokens: usize,
    layers: usize,
    top_k: usize,
    ids: Vec<u32>,
}

/// A recording as it was read; its sizes may contradict each other.
#[derive(Deserialize)]
struct RoutedIds {
    tokens: usize,
    layers: usize,
    top_k: usize,
    ids: Vec<u32>,
}

impl TryFrom<RoutedIds> for RoutedExperts {
    type Error = candle_core::Error;

    fn try_from(RoutedIds { tokens, layers, top_k, ids }: RoutedIds) -> Result<Self> {
        Self::from_ids(tokens, layers, top_k, ids)
    }
}

impl RoutedExperts {
    /// A recording with every id [`NO_EXPERT`].
    pub fn empty(tokens: usize, layers: usize, top_k: usize) -> Result<Self> {
        let Some(len) = tokens.checked_mul(layers).and_then(|n| n.checked_mul(top_k)) else {
            bail!("routed experts of {tokens} tokens, {layers} layers and top-{top_k} overflow")
        };
        Ok(Self { tokens, layers, top_k, ids: vec![NO_EXPERT; len] })
    }

    /// A recording from ids of shape [tokens, layers, top_k].
    pub fn from_ids(tokens: usize, layers: usize, top_k: usize, ids: Vec<u32>) -> Result<Self> {
        if Some(ids.len()) != tokens.checked_mul(layers).and_then(|n| n.checked_mul(top_k)) {
            bail!("routed experts [{tokens}, {layers}, {top_k}] do not match {} ids", ids.len())
        }
        Ok(Self { tokens, layers, top_k, ids })
    }

    /// Number of tokens T.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of MoE layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Slots per token and layer.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// All ids, [T, L_moe, K] row-major.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The ids of one token in one MoE layer.
    pub fn get(&self, token: usize, layer: usize) -> Result<&[u32]> {
        let at = self.offset(token, layer)?;
        Ok(&self.ids[at..at + self.top_k])
    }

    /// Records the ids of one token in one MoE layer; `ids` holds exactly K of them.
    pub fn set(&mut self, token: usize, layer: usize, ids: &[u32]) -> Result<()> {
        let at = self.offset(token, layer)?;
        if ids.len() != self.top_k {
            bail!("routed experts hold {} ids per token and layer, got {}", self.top_k, ids.len())
        }
        self.ids[at..at + self.top_k].copy_from_slice(ids);
        Ok(())
    }

    /// Fails unless these choices can be forced on `tokens` rows of a model with this number of MoE layers, choices and
    /// experts. Ids must exist, each at most once in a row.
    ///
    /// # Errors
    /// Other sizes; an id that does not exist or occurs twice; the message says where.
    pub fn check(&self, tokens: usize, layers: usize, top_k: usize, experts: usize) -> Result<()> {
        if (self.tokens, self.layers, self.top_k) != (tokens, layers, top_k) {
            bail!(
                "replayed routing: expected [{tokens}, {layers}, {top_k}], got [{}, {}, {}]",
                self.tokens,
                self.layers,
                self.top_k
            )
        }
        for (at, row) in self.ids.chunks_exact(top_k.max(1)).enumerate() {
            for (k, &id) in row.iter().enumerate().filter(|(_, id)| **id != NO_EXPERT) {
                let fault = match id as usize >= experts {
                    true => format!("expected ids below {experts}"),
                    false if row[..k].contains(&id) => "expected each id once".to_string(),
                    false => continue,
                };
                bail!(
                    "replayed routing, token {}, MoE layer {}: {fault}, got {row:?}",
                    at / layers,
                    at % layers
                )
            }
        }
        Ok(())
    }

    /// Appends the tokens of `other`, which has the same layers and top-k.
    pub fn extend(&mut self, other: &RoutedExperts) -> Result<()> {
        if (self.layers, self.top_k) != (other.layers, other.top_k) {
            bail!(
                "cannot append routed experts of {} layers, top-{} to {} layers, top-{}",
                other.layers,
                other.top_k,
                self.layers,
                self.top_k
            )
        }
        self.ids.extend_from_slice(&other.ids);
        self.tokens += other.tokens;
        Ok(())
    }

    fn offset(&self, token: usize, layer: usize) -> Result<usize> {
        if token >= self.tokens || layer >= self.layers {
            bail!(
                "token {token}, MoE layer {layer} is outside of routed experts of {} tokens and {} layers",
                self.tokens,
                self.layers
            )
        }
        Ok((token * self.layers + layer) * self.top_k)
    }
}

/// Tokens routed to each logical expert, [L_moe, E].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "HeatCounts")]
pub struct ExpertHeat {
    experts: usize,
    counts: Vec<u64>,
}

/// Counts as they were read, which may not be a whole number of layers.
#[derive(Deserialize)]
struct HeatCounts {
    experts: usize,
    counts: Vec<u64>,
}

impl TryFrom<HeatCounts> for ExpertHeat {
    type Error = candle_core::Error;

    fn try_from(HeatCounts { experts, counts }: HeatCounts) -> Result<Self> {
        Self::from_counts(experts, counts)
    }
}

impl ExpertHeat {
    /// All zero.
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { experts, counts: vec![0; layers * experts] }
    }

    /// Counts [L_moe, E], row-major.
    ///
    /// # Errors
    /// Counts that are no multiple of E.
    pub fn from_counts(experts: usize, counts: Vec<u64>) -> Result<Self> {
        if experts == 0 && !counts.is_empty() || experts > 0 && !counts.len().is_multiple_of(experts) {
            bail!("expert heat of {experts} experts does not match {} counts", counts.len())
        }
        Ok(Self { experts, counts })
    }

    /// Counts of one MoE layer, \[E\]; empty if the layer is unknown.
    pub fn layer(&self, layer: usize) -> &[u64] {
        let at = layer * self.experts;
        self.counts.get(at..at + self.experts).unwrap_or(&[])
    }

    /// Adds the counts of another part of the same step. Counts of a model with other sizes are ignored.
    pub fn add(&mut self, other: &ExpertHeat) {
        if self.experts == other.experts {
            self.counts
                .iter_mut()
                .zip(&other.counts)
                .for_each(|(count, n)| *count = count.saturating_add(*n));
        }
    }

    /// Number of experts of a layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Number of MoE layers.
    pub fn layers(&self) -> usize {
        self.counts.len().checked_div(self.experts).unwrap_or(0)
    }

    /// Counts the ids of one MoE layer. [`NO_EXPERT`] and ids that do not exist are ignored.
    pub fn record(&mut self, layer: usize, ids: &[u32]) {
        let at = layer * self.experts;
        let Some(counts) = self.counts.get_mut(at..at + self.experts) else { return };
        for &id in ids {
            if let Some(c) = counts.get_mut(id as usize) {
                *c += 1;
            }
        }
    }
}

/// The data of a step other than its tensors: what routing reads and what it records. Everything is off by default.
/// Modules with routing take it as an argument in addition to their [`Exec`](crate::Exec).
#[derive(Clone, Debug, Default)]
pub struct StepContext {
    /// Token ids of the step's rows, \[T\]; needed by hash routing.
    pub token_ids: Option<Arc<[u32]>>,
    /// Routing to force instead of choosing, with one token per row of the step. A row whose ids are all [`NO_EXPERT`]
    /// is routed freely.
    pub replay: Option<Arc<RoutedExperts>>,
    /// Routing is recorded here, one token per row of the step.
    pub capture: Option<RoutedExperts>,
    /// Expert counts are added here.
    pub heat: Option<ExpertHeat>,
    /// Replaces ids by an evenly spread pattern, for profiling; the seed varies it.
    pub force_balance: Option<u64>,
    /// The number of tokens that each rank of the expert-parallel group brings to the current call, if the ranks have
    /// agreed on it. With `None`, code that needs it asks the other ranks.
    pub rank_tokens: Option<Arc<[usize]>>,
    /// Whether the ranks have agreed that each of them only decodes.
    pub only_decode: bool,
    /// Whether the step has padding rows. If so, routing reads the number of valid rows on the device
    /// (`cuda::upload_step_into` has written it) and gives the other rows no expert.
    pub padded: bool,
    /// Number of the step; random routing (force-balance, simulation) differs from step to step.
    pub step: u64,
    /// The device arrays into which a step on a CUDA device writes its routing, and from which it reads forced choices.
    /// Its launches then do not use the four fields in host memory.
    pub routing: DeviceRouting,
    /// Whether some rank forces routing in this step, so that all ranks run launches that read forced choices.
    pub some_replay: bool,
    /// Whether every rank keeps the whole residual stream, because one of them outputs it. Otherwise ranks that have
    /// the same tokens may each keep some of its rows. All ranks have the same value.
    pub whole_residual: bool,
    /// Whether a row with router logits that are not finite lets the step go on on the CPU. Such a row gets the first
    /// experts with weights of NaN, so its own results are NaN and the other rows keep theirs. On a GPU no row ends a
    /// step. All ranks have the same value.
    pub isolate_faults: bool,
    /// The largest number of rows of logits in any step that the caller will run, if it is known. Their buffers on a
    /// GPU are then allocated once. All ranks have the same value.
    pub most_logits: usize,
}

impl StepContext {
    /// What this step records or forces through host memory, if anything. Outside of the CPU such a step uses a router
    /// that waits for the device. [`DeviceRouting`] needs no such router.
    pub fn asks_of_router(&self) -> Option<&'static str> {
        let asked = [
            ("routed-experts capture", self.capture.is_some()),
            ("expert counts", self.heat.is_some()),
            ("forced replay of routing", self.replay.is_some()),
            ("force-balance", self.force_balance.is_some()),
        ];
        asked.into_iter().find_map(|(what, asked)| asked.then_some(what))
    }
}
