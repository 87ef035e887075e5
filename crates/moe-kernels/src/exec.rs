//! The execution context of an op: device, threads, instruction set, workspace.
//!
//! An [`Exec`] has the role of a CUDA stream: ops that share it run in order. On the CPU it has a thread pool and an
//! instruction set. Two runs with one instruction set are bit-identical, whatever the number of threads; runs with
//! different instruction sets differ within a stated bound.

mod awake;
#[cfg(feature = "cuda")]
mod cuda;
mod isa;
mod launches;
mod side_stream;

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::arguments;
use crate::buffer::{Buffer, Scratch, Workspace};
#[cfg(feature = "cuda")]
use crate::cuda::Timeline;
use crate::plan::{Fp8Activations, Gpu, Machine};
use crate::view::{View, ViewMut};

pub use isa::CpuIsa;
pub use launches::{LaunchLog, Launched, LaunchedAsOne};

/// The properties of a CUDA device that determine the choice of kernels; `None` for other devices. If no kernel can run
/// on the card, the result has no features, and the first op on the card returns an error with the reason.
pub fn gpu_of(device: &Device) -> Option<Gpu> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Some(crate::cuda::CudaExec::of(device).map_or(Gpu::NONE, |cuda| cuda.gpu)),
        _ => None,
    }
}

/// The context in which every op runs. A clone shares device, threads and workspace.
#[derive(Clone)]
pub struct Exec {
    device: Device,
    isa: CpuIsa,
    threads: Option<Arc<rayon::ThreadPool>>,
    workspace: Workspace,
    /// The second stream's workspace: its buffers are reused in the order of that stream.
    #[cfg(feature = "cuda")]
    side_workspace: Workspace,
    batch_invariant: bool,
    fp8_activations: Fp8Activations,
    launches: Option<LaunchLog>,
    #[cfg(feature = "cuda")]
    cuda: Option<crate::cuda::CudaExec>,
    #[cfg(feature = "cuda")]
    timeline: Option<Timeline>,
}

impl Exec {
    /// A CPU context on rayon's global pool, with the fastest instruction set and a workspace
    /// of its own.
    pub fn cpu() -> Self {
        Self {
            device: Device::Cpu,
            isa: CpuIsa::detect(),
            threads: None,
            workspace: Workspace::new(),
            #[cfg(feature = "cuda")]
            side_workspace: Workspace::new(),
            batch_invariant: false,
            fp8_activations: Fp8Activations::Off,
            launches: None,
            #[cfg(feature = "cuda")]
            cuda: None,
            #[cfg(feature = "cuda")]
            timeline: None,
        }
    }

    /// A context on a device: the stream of a CUDA device, or [`cpu`](Self::cpu).
    ///
    /// All work on a CUDA device runs on the stream of the candle device, in order with candle's own work. A device
    /// made by `cuda::device` has one stream, which any thread may use. A device made by `Device::new_cuda` uses a
    /// different stream in each thread. Calls on tensors ([`with_tensors`](crate::with_tensors)) put the work of
    /// different threads in order. A caller of `*_into` functions on such a device must stay on one thread, and must
    /// synchronise the device before it passes tensors to another thread, as with candle alone.
    pub fn on(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::cpu()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let cuda = Some(crate::cuda::CudaExec::of(cuda)?);
                Ok(Self { device: device.clone(), cuda, ..Self::cpu() })
            }
            other => bail!(
                "expected the CPU or, in a build with the feature `cuda`, a CUDA device; got {:?}",
                other.location()
            ),
        }
    }

    /// The context of a tensor's device, with this thread's workspace for it.
    pub fn for_tensor(tensor: &Tensor) -> Result<Self> {
        let device = tensor.device();
        Ok(Self { workspace: Workspace::of_thread(device), ..Self::on(device)? })
    }

    /// Forces an instruction set; an error if this machine lacks it.
    pub fn with_isa(mut self, isa: CpuIsa) -> Result<Self> {
        self.isa = CpuIsa::from_name(isa.name())?;
        Ok(self)
    }

    /// The largest number of threads of a pool: more than any machine has cores.
    pub const MAX_THREADS: usize = 4096;

    /// Runs on a separate pool of `n` threads.
    ///
    /// # Errors
    /// `n` is 0 or above [`MAX_THREADS`](Self::MAX_THREADS); the system cannot start the threads.
    pub fn with_threads(mut self, n: usize) -> Result<Self> {
        if !(1..=Self::MAX_THREADS).contains(&n) {
            bail!("threads: expected 1 to {}, got {n}", Self::MAX_THREADS)
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
        self.threads = Some(Arc::new(pool.map_err(candle_core::Error::wrap)?));
        Ok(self)
    }

    /// Makes a row's bits independent of the other rows in the call: every op then uses a form that does not depend on
    /// the number of rows. On the CPU this is always the case. On CUDA these forms are slower than the ones that are
    /// chosen by the number of rows.
    #[must_use]
    pub fn with_batch_invariant(self, batch_invariant: bool) -> Self {
        Self { batch_invariant, ..self }
    }

    /// Whether a row's bits must not depend on other rows.
    pub fn batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// Allows products of many rows to quantise their activations if the weights are FP8, on CUDA. Otherwise the
    /// activations keep their dtype.
    #[must_use]
    pub fn with_fp8_activations(self, fp8_activations: Fp8Activations) -> Self {
        Self { fp8_activations, ..self }
    }

    /// For which products activations may be quantised.
    pub fn fp8_activations(&self) -> Fp8Activations {
        self.fp8_activations
    }

    /// Adds a mark to the [log of launches](LaunchLog) and, on CUDA, to the device's timeline (`with_timeline`), if the
    /// context has them. The mark names the work that follows.
    pub fn mark(&self, what: &'static str, index: usize) -> Result<()> {
        if let Some(log) = &self.launches {
            log.mark(what, index);
        }
        #[cfg(feature = "cuda")]
        if let Some(timeline) = &self.timeline {
            return timeline.mark(what, index);
        }
        Ok(())
    }

    /// Records launches in a log.
    #[must_use]
    pub fn with_launch_log(self, launches: Option<LaunchLog>) -> Self {
        Self { launches, ..self }
    }

    /// Records a launch by its name in a plan. The name is only computed if there is a log.
    pub fn launched<N: Into<String>>(&self, kernel: impl FnOnce() -> N) {
        if let Some(log) = &self.launches {
            log.note(kernel().into());
        }
    }

    /// Like [`launched`](Self::launched), for several launches that a plan names as one: all launches until the result
    /// is dropped.
    #[must_use = "the launches of the whole are those until this is dropped"]
    pub fn launched_as_one<N: Into<String>>(&self, kernel: impl FnOnce() -> N) -> Option<LaunchedAsOne> {
        self.launches.as_ref().map(|log| log.note_whole(kernel().into()))
    }

    /// The device that ops run on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The properties that determine the choice of kernels.
    pub fn machine(&self) -> Machine {
        #[cfg(feature = "cuda")]
        let gpu = self.cuda.as_ref().map(|cuda| cuda.gpu);
        #[cfg(not(feature = "cuda"))]
        let gpu = None;
        Machine { gpu, batch_invariant: self.batch_invariant, fp8_activations: self.fp8_activations }
    }

    /// The instruction-set path of the CPU kernels.
    pub fn isa(&self) -> CpuIsa {
        self.isa
    }

    /// Number of threads that CPU kernels use.
    pub fn num_threads(&self) -> usize {
        self.threads.as_ref().map_or_else(rayon::current_num_threads, |p| p.current_num_threads())
    }

    /// Runs `f` inside the thread pool, where rayon's parallel iterators use its threads. A caller of many ops, such as
    /// a step of a model, should enter the pool once: from outside of it every parallel op costs two hand-overs between
    /// threads.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(pool) => pool.install(f),
            // The global pool has no handle, but a scope runs inside it.
            None => rayon::scope(|_| f()),
        }
    }

    /// Whether ops run on a CUDA device.
    pub fn is_cuda(&self) -> bool {
        self.device.is_cuda()
    }

    /// A buffer of zeros on the device.
    pub fn zeros(&self, dtype: DType, dims: &[usize]) -> Result<Buffer> {
        Buffer::zeros_on(&self.device, dtype, dims)
    }

    /// Scratch from the workspace, with unspecified contents.
    pub fn scratch(&self, dtype: DType, dims: &[usize]) -> Result<Scratch> {
        self.workspace.scratch_on(&self.device, dtype, dims)
    }

    /// The workspace.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Blocks until all work on a CUDA device's stream has ended. Ops on the CPU have always ended when they return.
    pub fn synchronize(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &self.cuda {
            return cuda.synchronize();
        }
        Ok(())
    }

    /// A copy in host memory. For a device view it waits for all earlier work.
    pub fn to_host(&self, view: View<'_>) -> Result<Buffer> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = self.cuda.as_ref().filter(|_| view.is_cuda()) {
            return cuda.to_host(view);
        }
        Buffer::copy_of(view)
    }

    /// A buffer of this context's device with a copy of host data.
    pub fn buffer_from_host(&self, from: View<'_>) -> Result<Buffer> {
        let mut copy = Buffer::unspecified_on(&self.device, from.dtype(), from.dims())?;
        self.copy_from_host(from, copy.view_mut())?;
        Ok(copy)
    }

    /// Scratch of this context's device with a copy of host data.
    pub fn scratch_from_host(&self, from: View<'_>) -> Result<Scratch> {
        let mut copy = self.scratch(from.dtype(), from.dims())?;
        self.copy_from_host(from, copy.view_mut())?;
        Ok(copy)
    }

    /// Copies host data to a view of the device with the same dtype and number of elements. For a CUDA device it
    /// returns when the host data may be changed again.
    pub fn copy_from_host(&self, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
        arguments::expect_dtype("copy_from_host", "from", &from, to.dtype())?;
        if from.elem_count() != to.elem_count() {
            bail!("copy_from_host: expected {} elements, got {}", to.elem_count(), from.elem_count())
        }
        #[cfg(feature = "cuda")]
        if let Some(cuda) = self.cuda.as_ref().filter(|_| to.is_cuda()) {
            return cuda.copy_from_host(from, to);
        }
        to.copy_from(from)
    }
}

impl Exec {
    /// Copies `from` to `to`, of the same dtype and number of elements. Both must be in host memory or both on the
    /// device; on the device the copy is in stream order.
    pub fn copy(&self, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
        arguments::expect_dtype("copy", "to", &to, from.dtype())?;
        if from.elem_count() != to.elem_count() {
            bail!("copy: expected {} elements, got {}", from.elem_count(), to.elem_count())
        }
        #[cfg(feature = "cuda")]
        if from.is_cuda() || to.is_cuda() {
            return self.cuda("copy")?.copy(from, to);
        }
        to.copy_from(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_holds_what_was_launched_and_wholes_without_their_parts() {
        let log = LaunchLog::default();
        let ex = Exec::cpu().with_launch_log(Some(log.clone()));
        let launch = |name: &'static str| ex.launched(|| name);
        launch("before");
        ex.mark("layer", 3).unwrap();
        {
            let _whole = ex.launched_as_one(|| "whole");
            let _inner = ex.launched_as_one(|| "inner");
            launch("part");
        }
        ex.clone().launched(|| "after");
        let names: Vec<_> = log.take().into_iter().map(|one| (one.mark, one.kernel)).collect();
        let layer = Some(("layer", 3));
        let expected = [(None, "before"), (layer, "whole"), (layer, "after")];
        assert_eq!(names, expected.map(|(mark, name)| (mark, name.to_string())));
        assert_eq!(log.take(), []);
        Exec::cpu().launched(|| -> String { panic!("without a log no name is made") });
    }

    #[test]
    fn copies_of_host_data_have_its_dims_and_are_written_whole() -> Result<()> {
        let ex = Exec::cpu();
        // Scratch memory that is reused still has its old contents.
        ex.scratch(DType::U32, &[9])?.view_mut().cpu_mut::<u32>()?.fill(7);
        let data = [1u32, 2, 3, 4, 5, 6];
        let dims = [2, 3];
        let view = View::new(&data, &dims)?;
        let buffer = ex.buffer_from_host(view)?;
        let scratch = ex.scratch_from_host(view)?;
        for copy in [buffer.view(), scratch.view()] {
            assert_eq!((copy.dims(), copy.cpu::<u32>()?), (&dims[..], &data[..]));
        }
        let nothing = View::new::<f32>(&[], &[0, 3])?;
        assert_eq!(ex.scratch_from_host(nothing)?.dims(), nothing.dims());
        Ok(())
    }
}
