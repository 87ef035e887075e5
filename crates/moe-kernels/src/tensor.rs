//! Calls on candle tensors: turns tensors into views, and buffers into tensors.
//!
//! Every call of these crates that takes candle tensors goes through [`with_tensors`]. If the caller has a context it
//! is [`with_views`], and for one input and one output with the same rows it is [`forward_rows`]. So all calls take
//! tensors of the CPU and of CUDA devices, contiguous or not, run on the device of their first input and leave their
//! results there. The op checks dtypes, dims and devices itself, and its error names both sides. None of the calls has
//! a gradient, and `backward()` reports that ([`gradient`](crate::gradient)).

use parking_lot::RwLockReadGuard;

use candle_core::{DType, Layout, Result, Storage, Tensor, bail};

use crate::buffer::Buffer;
use crate::dispatched::Lent;
use crate::exec::Exec;
use crate::gradient::{TensorResults, reads, watched};
#[cfg(feature = "cuda")]
use crate::storage::Data;
use crate::storage::cpu_data;
use crate::view::{View, ViewMut};

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
    /// Locks the tensor's storage for reading. The tensor must be contiguous; it may start at an offset.
    pub fn new(tensor: &'a Tensor) -> Result<Self> {
        reads(tensor);
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
        let start = self.layout.start_offset();
        let len = self.layout.shape().elem_count();
        let data = match &*self.storage {
            Storage::Cpu(cpu) => cpu_data(cpu),
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda) => crate::storage::storage_slice(cuda, start + len).map(Data::Device),
            other => bail!("tensors on {:?} cannot be viewed", other.device().location()),
        };
        let Some(data) = data else {
            bail!("tensors of dtype {} cannot be viewed", self.storage.dtype().as_str())
        };
        View::from_data(data.range(start, len), self.layout.dims())
    }
}

impl Drop for TensorView<'_> {
    /// Where candle tracks the uses of tensors over several streams, this use ends here.
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(cuda) = &*self.storage {
            crate::storage::cuda_address(cuda);
        }
    }
}

/// Runs `f` on views of tensors, some of which may be absent, and a context of the first one's device.
///
/// `f` allocates its results by [`Exec::output`] and turns them into tensors of the same device. Tensors that are not
/// contiguous are copied first. On a CUDA device this returns when the work is on the stream; calls of several threads
/// that share modules are put in order, see [`Exec::on`]. Scratch comes from the thread's
/// [workspace](crate::Workspace::of_thread).
///
/// ```
/// use moe_kernels::{add_into, with_tensors, candle::{Device, Tensor}};
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?.t()?;
/// let sum = with_tensors([&x, &x], [], |[a, b], [], ex| {
///     let mut out = ex.output(a.dtype(), a.dims())?;
///     ex.copy(a, out.view_mut())?;
///     add_into(b, out.view_mut(), ex)?;
///     out.into_tensor()
/// })?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[2., 6.], [4., 8.]]);
/// # Ok::<(), moe_kernels::candle::Error>(())
/// ```
///
/// # Errors
/// No tensor; a device other than the CPU or, in a build with the feature `cuda`, a CUDA device; a dtype that no view
/// holds; any error of `f`.
pub fn with_tensors<const N: usize, const M: usize, R: TensorResults>(
    tensors: [&Tensor; N],
    optional: [Option<&Tensor>; M],
    f: impl FnOnce([View<'_>; N], [Option<View<'_>>; M], &mut Exec) -> Result<R>,
) -> Result<R> {
    let Some(first) = tensors.first() else { bail!("expected at least one tensor, whose device is used") };
    let mut ex = Exec::for_tensor(first)?;
    with_views(tensors, optional, |tensors, optional| f(tensors, optional, &mut ex))
}

/// Runs `f` on views of tensors, some of which may be absent, in the context of the caller.
///
/// # Errors
/// The errors of [`with_tensors`].
pub fn with_views<const N: usize, const M: usize, R: TensorResults>(
    tensors: [&Tensor; N],
    optional: [Option<&Tensor>; M],
    f: impl FnOnce([View<'_>; N], [Option<View<'_>>; M]) -> Result<R>,
) -> Result<R> {
    let call = || {
        let tensors = all(tensors.map(contiguous))?;
        let optional = all(optional.map(|tensor| tensor.map(contiguous).transpose()))?;
        let guards = all(tensors.each_ref().map(TensorView::new))?;
        let optional = all(optional.each_ref().map(|t| t.as_ref().map(TensorView::new).transpose()))?;
        let views = all(guards.each_ref().map(TensorView::view))?;
        f(views, all(optional.each_ref().map(|t| t.as_ref().map(TensorView::view).transpose()))?)
    };
    let run = || watched(call);
    #[cfg(feature = "cuda")]
    if let Some(candle_core::Device::Cuda(device)) = tensors.first().map(|tensor| tensor.device()) {
        return crate::cuda::CudaExec::of(device)?.in_turn(run);
    }
    run()
}

/// Runs `f` on `x` [.., H] viewed as [T, H], and on an output [T, `width`] of `dtype`. The result has the leading
/// dimensions of `x`.
///
/// # Errors
/// A scalar; the errors of [`with_tensors`].
pub fn forward_rows(
    x: &Tensor,
    width: usize,
    dtype: DType,
    f: impl FnOnce(View<'_>, ViewMut<'_>, &mut Exec) -> Result<()>,
) -> Result<Tensor> {
    let Some((&hidden, leading)) = x.dims().split_last() else {
        bail!("expected rows [.., H], got a scalar")
    };
    let rows = leading.iter().product::<usize>();
    let matrix = contiguous(x)?.reshape((rows, hidden))?;
    with_tensors([&matrix], [], |[x], [], ex| {
        let mut out = ex.output(dtype, &[rows, width])?;
        f(x, out.view_mut(), ex)?;
        out.into_tensor()?.reshape([leading, &[width]].concat())
    })
}

impl Exec {
    /// A buffer for a result that will be written completely, on the device of this context.
    ///
    /// # Errors
    /// No memory left; a dtype that no view holds.
    pub fn output(&self, dtype: DType, dims: &[usize]) -> Result<Buffer> {
        Buffer::unspecified_on(self.device(), dtype, dims)
    }

    /// A view of host memory in a form that this context's ops can read: the view itself on the CPU, a copy on a CUDA
    /// device. A view of device memory stays unchanged.
    ///
    /// # Errors
    /// No memory left.
    pub fn lend<'a>(&self, view: View<'a>) -> Result<Lent<'a>> {
        if view.is_cuda() || !self.is_cuda() {
            return Ok(view.into());
        }
        Ok(self.scratch_from_host(view)?.into())
    }
}

/// The tensor with its elements in row-major order, at an address where a device may use 16-byte loads: the tensor
/// itself, or a copy.
fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() == 0 && !tensor.is_contiguous() {
        // candle cannot copy an empty tensor on a CUDA device.
        return Buffer::zeros_on(tensor.device(), tensor.dtype(), &[0])?
            .into_tensor()?
            .reshape(tensor.dims());
    }
    let bytes = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    let misaligned = !tensor.device().is_cpu() && !bytes.is_multiple_of(16) && tensor.elem_count() > 0;
    // For candle a contiguous tensor is its own contiguous copy, so the copy is forced.
    if misaligned { tensor.force_contiguous() } else { tensor.contiguous() }
}

/// All results, or the first error.
fn all<T, const N: usize>(results: [Result<T>; N]) -> Result<[T; N]> {
    let all: Vec<T> = results.into_iter().collect::<Result<_>>()?;
    match all.try_into() {
        Ok(all) => Ok(all),
        Err(_) => bail!("expected {N} tensors"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn rows_of_any_leading_dims_and_order_go_through() -> Result<()> {
        let double = |x: &Tensor| {
            forward_rows(x, x.dims()[x.rank() - 1], x.dtype(), |x, mut out, ex| {
                ex.copy(x, out.reborrow())?;
                crate::add_into(x, out, ex)
            })
        };
        let x = Tensor::arange(0f32, 120., &Device::Cpu)?.reshape((2, 3, 1, 4, 5))?;
        for x in [x.clone(), x.transpose(0, 3)?, x.narrow(4, 1, 3)?, x.narrow(1, 1, 0)?.transpose(0, 4)?] {
            let y = double(&x)?;
            assert_eq!(y.dims(), x.dims());
            assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, (&x * 2.)?.flatten_all()?.to_vec1::<f32>()?);
        }
        let scalar = forward_rows(&Tensor::new(1f32, &Device::Cpu)?, 1, DType::F32, |_, _, _| Ok(()));
        assert!(scalar.unwrap_err().to_string().contains("got a scalar"));
        Ok(())
    }

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
