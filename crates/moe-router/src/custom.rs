//! Routing by a function of the caller.

use candle_core::Result;
use moe_kernels::{Exec, View, ViewMut};

use crate::config::RouterConfig;
use crate::io::RouteInput;

/// A caller-supplied routing method.
///
/// Choosing and weighing are separate, so that forced replay works for it as for every other
/// method: replay replaces the chosen ids and asks for the weights of the new ids.
///
/// Rows must not influence each other: a token's routing may depend on its own row only.
pub trait RoutingFunction: Send + Sync {
    /// A name for messages.
    fn name(&self) -> &str;

    /// Chooses experts: fills `topk_ids` [T, top_k] u32 with ids below `config.num_experts`,
    /// distinct within a row, in slot order; [`NO_EXPERT`](moe_kernels::NO_EXPERT) masks a slot.
    ///
    /// `input.logits` is [T, E] f32; `input.hidden` [T, H] is there if the caller gave it.
    fn select(
        &self,
        config: &RouterConfig,
        input: &RouteInput<'_>,
        topk_ids: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()>;

    /// Fills `topk_weights` [T, top_k] f32 with the final weights of `topk_ids`: whether to
    /// renormalise and scale is the function's own business, as `config` tells it.
    fn weigh(
        &self,
        config: &RouterConfig,
        input: &RouteInput<'_>,
        topk_ids: View<'_>,
        topk_weights: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()>;
}
