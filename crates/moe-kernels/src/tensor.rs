//! The candle door: tensors in as views, buffers out as tensors.

use parking_lot::RwLockReadGuard;

use candle_core::{Layout, Result, Storage, Tensor, bail};

use crate::element::storage_slice;
use crate::storage::Data;
use crate::view::View;

/// A candle tensor held under its read guard, so that a [`View`] can borrow its data.
///
/// ```
/// use moe_kernels::{TensorView, candle::{Device, Tensor}};
/// let t = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?;
/// let guard = TensorView::new(&t)?;
/// assert_eq!(guard.view()?.cpu::<f32>()?[4], 4.);
/// # Ok::<(), moe_kernels::candle::Error>(())
/// ```
pub struct TensorView<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    layout: &'a Layout,
}

impl<'a> TensorView<'a> {
    /// Locks the tensor's storage for reading. The tensor must be contiguous; its offset is
    /// respected.
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        if !layout.is_contiguous() {
            bail!(
                "expected a contiguous tensor, got dims {:?} with strides {:?}; call .contiguous() first",
                layout.dims(),
                layout.stride()
            )
        }
        Ok(Self { storage, layout })
    }

    /// The view of the tensor's data.
    pub fn view(&self) -> Result<View<'_>> {
        let (start, len) = (self.layout.start_offset(), self.layout.shape().elem_count());
        let data = match &*self.storage {
            Storage::Cpu(cpu) => storage_slice(cpu).map(Data::Cpu),
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda) => crate::cuda::storage_slice(cuda, start + len).map(Data::Device),
            other => bail!("tensors on {:?} cannot be viewed", other.device().location()),
        };
        let Some(data) = data else {
            bail!("tensors of dtype {} cannot be viewed", self.storage.dtype().as_str())
        };
        View::from_data(data.range(start, len), self.layout.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn offsets_are_respected_and_strides_refused() -> Result<()> {
        let t = Tensor::arange(0u32, 12, &Device::Cpu)?.reshape((4, 3))?;
        let rows = t.narrow(0, 1, 2)?;
        assert_eq!(TensorView::new(&rows)?.view()?.cpu::<u32>()?, &[3, 4, 5, 6, 7, 8]);
        let columns = t.narrow(1, 0, 2)?;
        let e = TensorView::new(&columns).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(e.contains("expected a contiguous tensor"), "{e}");
        Ok(())
    }
}
