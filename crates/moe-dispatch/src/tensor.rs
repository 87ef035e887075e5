//! The candle door: the same operations on tensors.

use candle_core::{DType, Device, Result, Tensor, bail};
use moe_kernels::gradient::TensorResults;
use moe_kernels::{
    ActivationFormat, AlignedTokens, Dispatched, Exec, Lent, View, WeightAndReduce, align_tokens_into,
    group_slots_into, max_aligned_sizes, with_tensors, with_views,
};

use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::{CombineArgs, weight_and_reduce_into};
use crate::tokens::Tokens;

/// A backend with the workspace that its calls reuse: dispatch, experts and combine on tensors.
pub struct Dispatcher {
    backend: Box<dyn PrepareFinalize>,
}

/// Dispatched rows as tensors, see [`Dispatched`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DispatchedTensors {
    /// Layout of `rows`.
    pub format: ActivationFormat,
    /// [T', H] or [E_local, max_tokens, H]. It may be the caller's own tensor: read it only.
    pub rows: Tensor,
    /// [T', K] u32, Standard format.
    pub topk_ids: Option<Tensor>,
    /// \[E_local\] u32, BatchedExperts format.
    pub expert_num_tokens: Option<Tensor>,
    /// \[P\] i32, if not all experts are local.
    pub expert_map: Option<Tensor>,
}

impl Dispatcher {
    /// Dispatches through this backend.
    pub fn new(backend: impl PrepareFinalize + 'static) -> Self {
        Self { backend: Box::new(backend) }
    }

    /// The backend.
    pub fn backend(&self) -> &dyn PrepareFinalize {
        &*self.backend
    }

    /// Prepare, `experts`, finalize. `hidden` is [T, H], `topk_ids` [T, K] u32, `topk_weights`
    /// [T, K] f32, all on one device (the CPU or a CUDA device) in any layout; the result is [T, H] of the dtype of
    /// `hidden`, on that device. An expert map of the backend must lie there too (`LocalExperts::on`).
    ///
    /// `experts` returns the experts' unweighted rows, [T', K, H] in the Standard and
    /// [E_local, max_tokens, H] in the BatchedExperts format. Rows of slots without a local
    /// expert, and rows past `expert_num_tokens`, may hold anything.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices; what the backend or `experts` refuse.
    pub fn forward(
        &self,
        hidden: &Tensor,
        topk_ids: &Tensor,
        topk_weights: &Tensor,
        experts: impl FnOnce(&DispatchedTensors) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let tensors = [hidden, topk_ids, topk_weights];
        with_tensors(tensors, [], |[rows, ids, weights], [], ex| {
            let dispatched = self.backend.prepare(Tokens::new(rows, ids, weights), None, ex)?;
            let expert_out = experts(&dispatched_tensors(&dispatched, hidden, ex)?)?;
            let expert_out = match expert_out.elem_count() {
                // candle cannot convert nothing on a CUDA device.
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
/// As [`group_slots_into`]; more local experts than can be counted; tensors on different devices.
pub fn group_slots(
    topk_ids: &Tensor,
    expert_map: Option<&Tensor>,
    num_local: usize,
) -> Result<(Tensor, Tensor)> {
    let Some(groups) = num_local.checked_add(1) else { bail!("group_slots: too many local experts") };
    with_tensors([topk_ids], [expert_map], |[ids], [map], ex| {
        let mut offsets = ex.output(DType::U32, &[groups])?;
        let mut slots = ex.zeros(DType::U32, &[ids.elem_count()])?;
        group_slots_into(ids, map, offsets.view_mut(), slots.view_mut(), ex)?;
        Ok((offsets.into_tensor()?, slots.into_tensor()?))
    })
}

/// The outputs of [`moe_align_block_size`].
#[derive(Clone, Debug)]
pub struct AlignedTensors {
    /// \[max\] u32 slot numbers grouped by expert; T*K pads.
    pub sorted_token_ids: Tensor,
    /// [max blocks] i32 local expert of each block; -1 = skip.
    pub expert_ids: Tensor,
    /// \[1\] u32 entries of `sorted_token_ids` in use.
    pub num_tokens_post_padded: Tensor,
}

impl TensorResults for AlignedTensors {
    /// All are integers.
    fn map_tensors(self, _: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

/// Sorts the slots of `topk_ids` [T, K] u32 by local expert and pads each expert's to whole
/// blocks. See [`align_tokens_into`].
///
/// The results lie on the device of `topk_ids`. The sorting is the host's: with ids on a CUDA device this waits for it.
///
/// # Errors
/// As [`align_tokens_into`]; a device that cannot be copied from.
pub fn moe_align_block_size(
    topk_ids: &Tensor,
    block_size: usize,
    num_local: usize,
    expert_map: Option<&Tensor>,
) -> Result<AlignedTensors> {
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
/// As [`weight_and_reduce_into`]; scalars for `expert_out` or `topk_ids`; tensors on different devices.
pub fn weight_and_reduce(
    strategy: WeightAndReduce,
    expert_out: &Tensor,
    topk_ids: &Tensor,
    topk_weights: &Tensor,
    expert_map: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    let (Some(&tokens), Some(&hidden)) = (topk_ids.dims().first(), expert_out.dims().last()) else {
        bail!("weight_and_reduce: expected expert_out and topk_ids with dimensions, got scalars")
    };
    let tensors = [expert_out, topk_ids, topk_weights];
    with_tensors(tensors, [expert_map], |[rows, ids, weights], [expert_map], ex| {
        let args = CombineArgs { topk_ids: ids, topk_weights: weights, expert_map, weights_applied: false };
        let mut out = ex.output(dtype, &[tokens, hidden])?;
        weight_and_reduce_into(strategy, rows, &args, out.view_mut(), ex)?;
        out.into_tensor()
    })
}
