//! The CUDA forms of the ops that fit every dtype and shape: launches of `cuda/any/*.cu`.
//!
//! Each function is called behind the door of its op, which has checked dtypes and dims; what is
//! left to check here is that the views lie on the device and that sizes fit the launcher.

mod align;
mod attention;
mod ffi;
mod product;
mod route;
mod rows;

pub(crate) use align::*;
pub(crate) use attention::*;
pub(crate) use product::*;
pub use route::*;
pub(crate) use rows::*;

use candle_core::{DType, Result, bail};

use super::{CudaExec, small as int};

/// The launchers' code of a float dtype.
pub(super) fn code(op: &str, dtype: DType) -> Result<i32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F16 => Ok(2),
        other => bail!("{op}: expected dtype f32, bf16 or f16, got {}", other.as_str()),
    }
}

/// A number of elements as launchers take it.
fn count(op: &str, n: usize) -> Result<i64> {
    match i64::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: {n} elements do not fit in a launch"),
    }
}
