//! One communicator of the NCCL library. No other file calls the library.
//!
//! Calls on a communicator must not overlap and must not follow its end. So each call holds the lock around the
//! pointer, and the thread that ends the communicator takes the pointer away first. The library's calls do not block
//! (see [`non_blocking`]), so the lock is held only briefly.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::nccl::sys;
use candle_core::cuda_backend::cudarc::nccl::sys::{
    ncclComm, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
};
use candle_core::{DType, Error, Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use super::library::{explain, non_blocking, version};
use crate::collective::ReduceOp;
use crate::parts::{Part, Verb};

/// The time limit for a communicator that is dropped to end its work and its connections.
const FAREWELL: Duration = Duration::from_secs(5);

const SUCCESS: ncclResult_t = ncclResult_t::ncclSuccess;
const IN_PROGRESS: ncclResult_t = ncclResult_t::ncclInProgress;

/// A [`Part`] in the form that the library takes.
struct Call {
    verb: Verb,
    input: *const c_void,
    out: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
}

/// Whether the library is still working on its last call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Busy,
}

/// A communicator of the library.
pub(super) struct Handle {
    /// `None` once some thread has ended it.
    comm: Mutex<Option<Comm>>,
}

struct Comm(ncclComm_t);

// SAFETY: the library's communicators belong to no thread; overlapping calls are excluded by the lock.
unsafe impl Send for Comm {}

/// Memory into which the library writes a communicator, at once or when it is ready.
///
/// The library may write late, so these few bytes are never freed.
pub(super) struct Slot(&'static AtomicPtr<ncclComm>);

impl Slot {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(null_mut()))))
    }
}

impl Handle {
    /// Begins to join the group of `id`.
    pub(super) fn init(id: [u8; 128], rank: usize, size: usize) -> Result<Self> {
        version()?;
        let slot = Slot::new();
        let mut config = non_blocking();
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let size = number("world size", size)?;
        let rank = number("rank", rank)?;
        // SAFETY: the slot lives on; the configuration is read before the call returns.
        let code = unsafe { sys::ncclCommInitRankConfig(slot.0.as_ptr(), size, id, rank, &mut config) };
        Self::begun(code, &slot, "ncclCommInitRankConfig")
    }

    fn begun(code: ncclResult_t, slot: &Slot, call: &str) -> Result<Self> {
        let comm = slot.0.load(Ordering::Acquire);
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            bail!("{call}: {}", explain(code, null_mut()))
        }
        Ok(Self { comm: Mutex::new(Some(Comm(comm))) })
    }

    /// Begins to split the group. Call [`split_end`](Self::split_end) once this communicator is idle. The return value
    /// does not tell that: the library returns success while the split is under way.
    pub(super) fn split_begin(&self, color: usize, key: usize) -> Result<Slot> {
        let slot = Slot::new();
        let mut config = non_blocking();
        let color = number("color", color)?;
        let key = number("key", key)?;
        // SAFETY: the communicator lives while the lock is held; the slot lives on, and the configuration is read
        // before the call returns.
        self.call("ncclCommSplit", |comm| unsafe {
            sys::ncclCommSplit(comm, color, key, slot.0.as_ptr(), &mut config)
        })?;
        Ok(slot)
    }

    /// The communicator of the new group.
    pub(super) fn split_end(&self, slot: &Slot) -> Result<Self> {
        Self::begun(SUCCESS, slot, "ncclCommSplit")
    }

    /// This rank and the number of ranks, as the library counts them.
    pub(super) fn place(&self) -> Result<(usize, usize)> {
        let mut rank = 0;
        let mut size = 0;
        // SAFETY: the communicator lives while the lock is held; each call writes one number.
        self.call("ncclCommUserRank", |comm| unsafe { sys::ncclCommUserRank(comm, &mut rank) })?;
        // SAFETY: as above.
        self.call("ncclCommCount", |comm| unsafe { sys::ncclCommCount(comm, &mut size) })?;
        Ok((usize::try_from(rank).map_err(Error::wrap)?, usize::try_from(size).map_err(Error::wrap)?))
    }

    /// Puts the parts on the context's stream as one group of calls. Parts without elements are left out; they are the
    /// same parts on all ranks.
    pub(super) fn launch(&self, parts: &[Part<'_>], ex: &Exec) -> Result<Progress> {
        let calls = parts.iter().map(|part| Call::of(part, ex)).collect::<Result<Vec<_>>>()?;
        let stream = ex.stream()?;
        stream.context().bind_to_thread().w()?;
        let stream = stream.cu_stream().cast();
        if calls.iter().all(|call| call.count == 0) {
            return Ok(Progress::Done);
        }
        // SAFETY: the communicator lives while the lock is held; addresses and counts come from views of its
        // device, whose memory is freed or lent again only in the order of this stream; a group that begins here
        // ends here, whatever its calls return.
        self.call("NCCL", |comm| unsafe {
            let begun = sys::ncclGroupStart();
            if begun != SUCCESS {
                return begun;
            }
            let codes = calls.iter().filter(|call| call.count > 0).map(|call| call.make(comm, stream));
            let failed =
                codes.filter(|code| !matches!(*code, SUCCESS | IN_PROGRESS)).reduce(|first, _| first);
            let ended = sys::ncclGroupEnd();
            failed.unwrap_or(ended)
        })
    }

    /// Whether the last call is done. It is an error if the communicator has failed by itself.
    pub(super) fn progress(&self) -> Result<Progress> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives while the lock is held; the call writes one number.
        let call = |comm| match unsafe { sys::ncclCommGetAsyncError(comm, &mut state) } {
            SUCCESS => state,
            code => code,
        };
        self.call("NCCL", call)
    }

    /// Stops everything that runs on the communicator, on the host and on the device, and ends it. It may wait until
    /// recorded graphs that use the communicator are dropped.
    pub(super) fn abort(&self) {
        if let Some(Comm(comm)) = self.take() {
            // SAFETY: nobody else has the pointer any more. There is nobody to tell about a failure.
            unsafe { sys::ncclCommAbort(comm) };
        }
    }

    /// Keeps the communicator until the process ends.
    pub(super) fn leave(&self) {
        self.take();
    }

    /// Takes the communicator, so that no other thread can use it.
    fn take(&self) -> Option<Comm> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Comm>> {
        // A panic elsewhere cannot leave a pointer inconsistent.
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the library under the lock.
    fn call(&self, what: &str, f: impl FnOnce(ncclComm_t) -> ncclResult_t) -> Result<Progress> {
        let comm = self.lock();
        let Some(Comm(comm)) = *comm else { bail!("{what}: the communicator has been aborted") };
        match f(comm) {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Busy),
            code => bail!("{what}: {}", explain(code, comm)),
        }
    }
}

impl Drop for Handle {
    /// Ends the communicator properly if that is possible within [`FAREWELL`]. It is not possible if other ranks are
    /// gone or a recorded graph still exists; then the communicator ends with the process.
    fn drop(&mut self) {
        // SAFETY: the communicator lives while the lock is held.
        let finalize = |comm| unsafe { sys::ncclCommFinalize(comm) };
        let mut progress = self.call("ncclCommFinalize", finalize);
        let start = Instant::now();
        while matches!(progress, Ok(Progress::Busy)) && start.elapsed() < FAREWELL {
            std::thread::sleep(Duration::from_micros(100));
            progress = self.progress();
        }
        if let (Ok(Progress::Done), Some(Comm(comm))) = (progress, self.take()) {
            // SAFETY: nobody else has the pointer any more, and the communicator is idle.
            unsafe { sys::ncclCommDestroy(comm) };
        }
    }
}

impl Call {
    /// The addresses and the count; an error if a view is not in memory of the context's device.
    fn of(part: &Part<'_>, ex: &Exec) -> Result<Self> {
        let out_view = part.out.as_ref().map(ViewMut::as_view);
        let input_view = part.input.or(out_view);
        let sized = match part.verb {
            Verb::AllGather | Verb::Reduce { .. } | Verb::Send { .. } => input_view,
            _ => out_view,
        };
        let Some(sized) = sized else { bail!("a collective without data") };
        // A missing view has the address null.
        let address = |name, view: Option<View>| view.map_or(Ok(0), |view| ex.address("NCCL", name, view));
        let input = address("input", input_view)?;
        let out = address("out", out_view)?;
        Ok(Self {
            verb: part.verb,
            input: input as *const c_void,
            out: out as *mut c_void,
            count: sized.elem_count(),
            dtype: dtype(sized.dtype())?,
        })
    }

    /// # Safety
    /// The communicator and the stream are alive. The addresses stay valid for what the verb reads and writes until the
    /// stream has passed the call.
    unsafe fn make(&self, comm: ncclComm_t, stream: sys::cudaStream_t) -> ncclResult_t {
        let Self { verb, input, out, count, dtype } = *self;
        // SAFETY: the caller's promise. Ranks and roots are below the world's size, which is a c_int.
        unsafe {
            match verb {
                Verb::AllReduce(op) => sys::ncclAllReduce(input, out, count, dtype, code(op), comm, stream),
                Verb::AllGather => sys::ncclAllGather(input, out, count, dtype, comm, stream),
                Verb::ReduceScatter(op) => {
                    sys::ncclReduceScatter(input, out, count, dtype, code(op), comm, stream)
                }
                Verb::Broadcast { root } => {
                    sys::ncclBroadcast(input, out, count, dtype, root as c_int, comm, stream)
                }
                Verb::Reduce { op, root } => {
                    sys::ncclReduce(input, out, count, dtype, code(op), root as c_int, comm, stream)
                }
                Verb::Send { to } => sys::ncclSend(input, count, dtype, to as c_int, comm, stream),
                Verb::Recv { from } => sys::ncclRecv(out, count, dtype, from as c_int, comm, stream),
            }
        }
    }
}

/// A new identity for a group.
pub(super) fn unique_id() -> Result<[u8; 128]> {
    version()?;
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes 128 bytes.
    match unsafe { sys::ncclGetUniqueId(&mut id) } {
        SUCCESS => Ok(id.internal.map(|byte| byte as u8)),
        code => bail!("ncclGetUniqueId: {}", explain(code, null_mut())),
    }
}

fn number(what: &str, n: usize) -> Result<c_int> {
    match c_int::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("NCCL: the {what} {n} does not fit 32 bits"),
    }
}

fn code(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
    }
}

fn dtype(dtype: DType) -> Result<ncclDataType_t> {
    Ok(match dtype {
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        other => bail!("no collective moves dtype {}", other.as_str()),
    })
}
