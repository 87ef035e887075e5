//! The per-expert loop: separate gate, up and down matrices of every expert, one expert after the
//! other.
//!
//! This is how models ran before packed weights and grouped kernels, kept as the reference that
//! the fused block is compared with and as a fallback that depends on nothing but dense products.
//! Rows of an expert are gathered, multiplied, and put back to their slots; the owner of a token
//! then weights its slots, k ascending. Products, activation and sum are in the fused path's
//! order, so on the CPU both give the same bits.

use candle_nn::VarBuilder;
use moe_kernels::candle::{DType, Device, Result, Tensor, bail};
use moe_kernels::{
    Activation, Exec, TensorView, View, ViewMut, Workspace, embedding_into, gated_activation_into,
    group_slots_into, linear_into, linear_row_parallel_into, weighted_sum_into,
};
use moe_router::{GateInput, RouteOutput, Router, RouterConfig};
use tracing::trace_span;

use crate::check::check_gate;
use crate::door::forward_rows;
use crate::load::BlockOptions;
use crate::shared::SharedExperts;

/// The matrices of one expert: `down(act(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct ExpertMlp {
    /// [I, H].
    pub gate: Tensor,
    /// [I, H].
    pub up: Tensor,
    /// [H, I].
    pub down: Tensor,
}

/// A sparse block that loops over its experts.
pub struct MoeMlp {
    gate: Tensor,
    router: Router,
    experts: Vec<ExpertMlp>,
    activation: Activation,
    shared: Option<SharedExperts>,
    layer: usize,
    workspace: Workspace,
}

impl MoeMlp {
    /// `gate` is the router's weight [E, H] in the model dtype; `layer` counts the model's MoE
    /// layers from 0.
    ///
    /// # Errors
    /// Another number of experts than the router chooses among; experts of different shapes or
    /// dtypes; a gate of other dims; routing that only the fused block offers (zero experts, fused
    /// shared experts, router weights on the input).
    pub fn new(
        gate: Tensor,
        router: Router,
        experts: Vec<ExpertMlp>,
        activation: Activation,
        layer: usize,
    ) -> Result<Self> {
        check_routing(router.config())?;
        let Some(first) = experts.first().filter(|_| experts.len() == router.config().num_experts) else {
            bail!(
                "legacy experts: the router chooses among {} experts, but there are {}",
                router.config().num_experts,
                experts.len()
            )
        };
        let (intermediate, hidden) = first.gate.dims2()?;
        let dtype = first.gate.dtype();
        for (e, expert) in experts.iter().enumerate() {
            for (name, tensor, dims) in [
                ("gate", &expert.gate, [intermediate, hidden]),
                ("up", &expert.up, [intermediate, hidden]),
                ("down", &expert.down, [hidden, intermediate]),
            ] {
                if tensor.dims() != dims || tensor.dtype() != dtype {
                    bail!(
                        "legacy experts: expected {name} of expert {e} with dims {dims:?} of dtype {}, got {:?} of {}",
                        dtype.as_str(),
                        tensor.dims(),
                        tensor.dtype().as_str()
                    )
                }
            }
        }
        check_gate(&gate, experts.len(), hidden, dtype)?;
        let gate = gate.contiguous()?;
        Ok(Self { gate, router, experts, activation, shared: None, layer, workspace: Workspace::new() })
    }

    /// Loads gate, router and experts, from per-expert tensors or, split, from packed ones: the
    /// layouts and prefixes of [`load_block`](crate::load_block).
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; an expert backend, which only the fused path has; what
    /// [`MoeMlp::new`] refuses.
    pub fn load(options: &BlockOptions, gate: VarBuilder, experts: VarBuilder) -> Result<Self> {
        if let Some(backend) = &options.backend {
            bail!("the legacy expert path has no backends, so not {backend} either; choose the fused path")
        }
        let config = &options.router;
        let router = Router::load(config, gate.clone())?;
        let weight = gate.get((config.num_logits(), options.hidden_size), "weight")?;
        let (e, h, i) = (config.num_experts, options.hidden_size, options.intermediate_size);
        let experts = match experts.contains_tensor("gate_up_proj") {
            true => split_packed(e, h, i, &experts)?,
            false => (0..e).map(|e| load_expert(h, i, &experts.pp(e))).collect::<Result<_>>()?,
        };
        Self::new(weight, router, experts, options.activation, options.layer)
    }

    /// Adds shared experts.
    ///
    /// # Errors
    /// Another hidden size or dtype.
    pub fn with_shared_experts(mut self, shared: SharedExperts) -> Result<Self> {
        shared.check_fits(&self.gate)?;
        self.shared = Some(shared);
        Ok(self)
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// `out` [T, H] (model dtype or f32) = block(`hidden` [T, H], model dtype). Step context of `ex`:
    /// token ids, replay, capture and heat, as the router documents them.
    pub fn forward_into(&self, hidden: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.forward_observed_into(hidden, out, &mut |_| Ok(()), ex)
    }

    /// The same; `observe` sees the router logits, [T, E] f32.
    pub fn forward_observed_into(
        &self,
        hidden: View<'_>,
        mut out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        ex: &mut Exec,
    ) -> Result<()> {
        let _span = trace_span!("moe").entered();
        let gate = TensorView::new(&self.gate)?;
        let (tokens, k) = (hidden.rows(), self.router.config().top_k);
        let mut logits = ex.scratch(DType::F32, &[tokens, self.experts.len()])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, k])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, k])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: None,
        };
        let input = GateInput::new(hidden, gate.view()?, self.layer);
        trace_span!("router")
            .in_scope(|| self.router.gate_and_route_into(&input, Some(logits.view_mut()), output, ex))?;
        observe(logits.view())?;
        let mut slots = ex.scratch(DType::F32, &[tokens, k, hidden.dims()[1]])?;
        trace_span!("experts")
            .in_scope(|| self.experts_into(hidden, topk_ids.view(), slots.view_mut(), ex))?;
        weighted_sum_into(slots.view(), topk_ids.view(), topk_weights.view(), out.reborrow(), ex)?;
        match &self.shared {
            Some(shared) => trace_span!("shared_experts").in_scope(|| shared.add_into(hidden, out, ex)),
            None => Ok(()),
        }
    }

    /// The same on candle tensors: `hidden` [.., H].
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        forward_rows(hidden, &self.workspace, |x, out, ex| self.forward_into(x, out, ex))
    }

    /// Runs every expert that a slot names; `slots` [T, K, H] gets their unweighted f32 rows. Rows of
    /// slots without an expert are left unspecified.
    fn experts_into(&self, hidden: View, topk_ids: View, slots: ViewMut, ex: &mut Exec) -> Result<()> {
        let (t, k, h) = (slots.dims()[0], slots.dims()[1], slots.dims()[2]);
        let mut offsets = ex.scratch(DType::U32, &[self.experts.len() + 1])?;
        let mut order = ex.scratch(DType::U32, &[t * k])?;
        group_slots_into(topk_ids, None, offsets.view_mut(), order.view_mut(), ex)?;
        let offsets = offsets.view().cpu::<u32>()?;
        let used = offsets.last().map_or(0, |&end| end as usize);
        if used == 0 {
            return Ok(());
        }
        let mut place = ex.scratch(DType::U32, &[t * k])?;
        let mut tokens = ex.scratch(DType::U32, &[used])?;
        let order = &order.view().cpu::<u32>()?[..used];
        invert(order, k, place.view_mut().cpu_mut()?, tokens.view_mut().cpu_mut()?);
        let mut grouped = ex.scratch(DType::F32, &[used, h])?;
        for (expert, range) in self.experts.iter().zip(offsets.windows(2)) {
            let (start, rows) = (range[0] as usize, (range[1] - range[0]) as usize);
            if rows > 0 {
                let mut x = ex.scratch(hidden.dtype(), &[rows, h])?;
                embedding_into(hidden, tokens.view().narrow(start, rows)?, x.view_mut(), ex)?;
                let out = grouped.view_mut().narrow(start, rows)?;
                expert.forward_into(x.view(), self.activation, out, ex)?;
            }
        }
        embedding_into(grouped.view(), place.view(), slots.reshape(&[t * k, h])?, ex)
    }
}

impl std::fmt::Debug for MoeMlp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeMlp")
            .field("layer", &self.layer)
            .field("gate", &self.gate.dims())
            .field("experts", &self.experts.len())
            .field("shared", &self.shared.is_some())
            .finish()
    }
}

impl ExpertMlp {
    /// `out` [R, H] f32 = the expert's rows of `x` [R, H].
    fn forward_into(&self, x: View, activation: Activation, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let dims = [x.rows(), self.gate.dims()[0]];
        let mut gate = ex.scratch(DType::F32, &dims)?;
        let mut up = ex.scratch(DType::F32, &dims)?;
        linear_into(x, TensorView::new(&self.gate)?.view()?, None, gate.view_mut(), ex)?;
        linear_into(x, TensorView::new(&self.up)?.view()?, None, up.view_mut(), ex)?;
        let mut activated = ex.scratch(x.dtype(), &dims)?;
        gated_activation_into(gate.view(), up.view(), activation, activated.view_mut(), ex)?;
        linear_row_parallel_into(activated.view(), TensorView::new(&self.down)?.view()?, None, out, ex)
    }
}

/// The grouped row of each slot and the token of each grouped row. Slots that no group has read
/// row 0, and are not added later.
fn invert(order: &[u32], top_k: usize, place: &mut [u32], tokens: &mut [u32]) {
    place.fill(0);
    for (row, (&slot, token)) in order.iter().zip(tokens).enumerate() {
        place[slot as usize] = row as u32;
        *token = slot / top_k as u32;
    }
}

fn check_routing(config: &RouterConfig) -> Result<()> {
    let only_fused = [
        ("zero experts", config.num_zero_experts > 0),
        ("fused shared experts", config.num_fused_shared_experts > 0),
        ("router weights on the input", config.apply_router_weight_on_input),
    ];
    match only_fused.iter().find(|(_, asked)| *asked) {
        Some((what, _)) => bail!("the legacy expert path does not support {what}; choose the fused path"),
        None => Ok(()),
    }
}

fn load_expert(hidden: usize, intermediate: usize, vb: &VarBuilder) -> Result<ExpertMlp> {
    Ok(ExpertMlp {
        gate: vb.get((intermediate, hidden), "gate_proj.weight")?,
        up: vb.get((intermediate, hidden), "up_proj.weight")?,
        down: vb.get((hidden, intermediate), "down_proj.weight")?,
    })
}

/// Experts out of packed tensors, each with memory of its own, on the device of `vb`.
fn split_packed(
    experts: usize,
    hidden: usize,
    intermediate: usize,
    vb: &VarBuilder,
) -> Result<Vec<ExpertMlp>> {
    let host = vb.clone().set_device(Device::Cpu);
    let part = |tensor: Tensor| tensor.force_contiguous()?.to_device(vb.device());
    let gate_up = host.get((experts, 2 * intermediate, hidden), "gate_up_proj")?;
    let halves = |e: usize| -> Result<(Tensor, Tensor)> {
        let rows = gate_up.get(e)?;
        Ok((part(rows.narrow(0, 0, intermediate)?)?, part(rows.narrow(0, intermediate, intermediate)?)?))
    };
    let halves = (0..experts).map(halves).collect::<Result<Vec<_>>>()?;
    drop(gate_up);
    let down = host.get((experts, hidden, intermediate), "down_proj")?;
    let expert = |(e, (gate, up))| Ok(ExpertMlp { gate, up, down: part(down.get(e)?)? });
    halves.into_iter().enumerate().map(expert).collect()
}
