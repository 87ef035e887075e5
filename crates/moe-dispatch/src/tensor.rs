//! The same operations on candle tensors.

use candle_core::{DType, Device, Result, Tensor, bail};
use moe_kernels::arguments::{expect, expect_dtype, expect_float, expect_matrix, expect_rank3};
use moe_kernels::gradient::TensorResults;
use moe_kernels::{
    ActivationFormat, AlignedTokens, Dispatched, Exec, Lent, View, WeightAndReduce, align_tokens_into,
    group_slots_into, max_aligned_sizes, with_tensors, with_views,
};

use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::{CombineArgs, weight_and_reduce_into};
use crate::tokens::{Tokens, check_tokens};

/// A backend with a workspace that its calls reuse. It offers dispatch, experts and combine on tensors.
#[must_use = "it sends nothing until it is called"]
pub struct Dispatcher {
    backend: Box<dyn PrepareFinalize>,
}

/// Dispatched rows as tensors, see [`Dispatched`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DispatchedTensors {
    /// Layout of `rows`.
    pub format: ActivationFormat,
    /// [T', H] or [E_local, max_tokens, H]. It may be the caller's own tensor, so it must not be written.
    pub rows: Tensor,
    /// [T', K] u32, Standard format.
    pub topk_ids: Option<Tensor>,
    /// \[E_local\] u32, BatchedExperts format.
    pub expert_num_tokens: Option<Tensor>,
    /// \[P\] i32, if not all experts are local.
    pub expert_map: Option<Tensor>,
}

impl Dispatcher {
    /// Makes a dispatcher with this backend.
    pub fn new(backend: impl PrepareFinalize + 'static) -> Self {
        Self { backend: Box::new(backend) }
    }

    /// The backend.
    pub fn backend(&self) -> &dyn PrepareFinalize {
        &*self.backend
    }

    /// Prepare, `experts`, finalize. `hidden` is [T, H], `topk_ids` [T, K] u32, `topk_weights` [T, K] f32, all on one
    /// device (the CPU or a CUDA device) in any layout. The result is [T, H] of the dtype of `hidden`, on that device.
    /// An expert map of the backend must be on that device too (`LocalExperts::on`).
    ///
    /// `experts` returns the experts' unweighted rows, [T', K, H] in the Standard and
    /// [E_local, max_tokens, H] in the BatchedExperts format. Rows of slots without a local
    /// expert, and rows past `expert_num_tokens`, may hold anything.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices; any error of the backend or of `experts`.
    pub fn forward(
        &self,
        hidden: &Tensor,
        topk_ids: &Tensor,
        topk_weights: &Tensor,
        experts: impl FnOnce(&DispatchedTensors) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let name = self.backend.name();
        check_tokens(name, hidden, topk_ids, topk_weights)?;
        let tensors = [hidden, topk_ids, topk_weights];
        with_tensors(tensors, [], |[rows, ids, weights], [], ex| {
            let dispatched = self.backend.prepare(Tokens::new(rows, ids, weights), None, ex)?;
            let expert_out = experts(&dispatched_tensors(&dispatched, hidden, ex)?)?;
            expect_float(name, "the experts' rows", &expert_out)?;
            let expert_out = match expert_out.elem_count() {
                // candle cannot convert an empty tensor on a CUDA device.
                0 => ex.output(DType::F32, expert_out.dims())?.into_tensor()?,
                _ => expert_out.to_dtype(DType::F32)?,
            };
            let mut out = ex.output(rows.dtype(), rows.dims())?;
            with_views([&expert_out], [], |[expert_out], []| {
                let strategy = WeightAndReduce::Delegate;
                self.backend.finalize(expert_out, &dispatched, strategy, out.view_mut(), ex)
            })?;
            out.into_tensor()
        })
    }
}

fn dispatched_tensors(dispatched: &Dispatched, hidden: &Tensor, ex: &Exec) -> Result<DispatchedTensors> {
    let copy = |view: View| {
        let mut copy = ex.output(view.dtype(), view.dims())?;
        ex.copy(view, copy.view_mut())?;
        copy.into_tensor()
    };
    let field = |lent: &Option<Lent>| lent.as_ref().map(|l| copy(l.view())).transpose();
    Ok(DispatchedTensors {
        format: dispatched.format,
        rows: match &dispatched.rows {
            Lent::Borrowed(_) => hidden.clone(),
            Lent::Owned(rows) => copy(rows.view())?,
        },
        topk_ids: field(&dispatched.topk_ids)?,
        expert_num_tokens: field(&dispatched.expert_num_tokens)?,
        expert_map: dispatched.expert_map.map(copy).transpose()?,
    })
}

/// Groups slots by local expert: (`offsets` [E_local + 1], `slots` \[T*K\]), both u32, on the device of `topk_ids`. See
/// [`group_slots_into`].
///
/// # Errors
/// The errors of [`group_slots_into`]; more local experts than can be counted; tensors on different devices.
pub fn group_slots(
    topk_ids: &Tensor,
    expert_map: Option<&Tensor>,
    num_local: usize,
) -> Result<(Tensor, Tensor)> {
    let Some(groups) = num_local.checked_add(1).filter(|groups| i32::try_from(*groups).is_ok()) else {
        bail!("group_slots: expected fewer than {} local experts, got {num_local}", i32::MAX)
    };
    check_ids("group_slots", topk_ids, expert_map)?;
    with_tensors([topk_ids], [expert_map], |[ids], [map], ex| {
        let mut offsets = ex.output(DType::U32, &[groups])?;
        let mut slots = ex.zeros(DType::U32, &[ids.elem_count()])?;
        group_slots_into(ids, map, offsets.view_mut(), slots.view_mut(), ex)?;
        Ok((offsets.into_tensor()?, slots.into_tensor()?))
    })
}

/// Fails unless ids are [T, K] u32 and the map is \[P\] i32.
fn check_ids(op: &str, topk_ids: &Tensor, expert_map: Option<&Tensor>) -> Result<()> {
    expect_matrix(op, "topk_ids", topk_ids)?;
    expect_dtype(op, "topk_ids", topk_ids, DType::U32)?;
    match expert_map {
        Some(map) => expect(op, "expert_map", map, DType::I32, &[map.elem_count()]),
        None => Ok(()),
    }
}

/// The outputs of [`moe_align_block_size`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AlignedTensors {
    /// \[max\] u32 slot numbers grouped by expert. The value T*K is padding.
    pub sorted_token_ids: Tensor,
    /// [max blocks] i32 local expert of each block; -1 = skip.
    pub expert_ids: Tensor,
    /// \[1\] u32 entries of `sorted_token_ids` in use.
    pub num_tokens_post_padded: Tensor,
}

impl TensorResults for AlignedTensors {
    /// All fields are integers, so there is nothing to convert.
    fn map_tensors(self, _: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

/// Sorts the slots of `topk_ids` [T, K] u32 by local expert, and pads the slots of each expert to whole blocks. See
/// [`align_tokens_into`].
///
/// The results are on the device of `topk_ids`. The host does the sorting, so this call waits for ids on a CUDA device.
///
/// # Errors
/// The errors of [`align_tokens_into`]; an error of the copy from the device.
pub fn moe_align_block_size(
    topk_ids: &Tensor,
    block_size: usize,
    num_local: usize,
    expert_map: Option<&Tensor>,
) -> Result<AlignedTensors> {
    check_ids("moe_align_block_size", topk_ids, expert_map)?;
    let (device, host) = (topk_ids.device(), |tensor: &Tensor| tensor.to_device(&Device::Cpu));
    let ids = host(topk_ids)?;
    let map = expert_map.map(host).transpose()?;
    let max = max_aligned_sizes(ids.elem_count(), num_local, block_size)?;
    with_tensors([&ids], [map.as_ref()], |[ids], [map], ex| {
        let mut sorted = ex.output(DType::U32, &[max.sorted_token_ids])?;
        let mut blocks = ex.output(DType::I32, &[max.expert_ids])?;
        let mut used = ex.output(DType::U32, &[1])?;
        let out = AlignedTokens {
            sorted_token_ids: sorted.view_mut(),
            expert_ids: blocks.view_mut(),
            num_tokens_post_padded: used.view_mut(),
        };
        align_tokens_into(ids, map, num_local, block_size, out, ex)?;
        Ok(AlignedTensors {
            sorted_token_ids: sorted.into_tensor()?.to_device(device)?,
            expert_ids: blocks.into_tensor()?.to_device(device)?,
            num_tokens_post_padded: used.into_tensor()?.to_device(device)?,
        })
    })
}

/// Turns the experts' rows into token rows [T, H] of `dtype`, on the device of `expert_out`. See
/// [`weight_and_reduce_into`].
///
/// # Errors
/// The errors of [`weight_and_reduce_into`]; scalars for `expert_out` or `topk_ids`; tensors on different devices.
pub fn weight_and_reduce(
    strategy: WeightAndReduce,
    expert_out: &Tensor,
    topk_ids: &Tensor,
    topk_weights: &Tensor,
    expert_map: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    const OP: &str = "weight_and_reduce";
    check_ids(OP, topk_ids, expert_map)?;
    let tokens = topk_ids.dims()[0];
    expect(OP, "topk_weights", topk_weights, DType::F32, topk_ids.dims())?;
    let hidden = match expert_out.rank() {
        2 => expect_matrix(OP, "expert_out", expert_out)?.1,
        _ => expect_rank3(OP, "expert_out", expert_out)?.2,
    };
    expect_float(OP, "expert_out", expert_out)?;
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        bail!("{OP}: expected a result of dtype f32, bf16 or f16, got {}", dtype.as_str())
    }
    let tensors = [expert_out, topk_ids, topk_weights];
    with_tensors(tensors, [expert_map], |[rows, ids, weights], [expert_map], ex| {
        let args = CombineArgs { topk_ids: ids, topk_weights: weights, expert_map, weights_applied: false };
        let mut out = ex.output(dtype, &[tokens, hidden])?;
        weight_and_reduce_into(strategy, rows, &args, out.view_mut(), ex)?;
        out.into_tensor()
    })
}
