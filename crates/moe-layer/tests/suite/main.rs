//! Tests of the crate's contract through its public interface.

// Helpers here may panic like the tests that call them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod add_norm;
mod block;
mod chunks;
mod errors;
mod legacy;
mod legacy_ranks;
mod loading;
mod monolith;
mod offering;
mod published;
mod quantised;
mod reference;
mod step;

use moe_layer::candle::{Result, Tensor};
use moe_layer::{Buffer, DType, Exec, SparseMoeBlock, StepContext, TensorView};

/// Returns the message of a result that must be an error.
pub fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(e) => e.to_string(),
    }
}

/// Returns the block's output for `x`, in `dtype`.
pub fn run(block: &SparseMoeBlock, x: &Tensor, dtype: DType, ex: &mut Exec) -> Result<Tensor> {
    run_in(&mut StepContext::default(), block, x, dtype, ex)
}

/// Does the same as [`run`] within a step.
pub fn run_in(
    context: &mut StepContext,
    block: &SparseMoeBlock,
    x: &Tensor,
    dtype: DType,
    ex: &mut Exec,
) -> Result<Tensor> {
    let mut out = Buffer::zeros(dtype, x.dims())?;
    block.forward_into(TensorView::new(x)?.view()?, out.view_mut(), context, ex)?;
    out.into_tensor()
}

/// Returns every element in f32. That is exact, so equal values mean equal bits (except zeros of two signs).
pub fn floats(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the bits of every element.
pub fn bits(x: &Tensor) -> Vec<u32> {
    floats(x).iter().map(|x| x.to_bits()).collect()
}
