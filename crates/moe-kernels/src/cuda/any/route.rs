//! Routing of any method, for the router of moe-router.

use std::ffi::c_void;
use std::ptr::null;

use candle_core::{DType, Result, bail};

use super::{ffi, int};
use crate::arguments::{expect_matrix, expect_optional};
use crate::cuda::args::{AnyRouteArgs, StepRoutingArgs};
use crate::exec::Exec;
use crate::step_routing::LayerRouting;
use crate::tags::GateScoring;
use crate::view::{View, ViewMut};

/// How [`route_into`] chooses.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// The best scores, plus bias.
    TopK,
    /// The best experts of the best groups.
    Grouped {
        /// Number of equal groups.
        groups: usize,
        /// Groups kept.
        topk_group: usize,
        /// Whether a group's score is the sum of its two best keys instead of the best one.
        top_two: bool,
    },
    /// The largest logits; the chosen ones are scored.
    RawLogits,
    /// Ids from a table [vocab, K] u32 by token id.
    Hash {
        /// The table.
        table: View<'a>,
        /// \[T\] u32.
        token_ids: View<'a>,
    },
    /// Ids and weights [T, K] that were chosen before; without weights these are 0.
    Given {
        /// The ids, u32.
        ids: View<'a>,
        /// The weights, f32.
        weights: Option<View<'a>>,
    },
}

/// Arguments of [`route_into`]; T rows, L = experts + zero experts, K = top_k.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    /// [T, L] f32.
    pub logits: View<'a>,
    /// Correction bias, \[L\] f32.
    pub bias: Option<View<'a>>,
    /// How experts are chosen.
    pub choice: Choice<'a>,
    /// How logits become scores.
    pub scoring: GateScoring,
    /// Routed experts.
    pub experts: usize,
    /// Routed slots K.
    pub top_k: usize,
    /// The number of shared experts, which come after the routed ones, and their weight.
    pub shared: (usize, f32),
    /// Divide the chosen scores by their sum.
    pub renormalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// cap * tanh(x / cap) before anything else.
    pub softcap: Option<f32>,
    /// The arrays that record the choices, zero experts included, and the choices that are forced.
    pub routing: LayerRouting<'a>,
    /// Whether rows after the valid ones are padding and get no expert. The number of valid rows is on the device
    /// (`cuda::upload_step_into` writes it).
    pub padded: bool,
}

/// Outputs of [`route_into`].
#[derive(Debug)]
pub struct RouteOut<'a> {
    /// [T, K + shared] u32.
    pub topk_ids: ViewMut<'a>,
    /// [T, K + shared] f32.
    pub topk_weights: ViewMut<'a>,
    /// \[T\] f32: the weights of zero experts.
    pub zero_weights: Option<ViewMut<'a>>,
}

/// Routes rows on a CUDA device by any method, with the bits of the CPU's router. A NaN logit is never chosen. A slot
/// without a choice gets [`NO_EXPERT`](crate::NO_EXPERT) and weight 0, and so does every slot of a padding row
/// ([`Route::padded`]).
///
/// # Errors
/// A context on the CPU; views of host memory; wrong dims or dtypes; more experts than shared memory has room for
/// (about 28,000).
pub fn route_into(route: &Route<'_>, mut out: RouteOut<'_>, ex: &Exec) -> Result<()> {
    const OP: &str = "route";
    let cuda = ex.cuda(OP)?;
    let (tokens, logits) = expect_matrix(OP, "router_logits", &route.logits)?;
    let Some(zero_experts) = logits.checked_sub(route.experts) else {
        bail!("{OP}: expected at least {} logits per row, got {logits}", route.experts)
    };
    check(OP, route, &out, tokens, logits)?;
    let read = |name: &str, view: Option<View<'_>>| cuda.read_or_null::<c_void>(OP, name, view);
    let write = |name: &str, view: &mut Option<ViewMut<'_>>| cuda.write_or_null(OP, name, view.as_mut());
    let mut groups = (0, 0);
    let mut table = (null(), null(), 0);
    let mut given = (null(), null());
    let selection = match route.choice {
        Choice::TopK => 0,
        Choice::Grouped { groups: n, topk_group, top_two } => {
            groups = (n, topk_group);
            1 + i32::from(top_two)
        }
        Choice::RawLogits => 3,
        Choice::Hash { table: ids, token_ids } => {
            table = (read("hash table", Some(ids))?, read("token_ids", Some(token_ids))?, ids.rows());
            4
        }
        Choice::Given { ids, weights } => {
            given = (read("ids", Some(ids))?, read("weights", weights)?);
            5
        }
    };
    let size = |n: usize| int(OP, n);
    let raw = AnyRouteArgs {
        logits: cuda.read(OP, "router_logits", route.logits)?,
        bias: read("correction_bias", route.bias)?,
        table: table.0,
        token_ids: table.1,
        given_ids: given.0,
        given_weights: given.1,
        valid: if route.padded { cuda.valid_rows()?.cast_const().cast() } else { null() },
        topk_ids: cuda.write(OP, "topk_ids", &mut out.topk_ids)?,
        topk_weights: cuda.write(OP, "topk_weights", &mut out.topk_weights)?,
        zero_weights: write("zero_expert_weights", &mut out.zero_weights)?,
        tokens: size(tokens)?,
        experts: size(route.experts)?,
        zero_experts: size(zero_experts)?,
        top_k: size(route.top_k)?,
        shared_slots: size(route.shared.0)?,
        vocab: size(table.2)?,
        groups: size(groups.0)?,
        topk_group: size(groups.1)?,
        selection,
        scoring: route.scoring,
        renormalize: i32::from(route.renormalize),
        softcap: route.softcap.unwrap_or(0.0),
        scale: route.scale,
        shared_weight: route.shared.1,
        routing: StepRoutingArgs::of(OP, &route.routing, (tokens, route.experts, route.top_k), cuda)?,
    };
    let stream = cuda.raw()?;
    // SAFETY: dims and dtypes are checked, so each pointer covers what AnyRouteArgs states; the kernel
    // reads and writes no element by an id that is out of range.
    cuda.check(OP, unsafe { ffi::moe_any_route(&raw, stream) })
}

/// Dims and dtypes of all views.
fn check(op: &str, route: &Route<'_>, out: &RouteOut<'_>, tokens: usize, logits: usize) -> Result<()> {
    let routed = [tokens, route.top_k];
    let slots = [tokens, route.top_k + route.shared.0];
    let input = |name: &str, view: Option<View<'_>>, dtype: DType, dims: &[usize]| {
        expect_optional(op, name, view.as_ref(), dtype, dims)
    };
    input("router_logits", Some(route.logits), DType::F32, &[tokens, logits])?;
    input("correction_bias", route.bias, DType::F32, &[logits])?;
    match route.choice {
        Choice::Hash { table, token_ids } => {
            input("hash table", Some(table), DType::U32, &[table.rows(), route.top_k])?;
            input("token_ids", Some(token_ids), DType::U32, &[tokens])?;
        }
        Choice::Given { ids, weights } => {
            input("ids", Some(ids), DType::U32, &routed)?;
            input("weights", weights, DType::F32, &routed)?;
        }
        Choice::TopK | Choice::Grouped { .. } | Choice::RawLogits => {}
    }
    let zero = out.zero_weights.as_ref().map(ViewMut::as_view);
    input("topk_ids", Some(out.topk_ids.as_view()), DType::U32, &slots)?;
    input("topk_weights", Some(out.topk_weights.as_view()), DType::F32, &slots)?;
    input("zero_expert_weights", zero, DType::F32, &[tokens])
}
