//! One communicator of the library: the only place that calls it.
//!
//! Calls on a communicator must not overlap and must not follow its end, so each one holds the
//! lock around the pointer, and whoever ends the communicator takes the pointer away first. The
//! library's calls do not block (see [`Config::non_blocking`]), so the lock is held for moments.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Error, Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use super::library::{Code, Config, IN_PROGRESS, Library, RawComm, SUCCESS, UniqueId};
use crate::communicator::ReduceOp;
use crate::parts::{Part, Verb};

/// How long a communicator that is dropped may take to end its work and its connections.
const FAREWELL: Duration = Duration::from_secs(5);

/// A part as the library takes it.
struct Call {
    verb: Verb,
    input: *const c_void,
    out: *mut c_void,
    count: usize,
    dtype: c_int,
}

/// Whether the library still works on what it was last asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Busy,
}

/// A communicator of the library.
pub(super) struct Handle {
    library: &'static Library,
    /// None once somebody has ended it.
    comm: Mutex<Option<Comm>>,
}

struct Comm(*mut RawComm);

// SAFETY: the library's communicators belong to no thread; overlapping calls are excluded by the lock.
unsafe impl Send for Comm {}

/// Where the library writes a communicator, now or when it is ready.
///
/// A late write must find the memory, so the few bytes are never freed.
pub(super) struct Slot(&'static AtomicPtr<RawComm>);

impl Slot {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(null_mut()))))
    }
}

impl Handle {
    /// Begins to join the group of `id`.
    pub(super) fn init(id: [u8; 128], rank: usize, size: usize) -> Result<Self> {
        let library = Library::get()?;
        let (slot, mut config) = (Slot::new(), Config::non_blocking());
        let (size, rank) = (number("world size", size)?, number("rank", rank)?);
        // SAFETY: the slot lives on; the configuration is read before the call returns.
        let code = unsafe { (library.init_rank)(slot.0.as_ptr(), size, UniqueId(id), rank, &mut config) };
        Self::begun(library, code, &slot, "ncclCommInitRankConfig")
    }

    fn begun(library: &'static Library, code: Code, slot: &Slot, call: &str) -> Result<Self> {
        let comm = slot.0.load(Ordering::Acquire);
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            bail!("{call}: {}", library.explain(code, null_mut()))
        }
        Ok(Self { library, comm: Mutex::new(Some(Comm(comm))) })
    }

    /// Begins to split the group; [`split_end`](Self::split_end) follows once this one is idle.
    pub(super) fn split_begin(&self, color: usize, key: usize) -> Result<(Slot, Progress)> {
        let (slot, mut config) = (Slot::new(), Config::non_blocking());
        let (color, key) = (number("color", color)?, number("key", key)?);
        // SAFETY: the communicator lives while the lock is held; the slot lives on, and the configuration is read
        // before the call returns.
        let progress = self.call("ncclCommSplit", |library, comm| unsafe {
            (library.split)(comm, color, key, slot.0.as_ptr(), &mut config)
        })?;
        Ok((slot, progress))
    }

    /// The communicator of the new group.
    pub(super) fn split_end(&self, slot: &Slot) -> Result<Self> {
        Self::begun(self.library, SUCCESS, slot, "ncclCommSplit")
    }

    /// This rank and the number of ranks, as the library counts them.
    pub(super) fn place(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator lives while the lock is held; each call writes one number.
        self.call("ncclCommUserRank", |library, comm| unsafe { (library.user_rank)(comm, &mut rank) })?;
        // SAFETY: as above.
        self.call("ncclCommCount", |library, comm| unsafe { (library.count)(comm, &mut size) })?;
        Ok((usize::try_from(rank).map_err(Error::wrap)?, usize::try_from(size).map_err(Error::wrap)?))
    }

    /// Puts the parts on the context's stream, as one group. Parts without elements are left out,
    /// on all ranks alike.
    pub(super) fn launch(&self, parts: &[Part<'_>], ex: &Exec) -> Result<Progress> {
        let calls = parts.iter().map(|part| Call::of(part, ex)).collect::<Result<Vec<_>>>()?;
        let stream = ex.stream()?;
        stream.context().bind_to_thread().w()?;
        let stream = stream.cu_stream().cast();
        if calls.iter().all(|call| call.count == 0) {
            return Ok(Progress::Done);
        }
        // SAFETY: the communicator lives while the lock is held; addresses and counts are those of views of its
        // device, whose memory is freed or lent again only in the order of this stream; a group that begins here
        // ends here, whatever its calls return.
        self.call("NCCL", |library, comm| unsafe {
            let begun = (library.group_start)();
            if begun != SUCCESS {
                return begun;
            }
            let codes =
                calls.iter().filter(|call| call.count > 0).map(|call| call.make(library, comm, stream));
            let failed =
                codes.filter(|code| !matches!(*code, SUCCESS | IN_PROGRESS)).reduce(|first, _| first);
            let ended = (library.group_end)();
            failed.unwrap_or(ended)
        })
    }

    /// Whether the last call is done; an error if the communicator has failed by itself.
    pub(super) fn progress(&self) -> Result<Progress> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives while the lock is held; the call writes one number.
        let call = |library: &Library, comm| match unsafe { (library.async_error)(comm, &mut state) } {
            SUCCESS => state,
            code => code,
        };
        self.call("NCCL", call)
    }

    /// Stops everything that runs on the communicator, here and on the device, and ends it. It may
    /// wait for recorded graphs that name the communicator.
    pub(super) fn abort(&self) {
        if let Some(Comm(comm)) = self.take() {
            // SAFETY: nobody else has the pointer any more. There is nobody to tell about a failure.
            unsafe { (self.library.abort)(comm) };
        }
    }

    /// Takes the communicator away from all who could call it.
    fn take(&self) -> Option<Comm> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Comm>> {
        // A panic elsewhere cannot leave a pointer inconsistent.
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the library under the lock.
    fn call(&self, what: &str, f: impl FnOnce(&'static Library, *mut RawComm) -> Code) -> Result<Progress> {
        let comm = self.lock();
        let Some(Comm(comm)) = *comm else { bail!("{what}: the communicator has been aborted") };
        match f(self.library, comm) {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Busy),
            code => bail!("{what}: {}", self.library.explain(code, comm)),
        }
    }
}

impl Drop for Handle {
    /// Ends the communicator in an orderly way if that can be had in [`FAREWELL`]. It cannot be if
    /// other ranks are gone or a recorded graph still lives; then the process ends with it.
    fn drop(&mut self) {
        // SAFETY: the communicator lives while the lock is held.
        let finalize = |library: &Library, comm| unsafe { (library.finalize)(comm) };
        let mut progress = self.call("ncclCommFinalize", finalize);
        let start = Instant::now();
        while matches!(progress, Ok(Progress::Busy)) && start.elapsed() < FAREWELL {
            std::thread::sleep(Duration::from_micros(100));
            progress = self.progress();
        }
        if let (Ok(Progress::Done), Some(Comm(comm))) = (progress, self.take()) {
            // SAFETY: nobody else has the pointer any more, and the communicator is idle.
            unsafe { (self.library.destroy)(comm) };
        }
    }
}

impl Call {
    /// Addresses and the count; an error if a view does not lie on the context's device.
    fn of(part: &Part<'_>, ex: &Exec) -> Result<Self> {
        let out_view = part.out.as_ref().map(ViewMut::as_view);
        let input_view = part.input.or(out_view);
        let sized = match part.verb {
            Verb::AllGather | Verb::Reduce { .. } | Verb::Send { .. } => input_view,
            _ => out_view,
        };
        let Some(sized) = sized else { bail!("a collective without data") };
        // No view, no address: null.
        let address = |name, view: Option<View>| view.map_or(Ok(0), |view| ex.address("NCCL", name, view));
        let (input, out) = (address("input", input_view)?, address("out", out_view)?);
        Ok(Self {
            verb: part.verb,
            input: input as *const c_void,
            out: out as *mut c_void,
            count: sized.elem_count(),
            dtype: dtype(sized.dtype())?,
        })
    }

    /// # Safety
    /// The communicator and the stream live; the addresses hold what the verb reads and writes until
    /// the stream has passed the call.
    unsafe fn make(&self, library: &Library, comm: *mut RawComm, stream: *mut c_void) -> Code {
        let Self { verb, input, out, count, dtype } = *self;
        // SAFETY: the caller's promise. Ranks and roots are below the world's size, which is a c_int.
        unsafe {
            match verb {
                Verb::AllReduce(op) => (library.all_reduce)(input, out, count, dtype, code(op), comm, stream),
                Verb::AllGather => (library.all_gather)(input, out, count, dtype, comm, stream),
                Verb::ReduceScatter(op) => {
                    (library.reduce_scatter)(input, out, count, dtype, code(op), comm, stream)
                }
                Verb::Broadcast { root } => {
                    (library.broadcast)(input, out, count, dtype, root as c_int, comm, stream)
                }
                Verb::Reduce { op, root } => {
                    (library.reduce)(input, out, count, dtype, code(op), root as c_int, comm, stream)
                }
                Verb::Send { to } => (library.send)(input, count, dtype, to as c_int, comm, stream),
                Verb::Recv { from } => (library.recv)(out, count, dtype, from as c_int, comm, stream),
            }
        }
    }
}

/// A new identity for a group.
pub(super) fn unique_id() -> Result<[u8; 128]> {
    let library = Library::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: writes 128 bytes.
    match unsafe { (library.get_unique_id)(&mut id) } {
        SUCCESS => Ok(id.0),
        code => bail!("ncclGetUniqueId: {}", library.explain(code, null_mut())),
    }
}

fn number(what: &str, n: usize) -> Result<c_int> {
    match c_int::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("NCCL: the {what} {n} does not fit 32 bits"),
    }
}

/// ncclRedOp_t.
fn code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
    }
}

/// ncclDataType_t.
fn dtype(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
        other => bail!("no collective moves dtype {}", other.as_str()),
    })
}
