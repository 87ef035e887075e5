//! Owned buffers and the workspace that recycles them.
//!
//! A forward pass borrows scratch buffers from the workspace and returns them on drop, so that after the first pass at
//! the largest size nothing is allocated. A frozen workspace refuses to grow. A step may only be captured into a graph
//! in this state.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::storage::Element;
use crate::storage::Memory;
use crate::view::{Dims, View, ViewMut};

/// An owned, contiguous array.
#[derive(Debug)]
pub struct Buffer {
    data: Memory,
    dims: Dims,
}

impl Buffer {
    /// A buffer of zeros in host memory.
    pub fn zeros(dtype: DType, dims: &[usize]) -> Result<Self> {
        Self::zeros_on(&Device::Cpu, dtype, dims)
    }

    /// A buffer of zeros in host memory or on a CUDA device.
    pub fn zeros_on(device: &Device, dtype: DType, dims: &[usize]) -> Result<Self> {
        let dims = Dims::new(dims)?;
        Ok(Self { data: allocate(device, dtype, dims.elem_count()?)?, dims })
    }

    /// A buffer that must be written completely before it is read. On a CUDA device it contains whatever the memory
    /// held before; in host memory it contains zeros, which cost nothing there.
    pub fn unspecified_on(device: &Device, dtype: DType, dims: &[usize]) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let dims = Dims::new(dims)?;
            let data = crate::storage::DeviceMemory::unspecified(device, dtype, dims.elem_count()?)?;
            return Ok(Self { data: Memory::Cuda(data), dims });
        }
        Self::zeros_on(device, dtype, dims)
    }

    /// Takes over a vector.
    pub fn from_vec<T: Element>(data: Vec<T>, dims: &[usize]) -> Result<Self> {
        View::new(&data, dims)?;
        Ok(Self { data: T::wrap_vec(data), dims: Dims::new(dims)? })
    }

    /// A copy of a view of host memory.
    pub(crate) fn copy_of(view: View<'_>) -> Result<Self> {
        let mut copy = Self::zeros(view.dtype(), view.dims())?;
        copy.view_mut().copy_from(view)?;
        Ok(copy)
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.data.as_data().dtype()
    }

    /// A read-only view.
    pub fn view(&self) -> View<'_> {
        // Every constructor checks the dims, and a scratch buffer may be longer than its dims.
        let len = self.dims.iter().product();
        View::trusted(self.data.as_data().range(0, len), self.dims)
    }

    /// A writable view.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.dims.iter().product();
        ViewMut::trusted(self.data.as_data_mut().range(0, len), self.dims)
    }

    /// Moves the data into a candle tensor, without a copy.
    pub fn into_tensor(self) -> Result<Tensor> {
        let storage = self.data.into_storage(self.dims.iter().product());
        Ok(Tensor::from_storage(storage, self.dims.to_vec(), BackpropOp::none(), false))
    }
}

/// Zeros on a device.
fn allocate(device: &Device, dtype: DType, len: usize) -> Result<Memory> {
    match device {
        Device::Cpu => {
            check_memory(dtype, len)?;
            match Memory::zeros(dtype, len) {
                Some(data) => Ok(data),
                None => bail!("no buffer holds dtype {}", dtype.as_str()),
            }
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::storage::DeviceMemory::zeros(device, dtype, len).map(Memory::Cuda),
        other => bail!("buffers cannot be on {:?}", other.location()),
    }
}

/// Ordinal of a CUDA device; `None` for the CPU.
fn ordinal(device: &Device) -> Option<usize> {
    match device.location() {
        candle_core::DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
        _ => None,
    }
}

/// Fails if the system refuses memory for `len` elements. This is an error where `vec!` would abort.
fn check_memory(dtype: DType, len: usize) -> Result<()> {
    // Small requests rarely fail, and a test allocation for each would cost more than the request.
    const LARGE: usize = 1 << 24;
    let bytes = len.saturating_mul(dtype.size_in_bytes());
    if bytes > LARGE && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        bail!("the system refuses {bytes} bytes of memory for {len} elements of {}", dtype.as_str())
    }
    Ok(())
}

#[derive(Default, Debug)]
struct Pool {
    free: Vec<Memory>,
    bytes: usize,
    limit: Option<usize>,
    frozen: bool,
}

impl Pool {
    /// Frees the largest free buffer of the host, which is now too small: if the need grows from step to step, only the
    /// largest size is kept. Buffers of a device stay, because recorded graphs hold their addresses.
    fn drop_outgrown(&mut self, dtype: DType, place: Option<usize>) {
        let outgrown =
            |&i: &usize| self.free[i].as_data().dtype() == dtype && self.free[i].as_data().device().is_none();
        let largest = (0..self.free.len()).filter(outgrown).max_by_key(|&i| self.free[i].as_data().len());
        if let (None, Some(i)) = (place, largest) {
            let memory = self.free.swap_remove(i);
            self.bytes -= bytes_of(&memory);
        }
    }

    /// Takes a buffer back, or frees it if the pool is larger than its limit.
    fn take_back(&mut self, memory: Memory) {
        if !self.frozen && self.limit.is_some_and(|limit| self.bytes > limit) {
            self.bytes -= bytes_of(&memory);
        } else {
            self.free.push(memory);
        }
    }
}

fn bytes_of(memory: &Memory) -> usize {
    let data = memory.as_data();
    data.len() * data.dtype().size_in_bytes()
}

thread_local! {
    /// The workspaces of this thread for calls on tensors.
    static OF_THREAD: RefCell<Vec<(Device, Workspace)>> = const { RefCell::new(Vec::new()) };
}

/// A pool of scratch buffers. Cloning shares the pool.
#[derive(Clone, Default, Debug)]
pub struct Workspace(Arc<Mutex<Pool>>);

impl Workspace {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// The workspace that all calls on tensors of `device` share on this thread, in whatever module. The calls of a
    /// thread run one after another, so one workspace serves all layers of a model. It lives as long as the thread;
    /// [`trim`](Self::trim) frees its memory earlier.
    pub fn of_thread(device: &Device) -> Self {
        let find_or_make = |known: &RefCell<Vec<(Device, Self)>>| {
            let mut known = known.borrow_mut();
            if let Some((_, workspace)) = known.iter().find(|(of, _)| of.same_device(device)) {
                return workspace.clone();
            }
            let workspace = Self::new();
            known.push((device.clone(), workspace.clone()));
            workspace
        };
        // While a thread ends, its workspaces are already gone, and a call gets a new one.
        OF_THREAD.try_with(find_or_make).unwrap_or_default()
    }

    /// Scratch memory of this dtype and these dims, with unspecified contents. It returns to the pool when it is
    /// dropped. On a frozen workspace a request that no free buffer can hold is an error.
    pub fn scratch(&self, dtype: DType, dims: &[usize]) -> Result<Scratch> {
        self.scratch_on(&Device::Cpu, dtype, dims)
    }

    /// [`scratch`](Self::scratch) on a device. Buffers on a CUDA device must be used on that device's stream: a buffer
    /// that was returned may be lent again while kernels still read it.
    pub fn scratch_on(&self, device: &Device, dtype: DType, dims: &[usize]) -> Result<Scratch> {
        let place = ordinal(device);
        let dims = Dims::new(dims)?;
        let len = dims.elem_count()?;
        let mut pool = self.lock();
        let best = (0..pool.free.len())
            .filter(|&i| {
                let memory = pool.free[i].as_data();
                memory.dtype() == dtype && memory.len() >= len && memory.device() == place
            })
            .min_by_key(|&i| pool.free[i].as_data().len());
        let data = match best {
            Some(i) => pool.free.swap_remove(i),
            None if pool.frozen => bail!(
                "the workspace is frozen and holds no free {} buffer for dims {dims:?}; \
                 reserve it for a larger number of tokens",
                dtype.as_str()
            ),
            None => {
                pool.drop_outgrown(dtype, place);
                let data = allocate(device, dtype, len)?;
                pool.bytes += len * dtype.size_in_bytes();
                data
            }
        };
        Ok(Scratch { buffer: Some(Buffer { data, dims }), pool: self.clone() })
    }

    /// Refuses to allocate from now on (`true`), or allows it again.
    pub fn freeze(&self, frozen: bool) {
        self.lock().frozen = frozen;
    }

    /// Whether it may not grow. In this state launches can be recorded into a graph.
    pub fn is_frozen(&self) -> bool {
        self.lock().frozen
    }

    /// Bytes of the pool, both lent and free.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Frees the buffers that are not lent. A frozen workspace keeps them, because a graph may have recorded their
    /// addresses.
    pub fn trim(&self) {
        let mut pool = self.lock();
        if !pool.frozen {
            let freed: usize = pool.free.drain(..).map(|memory| bytes_of(&memory)).sum();
            pool.bytes -= freed;
        }
    }

    /// Limits the memory that is kept between calls. While the pool is larger than `bytes`, returned buffers are freed,
    /// so later calls allocate them again. `None`, the default, keeps all buffers. The limit does not apply to the
    /// memory that one call needs at the same time.
    pub fn set_limit(&self, bytes: Option<usize>) {
        self.lock().limit = bytes;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Pool> {
        // A panic elsewhere cannot leave the pool inconsistent, because every update is one push or remove.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer lent by a [`Workspace`]. It returns to the workspace when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    buffer: Option<Buffer>,
    pool: Workspace,
}

impl std::ops::Deref for Scratch {
    type Target = Buffer;
    #[allow(clippy::expect_used)]
    fn deref(&self) -> &Buffer {
        self.buffer.as_ref().expect("scratch is only empty inside drop")
    }
}

impl std::ops::DerefMut for Scratch {
    #[allow(clippy::expect_used)]
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer.as_mut().expect("scratch is only empty inside drop")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.lock().take_back(buffer.data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_errors() {
        let e = Buffer::zeros(DType::BF16, &[1 << 40, 1 << 10]).unwrap_err().to_string();
        assert!(e.contains("refuses"), "{e}");
        assert!(Workspace::new().scratch(DType::F32, &[1 << 50]).is_err());
        assert!(Buffer::zeros(DType::F32, &[usize::MAX, 2]).is_err());
        assert!(Buffer::unspecified_on(&Device::Cpu, DType::F32, &[1 << 50]).is_err());
    }

    #[test]
    fn unspecified_memory_of_the_host_is_zero() -> Result<()> {
        let buffer = Buffer::unspecified_on(&Device::Cpu, DType::F16, &[3, 5])?;
        assert_eq!((buffer.dims(), buffer.dtype()), (&[3, 5][..], DType::F16));
        assert_eq!(buffer.view().to_f32_vec()?, vec![0.; 15]);
        Ok(())
    }

    #[test]
    fn what_grows_holds_its_largest_size_alone() -> Result<()> {
        let workspace = Workspace::new();
        let held = workspace.scratch(DType::F32, &[10])?;
        for rows in 1..100 {
            let _columns = workspace.scratch(DType::F32, &[rows, 50])?;
            let _all = workspace.scratch(DType::F32, &[rows, 100])?;
        }
        // Two buffers are lent at the same time, each of at most the larger size; lent buffers stay.
        assert!(workspace.bytes() <= 40 + 2 * 99 * 100 * 4, "{}", workspace.bytes());
        assert_eq!(held.view().to_f32_vec()?, vec![0.; 10]);
        let steady = workspace.bytes();
        drop(workspace.scratch(DType::F32, &[99, 100])?);
        assert_eq!(workspace.bytes(), steady);
        Ok(())
    }

    #[test]
    fn a_thread_has_one_workspace_for_each_device() -> Result<()> {
        let workspace = Workspace::of_thread(&Device::Cpu);
        drop(workspace.scratch(DType::F32, &[100])?);
        assert_eq!(Workspace::of_thread(&Device::Cpu).bytes(), 400);
        let of_another = std::thread::spawn(|| Workspace::of_thread(&Device::Cpu).bytes()).join();
        assert_eq!(of_another.ok(), Some(0));
        workspace.trim();
        assert_eq!(Workspace::of_thread(&Device::Cpu).bytes(), 0);
        Ok(())
    }

    #[test]
    fn a_limit_frees_what_comes_back_and_lent_buffers_survive_a_trim() -> Result<()> {
        let workspace = Workspace::new();
        let kept = workspace.scratch(DType::F32, &[10])?;
        workspace.set_limit(Some(40));
        drop(workspace.scratch(DType::F32, &[20])?);
        assert_eq!(workspace.bytes(), 40);
        workspace.trim();
        assert_eq!(workspace.bytes(), 40);
        drop(kept);
        workspace.freeze(true);
        workspace.trim();
        assert_eq!(workspace.bytes(), 40);
        workspace.freeze(false);
        workspace.trim();
        assert_eq!(workspace.bytes(), 0);
        Ok(())
    }

    #[test]
    fn scratch_is_recycled_and_a_frozen_workspace_does_not_grow() -> Result<()> {
        let workspace = Workspace::new();
        drop(workspace.scratch(DType::F32, &[4, 8])?);
        assert_eq!(workspace.bytes(), 128);
        workspace.freeze(true);
        let held = workspace.scratch(DType::F32, &[3])?;
        assert_eq!((held.dims(), held.view().elem_count()), (&[3][..], 3));
        let e = workspace.scratch(DType::F32, &[1]).unwrap_err().to_string();
        assert!(e.contains("the workspace is frozen"), "{e}");
        drop(held);
        assert!(workspace.scratch(DType::BF16, &[1]).is_err());
        assert!(workspace.scratch(DType::F32, &[32]).is_ok());
        Ok(())
    }
}
