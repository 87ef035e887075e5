//! The CUDA forms of the ops that fit every dtype and shape: launches of `cuda/any/*.cu`.
//!
//! Each function is called by its op, which has checked dtypes and dims. The functions only check that the views are on
//! the device and that sizes are within the launcher's limits.

mod align;
mod mla;
mod product;
mod prompt;
mod route;
mod rows;

pub(crate) use align::*;
pub(crate) use mla::*;
pub(crate) use product::*;
pub(crate) use prompt::*;
pub use route::*;
pub(crate) use rows::*;

use candle_core::{Result, bail};

use super::args::Dtype;
use super::{CudaExec, ffi, small as int};

/// A number of elements as launchers take it.
pub(super) fn count(op: &str, n: usize) -> Result<i64> {
    match i64::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: {n} elements do not fit in a launch"),
    }
}
