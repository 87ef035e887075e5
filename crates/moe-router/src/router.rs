//! The router: a configuration with its parameters, checked once.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_kernels::Unread;

use crate::config::{RouterConfig, Selection};
use crate::custom::RoutingFunction;
use crate::error::refuse;
use crate::score::{ids_fault, score_row};
use crate::simulate::{RoutingStrategy, Strategies};

/// The parameters that a router needs in addition to its configuration. Parameters that the configuration does not use
/// must stay at their defaults; any other value is an error.
#[derive(Clone, Default)]
pub struct RouterParams {
    /// `e_score_correction_bias` [num_experts + num_zero_experts] f32, with
    /// [`RouterConfig::correction_bias`].
    pub correction_bias: Option<Tensor>,
    /// Expert ids by token id, [vocab_size, top_k] of an integer dtype, with
    /// [`Selection::Hash`]. The ids of a row are distinct.
    pub hash_table: Option<Tensor>,
    /// The routing function, with [`Selection::Custom`].
    pub function: Option<Arc<dyn RoutingFunction>>,
    /// The strategies for [`Selection::Simulated`], which names one of them.
    pub strategies: Strategies,
}

/// A routing method with its parameters.
///
/// ```
/// use moe_router::candle::{Device, Tensor};
/// use moe_router::{Router, RouterConfig, RouterParams, Scoring};
///
/// // Sigmoid scores; experts are chosen by score + bias, and weighted by the score alone.
/// let config = RouterConfig {
///     scoring: Scoring::Sigmoid,
///     correction_bias: true,
///     renormalize: true,
///     ..RouterConfig::new(4, 2)
/// };
/// let bias = Tensor::new(&[0f32, 0., 0., 1.], &Device::Cpu)?;
/// let params = RouterParams { correction_bias: Some(bias), ..RouterParams::default() };
/// let router = Router::new(config, params)?;
/// let logits = Tensor::new(&[[1f32, 0., -1., 0.]], &Device::Cpu)?; // [T, E]
/// let routed = router.route(&logits)?;
/// assert_eq!(routed.topk_ids.to_vec2::<u32>()?, [[3, 0]]);
/// let weights = routed.topk_weights.to_vec2::<f32>()?;
/// assert!((weights[0][0] - 0.5 / (0.5 + 0.731)).abs() < 1e-3 && weights[0][1] > weights[0][0]);
/// # Ok::<(), moe_router::candle::Error>(())
/// ```
#[derive(Clone)]
pub struct Router {
    pub(crate) config: RouterConfig,
    pub(crate) bias: Option<Tensor>,
    pub(crate) table: Option<Tensor>,
    pub(crate) function: Option<Arc<dyn RoutingFunction>>,
    pub(crate) strategy: Option<Arc<dyn RoutingStrategy>>,
}

impl Router {
    /// A router of this method.
    ///
    /// # Errors
    ///
    /// An invalid configuration, or parameters that do not fit it: a parameter that is missing or not used, a bias that
    /// is not f32 or not finite, a table with bad ids, an unknown strategy.
    pub fn new(config: RouterConfig, params: RouterParams) -> Result<Self> {
        config.validate()?;
        let bias = checked_bias(&config, params.correction_bias)?;
        let table = checked_table(&config, params.hash_table)?;
        let is_custom = config.selection == Selection::Custom;
        wanted(&config, is_custom, params.function.is_some(), FUNCTION)?;
        let strategy = match &config.selection {
            Selection::Simulated { strategy, .. } => Some(params.strategies.get(strategy)?),
            _ => None,
        };
        Ok(Self { config, bias, table, function: params.function, strategy })
    }

    /// Loads a router with its parameters from a checkpoint. `vb` has the gate's prefix (`model.layers.N.mlp.gate`).
    ///
    /// Reads `e_score_correction_bias` (kept in f32 whatever the dtype of `vb`) with
    /// [`RouterConfig::correction_bias`], and `tid2eid` with [`Selection::Hash`]. The gate's
    /// weight belongs to the block.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new); a missing tensor, with its name; a tensor of another routing method: a bias of
    /// the gate, an `e_score_correction_bias` or a `tid2eid` that the configuration does not use. If the configuration
    /// uses a bias of the gate, the block loads it like the gate's weight.
    pub fn load(config: &RouterConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        refuse_unread(config, &vb)?;
        let get = |name: &str, dims: &[usize], dtype: DType| {
            let tensor = vb.get_with_hints_dtype(dims, name, Default::default(), dtype);
            tensor.map_err(|e| {
                let prefix = vb.prefix();
                candle_core::Error::Msg(format!(
                    "{config_needs} `{prefix}.{name}` {dims:?}: {e}",
                    config_needs = "the router's configuration calls for"
                ))
                .bt()
            })
        };
        let mut params = RouterParams::default();
        if config.correction_bias {
            let dims = [config.num_logits()];
            params.correction_bias = Some(get("e_score_correction_bias", &dims, DType::F32)?);
        }
        if let Selection::Hash { vocab_size } = config.selection {
            params.hash_table = Some(get("tid2eid", &[vocab_size, config.top_k], DType::I64)?);
        }
        Self::new(config.clone(), params)
    }

    /// The configuration.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// The scores by which the experts of a row of `logits` \[E\] are chosen if there is a correction bias: score +
    /// bias. `None` if there is no correction bias.
    ///
    /// # Errors
    /// Another number of logits.
    pub fn biased_scores(&self, logits: &[f32]) -> Result<Option<Vec<f32>>> {
        let Some(bias) = &self.bias else { return Ok(None) };
        let bias: Vec<f32> = bias.to_vec1()?;
        if logits.len() != bias.len() {
            candle_core::bail!("biased scores: expected {} logits, got {}", bias.len(), logits.len())
        }
        let mut scores = vec![0.0; logits.len()];
        score_row(&self.config, logits, &mut scores);
        Ok(Some(scores.iter().zip(bias).map(|(score, bias)| score + bias).collect()))
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("config", &self.config).finish_non_exhaustive()
    }
}

const FUNCTION: [&str; 2] = ["needs a routing function", "does not use the routing function that was given"];
const TABLE: [&str; 2] = ["needs a hash table", "does not use the hash table that was given"];

/// Checks that a parameter is given if and only if it is wanted. `faults` are the texts of the two errors.
fn wanted(config: &RouterConfig, wanted: bool, given: bool, faults: [&'static str; 2]) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    let fault = if wanted { faults[0] } else { faults[1] };
    refuse!(Parameters, "{} selection {fault}", config.selection.name())
}

/// Checks that the checkpoint has no parameters of another routing method.
fn refuse_unread(config: &RouterConfig, vb: &VarBuilder) -> Result<()> {
    let mut unread = Unread::under(vb);
    if !config.gate_bias {
        unread.bias("bias");
    }
    unread.scales("weight");
    if !config.correction_bias {
        unread.tensor("e_score_correction_bias");
    }
    if !matches!(config.selection, Selection::Hash { .. }) {
        unread.tensor("tid2eid");
    }
    unread.refuse(
        "router",
        "e_score_correction_bias is read with `correction_bias`, tid2eid with hash selection; a bias of the gate goes to \
         `GateInput`, where `gate_bias` says that there is one",
    )
}

fn checked_bias(config: &RouterConfig, bias: Option<Tensor>) -> Result<Option<Tensor>> {
    let bias = match (config.correction_bias, bias) {
        (true, Some(bias)) => bias,
        (false, None) => return Ok(None),
        (true, None) => {
            refuse!(
                Parameters,
                "the router selects on score + bias, but no e_score_correction_bias was given"
            )
        }
        (false, Some(_)) => {
            refuse!(
                Parameters,
                "an e_score_correction_bias was given, but the router is configured without one"
            )
        }
    };
    if bias.dtype() != DType::F32 {
        bail!(
            "e_score_correction_bias must be f32, because a rounded bias changes routing; got {}",
            bias.dtype().as_str()
        )
    }
    let want = [config.num_logits()];
    if bias.dims() != want {
        bail!("expected e_score_correction_bias with dims {want:?}, got {:?}", bias.dims())
    }
    for (expert, b) in bias.to_vec1::<f32>()?.into_iter().enumerate() {
        if !b.is_finite() {
            bail!("e_score_correction_bias of expert {expert} is {b}; it must be finite")
        }
    }
    Ok(Some(bias.contiguous()?))
}

/// Returns the hash table as u32, after checking its ids.
fn checked_table(config: &RouterConfig, table: Option<Tensor>) -> Result<Option<Tensor>> {
    let Selection::Hash { vocab_size } = config.selection else {
        wanted(config, false, table.is_some(), TABLE)?;
        return Ok(None);
    };
    let Some(table) = table else {
        refuse!(Parameters, "{} selection {}", config.selection.name(), TABLE[0])
    };
    if !table.dtype().is_int() {
        bail!("the hash table must hold integers, got dtype {}", table.dtype().as_str())
    }
    let want = [vocab_size, config.top_k];
    if table.dims() != want {
        bail!("expected a hash table with dims {want:?}, got {:?}", table.dims())
    }
    let ids = table.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    if let Some(at) = ids.iter().position(|&id| !(0..config.num_experts as i64).contains(&id)) {
        let token = at / config.top_k;
        bail!(
            "hash table, token {token}: expert id {} is out of range, the router chooses among {} experts",
            ids[at],
            config.num_experts
        )
    }
    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    for (token, row) in ids.chunks_exact(config.top_k).enumerate() {
        if let Some(fault) = ids_fault(row, config.num_experts) {
            bail!("hash table, token {token}: {fault}")
        }
    }
    Ok(Some(Tensor::from_vec(ids, &want, table.device())?))
}
