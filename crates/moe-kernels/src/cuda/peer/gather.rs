//! All-gather and reduce-scatter. Each rank may bring a different number of rows.

use std::ffi::c_void;

use candle_core::{DType, Result, bail};

use super::{MAX_PEERS, PeerBuffers, ffi};
use crate::arguments::{expect_dims, expect_dtype, expect_matrix};
use crate::cuda::{CudaExec, small};
use crate::exec::Exec;
use crate::view::{View, ViewMut};

/// The largest number of arrays in a call.
const MAX_ARRAYS: usize = 4;

/// An array in the form that the launcher takes.
#[repr(C)]
pub(crate) struct PeerArray {
    input: *const c_void,
    out: *mut c_void,
    slots: [u32; MAX_PEERS],
    exact: u32,
}

impl PeerArray {
    fn new(op: &str, parts: &[usize], input: View, out: &mut ViewMut, cuda: &CudaExec) -> Result<Self> {
        let dtype = input.dtype();
        let Some(slots) = slots_of_all(dtype, parts) else {
            bail!("{op}: parts of {parts:?} elements of {} are no whole slots", dtype.as_str())
        };
        let exact = u32::from(is_exact(dtype));
        Ok(Self { input: cuda.read(op, "input", input)?, out: cuda.write(op, "out", out)?, slots, exact })
    }
}

/// Which ranks need which rows, in the form that the launcher takes.
#[repr(C)]
pub(crate) struct PeerNeeds {
    ids: *const u32,
    owners: *const u32,
    top_k: u32,
    experts: u32,
    row_slots: u32,
}

impl PeerNeeds {
    /// Which ranks need which of `rows` [T, ..]: from the ids [T, K] of their tokens, and the owners \[P\] of the
    /// experts.
    pub(super) fn new(op: &str, rows: &View, (ids, owners): (View, View), cuda: &CudaExec) -> Result<Self> {
        let (t, top_k) = expect_matrix(op, "ids", &ids)?;
        expect_dtype(op, "ids", &ids, DType::U32)?;
        expect_dtype(op, "owners", &owners, DType::U32)?;
        let width: usize = rows.dims().iter().skip(1).product();
        let (Some(row_slots), true) = (row_slots(rows.dtype(), width), rows.dims().first() == Some(&t))
        else {
            bail!("{op}: expected {t} rows of floats in whole slots, got dims {:?}", rows.dims())
        };
        let number = |n: usize| u32::try_from(n).map_err(candle_core::Error::wrap);
        let top_k = number(top_k)?;
        let experts = number(owners.elem_count())?;
        let ids = cuda.read(op, "ids", ids)?;
        let owners = cuda.read(op, "owners", owners)?;
        Ok(Self { ids, owners, top_k, experts, row_slots })
    }
}

/// The slots of a row of floats; `None` if it does not fill whole slots.
pub(super) fn row_slots(dtype: DType, width: usize) -> Option<u32> {
    slots(dtype, width).filter(|slots| *slots > 0 && !is_exact(dtype))
}

/// The numbers of rows of each rank, followed by zeros, as launchers take them.
pub(super) fn counts_of_all(counts: &[usize]) -> Result<[u32; MAX_PEERS]> {
    let mut rows = [0u32; MAX_PEERS];
    for (to, count) in rows.iter_mut().zip(counts) {
        *to = u32::try_from(*count).map_err(candle_core::Error::wrap)?;
    }
    Ok(rows)
}

/// The address of a value; null if there is none.
pub(super) fn address<T>(value: &Option<T>) -> *const T {
    value.as_ref().map_or(std::ptr::null(), |value| value)
}

/// Whether every bit pattern must be kept.
fn is_exact(dtype: DType) -> bool {
    matches!(dtype, DType::U32 | DType::I32 | DType::I64)
}

/// The number of slots that `count` elements fill; `None` if they do not fill whole slots or cannot be sent.
fn slots(dtype: DType, count: usize) -> Option<u32> {
    let slot = match dtype {
        DType::F32 | DType::BF16 | DType::F16 => 16,
        _ if is_exact(dtype) => 8,
        _ => return None,
    };
    let bytes = count.checked_mul(dtype.size_in_bytes())?;
    bytes.is_multiple_of(slot).then(|| u32::try_from(bytes / slot).ok())?
}

/// [`slots`] of every rank's part, followed by zeros; `None` also if the total is too large to count.
fn slots_of_all(dtype: DType, parts: &[usize]) -> Option<[u32; MAX_PEERS]> {
    let mut all = [0; MAX_PEERS];
    let mut total = 0u32;
    for (at, &count) in all.iter_mut().zip(parts) {
        *at = slots(dtype, count)?;
        total = total.checked_add(*at)?;
    }
    (parts.len() <= MAX_PEERS && i32::try_from(total).is_ok()).then_some(all)
}

/// The number of elements in each rank's part of `view`, with `counts` rows of each rank; `None` if `view` has a
/// different number of rows.
fn parts(view: &View, counts: &[usize]) -> Option<Vec<usize>> {
    let rows = counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n))?;
    let width = view.dims().iter().skip(1).product::<usize>();
    (view.dims().first() == Some(&rows)).then(|| counts.iter().map(|n| n * width).collect())
}

impl PeerBuffers {
    /// Whether [`all_gather_into`](Self::all_gather_into) takes arrays with these numbers of elements of each rank. All
    /// ranks get the same answer.
    pub fn fits_gather<'p>(&self, arrays: impl Iterator<Item = (DType, &'p [usize])>) -> bool {
        let arrays: Vec<_> = arrays.collect();
        let fits = |(dtype, parts): &(DType, &[usize])| {
            parts.len() == self.ranks as usize && slots_of_all(*dtype, parts).is_some()
        };
        arrays.len() <= MAX_ARRAYS && arrays.iter().all(fits)
    }

    /// For each pair: concatenates every rank's `input` [counts\[rank\], ..] in rank order into `out` [sum(counts),
    /// ..], with any alignment. `counts` has one entry per rank and is the same on all ranks. Integers and floats keep
    /// their bits, except for the payloads of NaNs.
    ///
    /// `needs` are the ids [sum(counts), K] u32 of the tokens of one array of floats, the same on all ranks, and the
    /// rank \[P\] u32 that owns each expert. With `needs` a row is sent only to the owners of its token's experts, and
    /// other rows of `out` are unspecified.
    ///
    /// # Errors
    /// A view that is not on the context's device; different dtypes in a pair or wrong numbers of rows; what
    /// [`fits_gather`](Self::fits_gather) refuses; `needs` with several arrays, or with rows that do not fill whole
    /// slots.
    pub fn all_gather_into(
        &self,
        arrays: Vec<(View, ViewMut)>,
        counts: &[usize],
        needs: Option<(View, View)>,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer all_gather";
        let cuda = ex.cuda("peer all_gather")?;
        if counts.len() != self.ranks as usize || arrays.len() > MAX_ARRAYS {
            let ranks = self.ranks;
            let got = arrays.len();
            bail!(
                "{op}: expected counts of {ranks} ranks and up to {MAX_ARRAYS} arrays, got {counts:?} and {got}"
            )
        }
        let needs = match (needs, &arrays[..]) {
            (Some(needs), [(_, out)]) => Some(PeerNeeds::new(op, &out.as_view(), needs, cuda)?),
            (None, _) => None,
            (Some(_), _) => bail!("{op}: expected one array with needs, got {}", arrays.len()),
        };
        let own = counts[self.rank as usize];
        let mut all = Vec::with_capacity(arrays.len());
        for (input, mut out) in arrays {
            expect_dtype(op, "out", &out, input.dtype())?;
            let (Some(parts), Some(&rows)) = (parts(&out.as_view(), counts), input.dims().first()) else {
                bail!("{op}: expected out with the rows of {counts:?}, got dims {:?}", out.dims())
            };
            if rows != own || input.elem_count() != parts[self.rank as usize] {
                bail!("{op}: expected {own} rows of {:?}, got dims {:?}", out.dims(), input.dims())
            }
            all.push(PeerArray::new(op, &parts, input, &mut out, cuda)?);
        }
        // SAFETY: dtypes and sizes are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe {
            ffi::moe_peer_all_gather(self, all.as_ptr(), small(op, all.len())?, address(&needs), cuda.raw()?)
        })
    }

    /// Whether [`reduce_scatter_into`](Self::reduce_scatter_into) takes parts with these numbers of elements of each
    /// rank, of this dtype. All ranks get the same answer.
    pub fn fits_scatter(&self, dtype: DType, parts: &[usize]) -> bool {
        let ranks = parts.len() == self.ranks as usize;
        ranks && matches!(dtype, DType::F32 | DType::BF16) && slots_of_all(dtype, parts).is_some()
    }

    /// `out` [counts\[rank\], ..] f32 = this rank's part of the sum over the ranks of `input` [sum(counts), ..], f32 or
    /// bf16, with any alignment. Additions are in f32 in rank order, with the same bits in every run. `counts` has one
    /// entry per rank and is the same on all ranks. With `needs` as in [`all_gather_into`](Self::all_gather_into), a
    /// row's sum is over the owners of its token's experts.
    ///
    /// # Errors
    /// A view that is not on the context's device; wrong dtypes or numbers of elements; what
    /// [`fits_scatter`](Self::fits_scatter) refuses.
    pub fn reduce_scatter_into(
        &self,
        input: View,
        counts: &[usize],
        needs: Option<(View, View)>,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "peer reduce_scatter";
        let cuda = ex.cuda("peer reduce_scatter")?;
        let dtype = input.dtype();
        expect_dtype(op, "out", &out, DType::F32)?;
        let parts = parts(&input, counts).filter(|parts| self.fits_scatter(dtype, parts));
        let Some((slots, parts)) = parts.and_then(|parts| Some((slots_of_all(dtype, &parts)?, parts))) else {
            bail!(
                "{op}: expected rows of f32 or bf16 of {} ranks in slots of 16 bytes, got counts {counts:?} of {} of dims {:?}",
                self.ranks,
                dtype.as_str(),
                input.dims()
            )
        };
        let needs = needs.map(|needs| PeerNeeds::new(op, &input, needs, cuda)).transpose()?;
        let own = parts[self.rank as usize];
        expect_dims(op, "out", &out.as_view().reshape(&[out.elem_count()])?, &[own])?;
        let input = cuda.read(op, "input", input)?;
        let to = cuda.write(op, "out", &mut out)?;
        let narrow = i32::from(dtype == DType::BF16);
        let slots = slots.as_ptr();
        // SAFETY: dtypes and sizes are checked above; the buffers are the promise of `new`.
        cuda.check(op, unsafe {
            ffi::moe_peer_reduce_scatter(self, input, narrow, to, slots, address(&needs), cuda.raw()?)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_does_not_fill_slots_is_left_to_others() {
        assert_eq!(
            (slots(DType::BF16, 8), slots(DType::F32, 4), slots(DType::U32, 2)),
            (Some(1), Some(1), Some(1))
        );
        assert_eq!((slots(DType::BF16, 4), slots(DType::U32, 3), slots(DType::U8, 16)), (None, None, None));
        // SAFETY: nothing is launched.
        let group = unsafe { PeerBuffers::new(0, &[0; 4], 2 << 20, 0, Duration::from_secs(1)) }.unwrap();
        // A step of Qwen3-30B-A3B: rows of 2,048 with 8 ids and weights.
        let gathers = |tokens: [usize; 4]| {
            let part = |width| tokens.map(|n| n * width);
            let rows = part(2048);
            let slots = part(8);
            group.fits_gather(
                [(DType::BF16, &rows[..]), (DType::U32, &slots), (DType::F32, &slots)].into_iter(),
            )
        };
        assert!(gathers([0; 4]) && gathers([128; 4]) && gathers([5000, 0, 17, 256]));
        assert!(!gathers([1 << 32, 0, 0, 0]), "slots are counted in 32 bits");
        assert!(group.fits_scatter(DType::F32, &[2048 * 128, 0, 4, 8]));
        assert!(group.fits_scatter(DType::BF16, &[2048; 4]) && !group.fits_scatter(DType::BF16, &[12; 4]));
        assert!(!group.fits_scatter(DType::F16, &[2048; 4]) && !group.fits_scatter(DType::F32, &[6; 4]));
        assert!(!group.fits_scatter(DType::F32, &[4; 3]), "three parts of four ranks");
        assert!(!group.fits_gather([(DType::F32, &[4; 4][..]); 5].into_iter()));
    }

    #[test]
    fn parts_are_rows_of_a_view() {
        let data = [0f32; 12];
        let view = View::new(&data, &[6, 2]).unwrap();
        assert_eq!(parts(&view, &[1, 0, 5]), Some(vec![2, 0, 10]));
        assert_eq!(parts(&view, &[1, 4]), None);
    }
}
