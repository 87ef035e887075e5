//! Views: borrowed, contiguous, row-major arrays with a dtype and dims.
//!
//! Every op of the workspace is a function over views (`*_into`). There are two reasons: a candle tensor can be read
//! but not lent mutably to another crate, and a captured CUDA graph needs fixed outputs that the caller owns. A
//! [`View`] borrows a candle tensor under its read guard ([`TensorView`](crate::TensorView)), a slice, or a buffer; a
//! [`ViewMut`] borrows a slice or a buffer. The data is in host memory or on a CUDA device. Offsets are resolved when
//! the view is made, so ops only see dense data.

use candle_core::{DType, Result, bail};

use crate::storage::Element;
use crate::storage::{Data, DataMut};

/// The most dimensions a view has.
pub const MAX_RANK: usize = 4;

/// Dimensions of a view, stored inline so that views are `Copy` and need no allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    rank: u8,
    dims: [usize; MAX_RANK],
}

impl Dims {
    /// Up to [`MAX_RANK`] dimensions; more is an error.
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_RANK {
            bail!("a view has at most {MAX_RANK} dimensions, got {dims:?}")
        }
        let mut d = [0; MAX_RANK];
        d[..dims.len()].copy_from_slice(dims);
        Ok(Self { rank: dims.len() as u8, dims: d })
    }

    /// Number of elements; an error if the product overflows.
    pub fn elem_count(&self) -> Result<usize> {
        match self.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) {
            Some(n) => Ok(n),
            None => bail!("the dimensions {self:?} overflow"),
        }
    }
}

impl std::ops::Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", &**self)
    }
}

fn checked_dims(dims: &[usize], len: usize) -> Result<Dims> {
    let dims = Dims::new(dims)?;
    if dims.elem_count()? != len {
        bail!("dims {dims:?} need {} elements, got {len}", dims.elem_count()?)
    }
    Ok(dims)
}

/// A borrowed, read-only array.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    data: Data<'a>,
    dims: Dims,
}

/// A borrowed, writable array.
#[derive(Debug)]
pub struct ViewMut<'a> {
    data: DataMut<'a>,
    dims: Dims,
}

/// Getters that both kinds of views have.
macro_rules! shape_getters {
    () => {
        /// The dimensions.
        pub fn dims(&self) -> &[usize] {
            &self.dims
        }

        /// The dtype.
        pub fn dtype(&self) -> DType {
            self.data.dtype()
        }

        /// Number of elements.
        pub fn elem_count(&self) -> usize {
            self.data.len()
        }

        /// Size of dimension 0 (1 for a scalar).
        pub fn rows(&self) -> usize {
            self.dims.first().copied().unwrap_or(1)
        }
    };
}

impl<'a> View<'a> {
    /// A view of host data. The dims' product must equal the slice's length.
    pub fn new<T: Element>(data: &'a [T], dims: &[usize]) -> Result<Self> {
        Self::from_data(T::wrap(data), dims)
    }

    pub(crate) fn from_data(data: Data<'a>, dims: &[usize]) -> Result<Self> {
        Ok(Self { data, dims: checked_dims(dims, data.len())? })
    }

    /// A view whose dims the caller has already checked against the data.
    pub(crate) fn trusted(data: Data<'a>, dims: Dims) -> Self {
        Self { data, dims }
    }

    shape_getters!();

    /// The elements.
    #[cfg(feature = "cuda")]
    pub(crate) fn data(&self) -> Data<'a> {
        self.data
    }

    /// Whether the elements are in memory of a CUDA device.
    pub fn is_cuda(&self) -> bool {
        self.data.device().is_some()
    }

    /// The host data; an error if the dtype differs or the data is on a device.
    pub fn cpu<T: Element>(&self) -> Result<&'a [T]> {
        match T::slice(self.data) {
            Some(s) => Ok(s),
            None => wrong_elements::<T, _>(self.dtype(), self.data.device()),
        }
    }

    /// A widened copy of a float view.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        crate::with_float!(self.dtype(), "to_f32_vec", T => {
            Ok(self.cpu::<T>()?.iter().map(|x| crate::Float::widen(*x)).collect())
        })
    }

    /// The same data with other dims of equal element count.
    pub fn reshape(&self, dims: &[usize]) -> Result<View<'a>> {
        Self::from_data(self.data, dims)
    }

    /// Rows `start..start + len` of dimension 0.
    pub fn narrow(&self, start: usize, len: usize) -> Result<View<'a>> {
        let (offset, count, dims) = narrowed(&self.dims, start, len)?;
        Ok(View { data: self.data.range(offset, count), dims })
    }
}

impl<'a> ViewMut<'a> {
    /// A writable view of host data. The dims' product must equal the slice's length.
    pub fn new<T: Element>(data: &'a mut [T], dims: &[usize]) -> Result<Self> {
        Self::from_data(T::wrap_mut(data), dims)
    }

    pub(crate) fn from_data(data: DataMut<'a>, dims: &[usize]) -> Result<Self> {
        let dims = checked_dims(dims, data.len())?;
        Ok(Self { data, dims })
    }

    /// A view whose dims the caller has already checked against the data.
    pub(crate) fn trusted(data: DataMut<'a>, dims: Dims) -> Self {
        Self { data, dims }
    }

    shape_getters!();

    /// A read-only view of the same data.
    pub fn as_view(&self) -> View<'_> {
        View { data: self.data.as_data(), dims: self.dims }
    }

    /// A shorter borrow of the same data, to pass on by value.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { data: self.data.reborrow(), dims: self.dims }
    }

    /// Whether the elements are in memory of a CUDA device.
    pub fn is_cuda(&self) -> bool {
        self.as_view().is_cuda()
    }

    /// The host data; an error if the dtype differs or the data is on a device.
    pub fn cpu_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        let dtype = self.dtype();
        let device = self.as_view().data.device();
        match T::slice_mut(self.data.reborrow()) {
            Some(s) => Ok(s),
            None => wrong_elements::<T, _>(dtype, device),
        }
    }

    /// Copies host data of the same dtype and number of elements.
    pub fn copy_from(&mut self, from: View<'_>) -> Result<()> {
        if from.elem_count() != self.elem_count() {
            bail!("cannot copy dims {:?} to dims {:?}", from.dims(), self.dims())
        }
        crate::with_element!(from.dtype(), "copy", T => {
            self.cpu_mut::<T>()?.copy_from_slice(from.cpu::<T>()?);
            Ok(())
        })
    }

    /// The same data with other dims of equal element count.
    pub fn reshape(self, dims: &[usize]) -> Result<ViewMut<'a>> {
        Self::from_data(self.data, dims)
    }

    /// Rows `start..start + len` of dimension 0.
    pub fn narrow(self, start: usize, len: usize) -> Result<ViewMut<'a>> {
        let (offset, count, dims) = narrowed(&self.dims, start, len)?;
        Ok(ViewMut { data: self.data.range(offset, count), dims })
    }

    /// Two disjoint views: rows `..mid` and `mid..` of dimension 0.
    pub fn split_at(self, mid: usize) -> Result<(ViewMut<'a>, ViewMut<'a>)> {
        let (_, count, head) = narrowed(&self.dims, 0, mid)?;
        let (_, _, tail) = narrowed(&self.dims, mid, self.rows() - mid)?;
        let (a, b) = self.data.split_at(count);
        Ok((ViewMut { data: a, dims: head }, ViewMut { data: b, dims: tail }))
    }
}

/// The error that says why elements are not host elements of `T`.
fn wrong_elements<T: Element, R>(dtype: DType, device: Option<usize>) -> Result<R> {
    match device {
        Some(device) => bail!("expected a view of host memory, got one on CUDA device {device}"),
        None => bail!("expected a {} view, got {}", T::DTYPE.as_str(), dtype.as_str()),
    }
}

/// Element offset, element count and dims of rows `start..start + len`.
fn narrowed(dims: &Dims, start: usize, len: usize) -> Result<(usize, usize, Dims)> {
    let rows = dims.first().copied().unwrap_or(1);
    if dims.is_empty() || start.checked_add(len).is_none_or(|end| end > rows) {
        bail!("rows {start}..{start}+{len} are outside of a view with dims {dims:?}")
    }
    let row = dims[1..].iter().product::<usize>();
    let mut out = *dims;
    out.dims[0] = len;
    Ok((start * row, len * row, out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_must_match_the_data() {
        assert!(View::new(&[1f32; 6], &[2, 3]).is_ok());
        let e = View::new(&[1f32; 6], &[2, 4]).unwrap_err().to_string();
        assert!(e.contains("[2, 4] need 8 elements, got 6"), "{e}");
        assert!(View::new(&[0u32; 0], &[usize::MAX, 2]).is_err());
        assert!(View::new(&[0u32; 1], &[1; 5]).is_err());
    }

    #[test]
    fn narrow_and_split_keep_rows() -> Result<()> {
        let mut data: Vec<u32> = (0..12).collect();
        let v = View::new(&data, &[4, 3])?;
        assert_eq!(v.narrow(1, 2)?.cpu::<u32>()?, &[3, 4, 5, 6, 7, 8]);
        assert!(v.narrow(3, 2).is_err());
        assert!(v.narrow(usize::MAX, 2).is_err());
        let (mut a, mut b) = ViewMut::new(&mut data, &[4, 3])?.split_at(1)?;
        a.cpu_mut::<u32>()?[0] = 100;
        b.cpu_mut::<u32>()?[0] = 200;
        assert_eq!((data[0], data[3]), (100, 200));
        Ok(())
    }

    #[test]
    fn a_wrong_dtype_names_both() {
        let e = View::new(&[1f32], &[1]).unwrap().cpu::<u32>().unwrap_err().to_string();
        assert!(e.contains("expected a u32 view, got f32"), "{e}");
    }
}
