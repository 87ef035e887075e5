//! The device side of an execution context: one stream of one device.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use parking_lot::ReentrantMutex;

use candle_core::cuda_backend::cudarc::cublas::CudaBlas;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{DeviceId, WrapErr};
use candle_core::{CudaDevice, DType, Device, Result, bail};

use super::device::describe;
use super::side::Side;
use super::{PinnedWords, counts, ffi};
use crate::buffer::Buffer;
use crate::plan::Gpu;
use crate::storage::Data;
use crate::view::{View, ViewMut};

/// A device, its stream, and the data that launches need about both.
#[derive(Clone)]
pub(crate) struct CudaExec {
    pub(crate) stream: Arc<CudaStream>,
    /// Ordinal of the device.
    pub(crate) ordinal: usize,
    /// The properties that determine the choice of kernels.
    pub(crate) gpu: Gpu,
    /// candle's handle for dense products, and whether it has its workspace.
    pub(super) blas: Arc<CudaBlas>,
    pub(super) blas_ready: Arc<OnceLock<()>>,
    device: Device,
    counters: Arc<Mutex<Vec<(&'static str, Buffer)>>>,
    /// The end of the last call on tensors, if each thread has its own stream.
    turns: Arc<ReentrantMutex<CudaEvent>>,
    side: Arc<OnceLock<Side>>,
}

/// The stream of candle's default device: this constant means the stream of the calling thread (`cudaStreamPerThread`).
const PER_THREAD: sys::CUstream = 2 as _;

/// The largest number of words of a copy from or to page-locked memory for which a kernel is used.
const WORDS_BY_KERNEL: usize = 1 << 16;

/// The objects that were made for each candle device. Counters and workspaces outlive every context, because candle's
/// cuBLAS handle and captured graphs use them.
static KNOWN: Mutex<Vec<(DeviceId, CudaExec)>> = Mutex::new(Vec::new());

impl CudaExec {
    /// The device side of all contexts on a candle device.
    pub(crate) fn of(device: &CudaDevice) -> Result<Self> {
        // A panic elsewhere cannot leave the list inconsistent: every update is one push.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        match known.iter().find(|(id, _)| *id == device.id()) {
            Some((_, cuda)) => Ok(cuda.clone()),
            None => {
                let cuda = Self::new(device)?;
                known.push((device.id(), cuda.clone()));
                Ok(cuda)
            }
        }
    }

    fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let context = stream.context().clone();
        Ok(Self {
            ordinal: context.ordinal(),
            gpu: describe(&context)?,
            blas: device.cublas_handle(),
            blas_ready: Arc::default(),
            device: Device::Cuda(device.clone()),
            turns: Arc::new(ReentrantMutex::new(context.new_event(None).w()?)),
            stream,
            counters: Arc::default(),
            side: Arc::default(),
        })
    }

    /// The second stream, which is made when it is first needed.
    pub(crate) fn side(&self) -> Result<&Side> {
        if let Some(side) = self.side.get() {
            return Ok(side);
        }
        let made = Side::new(self.ordinal, &self.stream)?;
        Ok(self.side.get_or_init(|| made))
    }

    /// The stream in the form that launchers take; makes the device current on this thread.
    pub(crate) fn raw(&self) -> Result<*mut c_void> {
        self.stream.context().bind_to_thread().w()?;
        Ok(self.stream.cu_stream().cast())
    }

    /// Puts work on the stream after the work of earlier calls, which other threads may have put on their own streams:
    /// all calls share counters, workspaces and cuBLAS's memory. A call within a call counts as part of it.
    pub(crate) fn in_turn<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        if self.stream.cu_stream() != PER_THREAD {
            return work();
        }
        let ended = self.turns.lock();
        self.stream.wait(&ended).w()?;
        let result = work();
        ended.record(&self.stream).w()?;
        result
    }

    /// The address of a view's data; an error if it is not on this device.
    pub(crate) fn read<T>(&self, op: &str, name: &str, view: View<'_>) -> Result<*const T> {
        match view.data() {
            Data::Device(s) if view.data().device() == Some(self.ordinal) => Ok(s.address() as *const T),
            data => {
                let got =
                    data.device().map_or("host memory".into(), |device| format!("CUDA device {device}"));
                bail!("{op}: expected {name} on CUDA device {}, got a view of {got}", self.ordinal)
            }
        }
    }

    /// [`read`](Self::read) for an optional view; null if there is none.
    pub(crate) fn read_or_null<T>(&self, op: &str, name: &str, view: Option<View<'_>>) -> Result<*const T> {
        view.map_or(Ok(std::ptr::null()), |view| self.read(op, name, view))
    }

    /// Address of a writable view's data.
    pub(crate) fn write<T>(&self, op: &str, name: &str, view: &mut ViewMut<'_>) -> Result<*mut T> {
        self.read(op, name, view.as_view()).map(<*const T>::cast_mut)
    }

    /// [`write`](Self::write) for an optional view; null if there is none.
    pub(crate) fn write_or_null<T>(
        &self,
        op: &str,
        name: &str,
        view: Option<&mut ViewMut<'_>>,
    ) -> Result<*mut T> {
        view.map_or(Ok(std::ptr::null_mut()), |view| self.write(op, name, view))
    }

    /// The word that holds the number of valid rows of a padded step.
    pub(crate) fn valid_rows(&self) -> Result<*mut u32> {
        Ok(self.counters("valid_rows", 1)?.cast())
    }

    /// At least `words` u32 words that were zeroed once. Launches of `name` run one after the other, and each leaves
    /// them ready for the next. Earlier, shorter arrays stay allocated, because graphs use them.
    pub(crate) fn counters(&self, name: &'static str, words: usize) -> Result<*mut c_void> {
        self.counters_where(name, words, |have| have >= words)
    }

    /// [`counters`](Self::counters) of exactly `words` words, for launches where the number determines their order.
    pub(crate) fn counters_of_size(&self, name: &'static str, words: usize) -> Result<*mut c_void> {
        self.counters_where(name, words, |have| have == words)
    }

    fn counters_where(
        &self,
        name: &'static str,
        words: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<*mut c_void> {
        // A panic elsewhere cannot leave the list inconsistent: every update is one push.
        let mut all = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |(n, b): &&(&str, Buffer)| *n == name && fits(b.view().elem_count());
        if !all.iter().any(|entry| fits(&entry)) {
            all.push((name, Buffer::zeros_on(&self.device, DType::U32, &[words])?));
        }
        match all.iter().find(fits) {
            Some((_, buffer)) => {
                self.read::<c_void>(name, "counters", buffer.view()).map(<*const _>::cast_mut)
            }
            None => bail!("{name}: no counters"),
        }
    }

    /// Blocks until everything on the stream has ended.
    pub(crate) fn synchronize(&self) -> Result<()> {
        counts::synchronization();
        self.stream.synchronize().w()
    }

    /// Free and total memory, bytes.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.stream.context().mem_get_info().w()
    }

    /// A copy in host memory, after all earlier work.
    pub(crate) fn to_host(&self, view: View<'_>) -> Result<Buffer> {
        let address = self.read::<u8>("to_host", "view", view)? as u64;
        let mut host = Buffer::zeros(view.dtype(), view.dims())?;
        self.raw()?;
        let stream = self.stream.cu_stream();
        crate::with_element!(view.dtype(), "to_host", T => {
            let mut to = host.view_mut();
            // SAFETY: both sides have the same number of elements, and the wait below keeps the host side alive until
            // the copy has ended.
            unsafe { result::memcpy_dtoh_async(to.cpu_mut::<T>()?, address, stream) }.w()
        })?;
        self.synchronize()?;
        Ok(host)
    }

    /// Copies host data to the device and waits for it. Same dtype and number of elements.
    pub(crate) fn copy_from_host(&self, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
        let address = self.write::<u8>("copy_from_host", "to", &mut to)? as u64;
        self.raw()?;
        let stream = self.stream.cu_stream();
        crate::with_element!(from.dtype(), "copy_from_host", T => {
            // SAFETY: both sides have the same number of elements, and the wait below keeps the host side alive until
            // the copy has ended.
            unsafe { result::memcpy_htod_async(address, from.cpu::<T>()?, stream) }.w()
        })?;
        self.synchronize()
    }

    /// Copies from view to view of this device, in stream order. Same dtype and number of elements.
    pub(crate) fn copy(&self, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
        let bytes = from.elem_count() * from.dtype().size_in_bytes();
        let source = self.read::<u8>("copy", "from", from)? as u64;
        let target = self.write::<u8>("copy", "to", &mut to)? as u64;
        self.raw()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides hold `bytes` bytes of this device, lent or freed again only in the order of this stream.
        unsafe { result::memcpy_dtod_async(target, source, bytes, self.stream.cu_stream()) }.w()
    }

    /// Page-locked words.
    pub(crate) fn pinned(&self, len: usize) -> Result<PinnedWords> {
        PinnedWords::new(&self.stream, len)
    }

    /// Copies the first words of `from` to `to`, in stream order; returns at once.
    pub(crate) fn upload(&self, from: &mut PinnedWords, mut to: ViewMut<'_>) -> Result<()> {
        let op = "upload";
        crate::arguments::expect_dtype(op, "to", &to, DType::U32)?;
        let len = to.elem_count();
        let to = self.write::<u32>(op, "to", &mut to)?;
        let from = from.first(op, len)?;
        self.copy_words(op, from.words.as_ptr(), to, len, |stream| {
            // SAFETY: both sides have `len` words, and the host's stay alive: dropping them waits for the stream.
            unsafe { result::memcpy_htod_async(to as u64, from.words, stream) }.w()
        })?;
        from.copied.record(&self.stream).w()
    }

    /// Copies `from` to the first words of `to`, in stream order; returns at once.
    pub(crate) fn download(&self, from: View<'_>, to: &mut PinnedWords) -> Result<()> {
        let op = "download";
        crate::arguments::expect_dtype(op, "from", &from, DType::U32)?;
        let len = from.elem_count();
        let from = self.read::<u32>(op, "from", from)?;
        let to = to.first(op, len)?;
        self.copy_words(op, from, to.words.as_mut_ptr(), len, |stream| {
            // SAFETY: both sides have `len` words, and the host's stay alive: dropping them waits for the stream.
            unsafe { result::memcpy_dtoh_async(to.words, from as u64, stream) }.w()
        })?;
        to.copied.record(&self.stream).w()
    }

    /// Copies words, where one side is page-locked. A kernel copies few words, because it starts and ends sooner than
    /// the copy engine; `engine` copies more.
    fn copy_words(
        &self,
        op: &str,
        from: *const u32,
        to: *mut u32,
        len: usize,
        engine: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<()> {
        let stream = self.raw()?;
        if len > WORDS_BY_KERNEL {
            return engine(self.stream.cu_stream());
        }
        // SAFETY: the caller's two sides have `len` words for as long as the stream uses them. Devices can access
        // page-locked memory by its own address.
        self.check(op, unsafe { ffi::moe_copy_words(from, to, len, stream) })
    }

    /// Turns a launcher's code into a result.
    pub(crate) fn check(&self, op: &str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static, null-terminated string for any code.
        let text = unsafe { std::ffi::CStr::from_ptr(ffi::cudaGetErrorString(code)) };
        bail!("{op}: the CUDA launch failed: {}", text.to_string_lossy())
    }
}
