//! All-gather and reduce-scatter.

use std::ffi::c_void;

use candle_core::{DType, Result, bail};

use super::{PeerBuffers, ffi};
use crate::cuda::{CudaExec, small};
use crate::door::{expect_dims, expect_dtype};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// Most arrays of a call.
const MAX_ARRAYS: usize = 4;

/// An array as the launcher takes it.
#[repr(C)]
pub(crate) struct PeerArray {
    input: *const c_void,
    out: *mut c_void,
    slots: u32,
    exact: u32,
}

impl PeerArray {
    fn new(op: &str, input: View, out: &mut ViewMut, cuda: &CudaExec) -> Result<Self> {
        let (dtype, count) = (input.dtype(), input.elem_count());
        let Some(slots) = slots(dtype, count).and_then(|slots| u32::try_from(slots).ok()) else {
            bail!("{op}: {count} elements of {} are no whole slots", dtype.as_str())
        };
        let exact = u32::from(is_exact(dtype));
        Ok(Self { input: cuda.read(op, "input", input)?, out: cuda.write(op, "out", out)?, slots, exact })
    }
}

/// Whether every bit pattern is a value of its own.
fn is_exact(dtype: DType) -> bool {
    matches!(dtype, DType::U32 | DType::I32 | DType::I64)
}

/// The slots that so many elements fill; `None` where they fill none to the end, or cannot travel.
fn slots(dtype: DType, count: usize) -> Option<usize> {
    let slot = match dtype {
        DType::F32 | DType::BF16 | DType::F16 => 16,
        _ if is_exact(dtype) => 8,
        _ => return None,
    };
    let bytes = count.checked_mul(dtype.size_in_bytes())?;
    bytes.is_multiple_of(slot).then_some(bytes / slot)
}

impl PeerBuffers {
    /// Whether a call may send so many slots to each rank.
    fn holds(&self, slots: usize) -> bool {
        // SAFETY: a pure function of two numbers.
        slots <= unsafe { ffi::moe_peer_slots(self.ranks, self.capacity as usize) }
    }

    /// Whether [`all_gather_into`](Self::all_gather_into) takes arrays of which each rank has so many elements: the same answer
    /// on all ranks.
    pub fn fits_gather(&self, arrays: impl Iterator<Item = (DType, usize)>) -> bool {
        let slots: Option<Vec<usize>> = arrays.map(|(dtype, count)| slots(dtype, count)).collect();
        slots.is_some_and(|all| {
            all.len() <= MAX_ARRAYS && self.holds(all.iter().fold(0, |sum, n| sum.saturating_add(*n)))
        })
    }

    /// Concatenates every rank's `input` [R, ..], of the same R on all ranks, in rank order into `out` [ranks * R, ..], for each
    /// pair; any alignment. Integers keep their bits, floats theirs but for the payloads of NaNs.
    ///
    /// # Errors
    /// A view that does not lie on the context's device; other dtypes or numbers of elements in a pair; what
    /// [`fits_gather`](Self::fits_gather) refuses.
    pub fn all_gather_into(&self, arrays: Vec<(View, ViewMut)>, ex: &mut Exec) -> Result<()> {
        let (op, cuda) = ("peer all_gather", ex.cuda("peer all_gather")?);
        if !self.fits_gather(arrays.iter().map(|(input, _)| (input.dtype(), input.elem_count()))) {
            let all: Vec<_> = arrays.iter().map(|(input, _)| input.elem_count()).collect();
            bail!("{op}: expected up to {MAX_ARRAYS} small arrays of whole slots, got {all:?} elements")
        }
        let mut parts = Vec::with_capacity(arrays.len());
        for (input, mut out) in arrays {
            expect_dtype(op, "out", &out, input.dtype())?;
            if out.elem_count() != input.elem_count() * self.ranks as usize {
                bail!("{op}: expected out of {} x {:?}, got {:?}", self.ranks, input.dims(), out.dims())
            }
            parts.push(PeerArray::new(op, input, &mut out, cuda)?);
        }
        // SAFETY: dtypes and sizes are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe {
            ffi::moe_peer_all_gather(self, parts.as_ptr(), small(op, parts.len())?, cuda.raw()?)
        })
    }

    /// Whether [`reduce_scatter_into`](Self::reduce_scatter_into) takes parts of so many elements: the same answer on all ranks.
    pub fn fits_scatter(&self, dtype: DType, count: usize) -> bool {
        dtype == DType::F32 && slots(dtype, count).is_some_and(|slots| self.holds(slots))
    }

    /// `out` [R, ..] = this rank's part of the sum over the ranks of `input` [ranks * R, ..], both f32 of any alignment: additions
    /// in rank order, the same bits in every run.
    ///
    /// # Errors
    /// A view that does not lie on the context's device; wrong dtypes or numbers of elements; what
    /// [`fits_scatter`](Self::fits_scatter) refuses.
    pub fn reduce_scatter_into(&self, input: View, mut out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (op, cuda, count) = ("peer reduce_scatter", ex.cuda("peer reduce_scatter")?, out.elem_count());
        expect_dtype(op, "input", &input, DType::F32)?;
        if !self.fits_scatter(out.dtype(), count) {
            let dtype = out.dtype().as_str();
            bail!("{op}: expected a small multiple of 4 elements of f32, got {count} of {dtype}")
        }
        let all = input.reshape(&[input.elem_count()])?;
        expect_dims(op, "input", &all, &[count * self.ranks as usize])?;
        let (input, to) = (cuda.read(op, "input", input)?, cuda.write(op, "out", &mut out)?);
        // SAFETY: dtypes and sizes are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe { ffi::moe_peer_reduce_scatter(self, input, to, count, cuda.raw()?) })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_does_not_fill_slots_or_fit_is_left_to_others() {
        assert_eq!(
            (slots(DType::BF16, 8), slots(DType::F32, 4), slots(DType::U32, 2)),
            (Some(1), Some(1), Some(1))
        );
        assert_eq!((slots(DType::BF16, 4), slots(DType::U32, 3), slots(DType::U8, 16)), (None, None, None));
        let capacity = 2 << 20;
        // SAFETY: nothing is launched.
        let group = unsafe { PeerBuffers::new(0, &[0; 4], capacity, 0, Duration::from_secs(1)) }.unwrap();
        // A decode step of Qwen3-30B-A3B: rows of 2,048 with 8 ids and weights.
        let step = |tokens: usize| {
            [(DType::BF16, 2048 * tokens), (DType::U32, 8 * tokens), (DType::F32, 8 * tokens)].into_iter()
        };
        assert!(group.fits_gather(step(0)) && group.fits_gather(step(128)) && !group.fits_gather(step(256)));
        assert!(group.fits_scatter(DType::F32, 2048 * 128) && !group.fits_scatter(DType::F32, 2048 * 256));
        assert!(!group.fits_scatter(DType::BF16, 2048) && !group.fits_scatter(DType::F32, 6));
        assert!(!group.fits_gather([(DType::F32, 4); 5].into_iter()));
    }
}
