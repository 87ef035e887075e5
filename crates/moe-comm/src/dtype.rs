//! Dispatch from a view's dtype to its Rust type, and typed copies between views.

use candle_core::{Result, bail};
use moe_kernels::{Buffer, Exec, Scratch, View, ViewMut};

/// Runs `$body` with the type `$t` bound to the Rust type of any dtype that a view holds.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {{
        use candle_core::DType;
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            DType::F16 => {
                type $t = half::f16;
                $body
            }
            DType::U8 => {
                type $t = u8;
                $body
            }
            DType::U32 => {
                type $t = u32;
                $body
            }
            DType::I32 => {
                type $t = i32;
                $body
            }
            DType::I64 => {
                type $t = i64;
                $body
            }
            other => candle_core::bail!("no collective moves dtype {}", other.as_str()),
        }
    }};
}
pub(crate) use with_element;

/// Copies `src` to `dst`, which has the same dtype and number of elements.
pub(crate) fn copy(src: View, mut dst: ViewMut) -> Result<()> {
    if src.elem_count() != dst.elem_count() {
        bail!("cannot copy dims {:?} to dims {:?}", src.dims(), dst.dims())
    }
    with_element!(src.dtype(), T => dst.cpu_mut::<T>()?.copy_from_slice(src.cpu::<T>()?));
    Ok(())
}

/// A copy of `src` in scratch of the workspace, which other threads may read.
pub(crate) fn copied(src: View, ex: &Exec) -> Result<Scratch> {
    let mut scratch = ex.scratch(src.dtype(), src.dims())?;
    let buffer: &mut Buffer = &mut scratch;
    copy(src, buffer.view_mut())?;
    Ok(scratch)
}
