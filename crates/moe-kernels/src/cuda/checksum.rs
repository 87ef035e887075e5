//! The launch of `cuda/any/checksum.cu`.

use candle_core::Result;

use super::{CudaExec, expect_aligned, ffi};
use crate::view::{View, ViewMut};

/// The caller has checked dims and dtypes.
pub(crate) fn word_sum(cuda: &CudaExec, op: &str, bytes: View, mut out: ViewMut) -> Result<()> {
    expect_aligned(op, &[bytes])?;
    let len = i64::try_from(bytes.elem_count()).map_err(candle_core::Error::wrap)?;
    let bytes = cuda.read(op, "bytes", bytes)?;
    let out = cuda.write(op, "out", &mut out)?;
    // SAFETY: `bytes` holds `len` bytes and `out` one word, by the caller's checks.
    cuda.check(op, unsafe { ffi::moe_any_word_sum(bytes, len, out, cuda.raw()?) })
}
