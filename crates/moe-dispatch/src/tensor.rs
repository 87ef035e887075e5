//! The candle door: the same operations on tensors.

use candle_core::{DType, Result, Tensor, bail};
use moe_kernels::{
    ActivationFormat, AlignedTokens, Buffer, Dispatched, Element, Exec, Lent, TensorView, View,
    WeightAndReduce, Workspace, align_tokens_into, group_slots_into, max_aligned_sizes,
};

use crate::prepare_finalize::PrepareFinalize;
use crate::reduce::{CombineArgs, weight_and_reduce_into};

/// A backend with the workspace that its calls reuse: dispatch, experts and combine on tensors.
pub struct Dispatcher {
    backend: Box<dyn PrepareFinalize>,
    workspace: Workspace,
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
        Self { backend: Box::new(backend), workspace: Workspace::new() }
    }

    /// The backend.
    pub fn backend(&self) -> &dyn PrepareFinalize {
        &*self.backend
    }

    /// Prepare, `experts`, finalize. `hidden` is [T, H], `topk_ids` [T, K] u32, `topk_weights`
    /// [T, K] f32, all contiguous; the result is [T, H] of the dtype of `hidden`.
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
        let mut ex = Exec::for_tensor(hidden, &self.workspace)?;
        let guards = [TensorView::new(hidden)?, TensorView::new(topk_ids)?, TensorView::new(topk_weights)?];
        let [rows, ids, weights] = &guards;
        let dispatched = self.backend.prepare(rows.view()?, ids.view()?, weights.view()?, None, &mut ex)?;
        let expert_out = experts(&dispatched_tensors(&dispatched, hidden)?)?;
        let expert_out = expert_out.to_dtype(DType::F32)?.contiguous()?;
        let mut out = Buffer::zeros(hidden.dtype(), hidden.dims())?;
        let expert_out = TensorView::new(&expert_out)?;
        let strategy = WeightAndReduce::Delegate;
        self.backend.finalize(expert_out.view()?, &dispatched, strategy, out.view_mut(), &mut ex)?;
        out.into_tensor()
    }
}

fn dispatched_tensors(dispatched: &Dispatched, hidden: &Tensor) -> Result<DispatchedTensors> {
    let rows = match &dispatched.rows {
        Lent::Borrowed(_) => hidden.clone(),
        Lent::Owned(rows) => to_tensor(rows.view())?,
    };
    let field = |lent: &Option<Lent>| lent.as_ref().map(|l| to_tensor(l.view())).transpose();
    Ok(DispatchedTensors {
        format: dispatched.format,
        rows,
        topk_ids: field(&dispatched.topk_ids)?,
        expert_num_tokens: field(&dispatched.expert_num_tokens)?,
        expert_map: dispatched.expert_map.map(to_tensor).transpose()?,
    })
}

fn to_tensor(view: View) -> Result<Tensor> {
    fn copy<T: Element>(view: View) -> Result<Tensor> {
        Buffer::from_vec(view.cpu::<T>()?.to_vec(), view.dims())?.into_tensor()
    }
    match view.dtype() {
        DType::U32 => copy::<u32>(view),
        DType::I32 => copy::<i32>(view),
        DType::F32 => copy::<f32>(view),
        DType::BF16 => copy::<moe_kernels::half::bf16>(view),
        DType::F16 => copy::<moe_kernels::half::f16>(view),
        other => bail!("dispatched data of dtype {} has no tensor form", other.as_str()),
    }
}

/// Groups slots by local expert: (`offsets` [E_local + 1], `slots` \[T*K\]), both u32. See
/// [`group_slots_into`].
pub fn group_slots(
    topk_ids: &Tensor,
    expert_map: Option<&Tensor>,
    num_local: usize,
) -> Result<(Tensor, Tensor)> {
    let mut ex = Exec::for_tensor(topk_ids, &Workspace::new())?;
    let (ids, map) = (TensorView::new(topk_ids)?, expert_map.map(TensorView::new).transpose()?);
    let map = map.as_ref().map(TensorView::view).transpose()?;
    let Some(groups) = num_local.checked_add(1) else { bail!("group_slots: too many local experts") };
    let mut offsets = Buffer::zeros(DType::U32, &[groups])?;
    let mut slots = Buffer::zeros(DType::U32, &[topk_ids.elem_count()])?;
    group_slots_into(ids.view()?, map, offsets.view_mut(), slots.view_mut(), &mut ex)?;
    Ok((offsets.into_tensor()?, slots.into_tensor()?))
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

/// Sorts the slots of `topk_ids` [T, K] u32 by local expert and pads each expert's to whole
/// blocks. See [`align_tokens_into`].
pub fn moe_align_block_size(
    topk_ids: &Tensor,
    block_size: usize,
    num_local: usize,
    expert_map: Option<&Tensor>,
) -> Result<AlignedTensors> {
    let mut ex = Exec::for_tensor(topk_ids, &Workspace::new())?;
    let (ids, map) = (TensorView::new(topk_ids)?, expert_map.map(TensorView::new).transpose()?);
    let map = map.as_ref().map(TensorView::view).transpose()?;
    let max = max_aligned_sizes(topk_ids.elem_count(), num_local, block_size)?;
    let mut sorted = Buffer::zeros(DType::U32, &[max.sorted_token_ids])?;
    let mut blocks = Buffer::zeros(DType::I32, &[max.expert_ids])?;
    let mut used = Buffer::zeros(DType::U32, &[1])?;
    let out = AlignedTokens {
        sorted_token_ids: sorted.view_mut(),
        expert_ids: blocks.view_mut(),
        num_tokens_post_padded: used.view_mut(),
    };
    align_tokens_into(ids.view()?, map, num_local, block_size, out, &mut ex)?;
    Ok(AlignedTensors {
        sorted_token_ids: sorted.into_tensor()?,
        expert_ids: blocks.into_tensor()?,
        num_tokens_post_padded: used.into_tensor()?,
    })
}

/// Turns the experts' rows into token rows [T, H] of `dtype`. See [`weight_and_reduce_into`].
pub fn weight_and_reduce(
    strategy: WeightAndReduce,
    expert_out: &Tensor,
    topk_ids: &Tensor,
    topk_weights: &Tensor,
    expert_map: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    let mut ex = Exec::for_tensor(expert_out, &Workspace::new())?;
    let guards = [TensorView::new(expert_out)?, TensorView::new(topk_ids)?, TensorView::new(topk_weights)?];
    let [rows, ids, weights] = &guards;
    let map = expert_map.map(TensorView::new).transpose()?;
    let args = CombineArgs {
        topk_ids: ids.view()?,
        topk_weights: weights.view()?,
        expert_map: map.as_ref().map(TensorView::view).transpose()?,
        weights_applied: false,
    };
    let (Some(&tokens), Some(&hidden)) = (topk_ids.dims().first(), expert_out.dims().last()) else {
        bail!("weight_and_reduce: expected expert_out and topk_ids with dimensions, got scalars")
    };
    let mut out = Buffer::zeros(dtype, &[tokens, hidden])?;
    weight_and_reduce_into(strategy, rows.view()?, &args, out.view_mut(), &mut ex)?;
    out.into_tensor()
}
