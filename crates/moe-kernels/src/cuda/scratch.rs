//! Memory of a device where data from files stops until a kernel has written it, in another order, to its place.
//!
//! Copies are put on a stream of their own, so that they follow each other while kernels run. A few pieces of memory are used in
//! turn: a copy waits for the kernel that reads what was in its piece before, and a kernel for its copy. The host never waits.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Result};

use super::CudaExec;
use crate::buffer::Buffer;

/// Pieces: one is copied, one is read, and two stand between.
const PIECES: usize = 4;

/// The memory, taken when it is first used.
pub(super) struct Scratch {
    device: Device,
    /// Bytes of a piece.
    len: usize,
    ring: Mutex<Option<Ring>>,
}

struct Ring {
    copies: Arc<CudaStream>,
    pieces: Vec<Piece>,
    next: usize,
    /// What the pieces are parts of.
    _memory: Buffer,
}

/// The address of some memory, and the mark of its last kernel.
struct Piece {
    address: u64,
    read: CudaEvent,
}

impl Scratch {
    /// Pieces of `len` bytes.
    pub fn new(device: &Device, len: usize) -> Self {
        Self { device: device.clone(), len: len.next_multiple_of(16), ring: Mutex::new(None) }
    }

    /// Lets `copy` start a copy to a piece on the stream of copies and mark its end, and `launch` start what reads it
    /// on the stream of `cuda`.
    pub fn pass<'a>(
        &self,
        cuda: &CudaExec,
        copy: impl FnOnce(u64, &CudaStream) -> Result<&'a CudaEvent>,
        launch: impl FnOnce(u64, &CudaExec) -> Result<()>,
    ) -> Result<()> {
        // A panic elsewhere leaves at worst a piece whose last kernel is not marked, and the panic ends the load.
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match ring.as_mut() {
            Some(ring) => ring,
            None => ring.insert(Ring::new(cuda, &self.device, self.len)?),
        };
        cuda.raw()?; // makes the device current on this thread
        let piece = &ring.pieces[ring.next];
        ring.next = (ring.next + 1) % ring.pieces.len();
        ring.copies.wait(&piece.read).w()?;
        let copied = copy(piece.address, &ring.copies)?;
        cuda.in_turn(|| {
            cuda.stream.wait(copied).w()?;
            let launched = launch(piece.address, cuda);
            piece.read.record(&cuda.stream).w()?;
            launched
        })
    }
}

impl Ring {
    fn new(cuda: &CudaExec, device: &Device, len: usize) -> Result<Self> {
        let mut memory = Buffer::unspecified_on(device, DType::U8, &[PIECES * len])?;
        let first = cuda.write::<u8>("staging", "scratch", &mut memory.view_mut())? as u64;
        let context = cuda.stream.context();
        let piece = |i: usize| -> Result<Piece> {
            let read = context.new_event(None).w()?;
            // What the memory was used for before ends first.
            read.record(&cuda.stream).w()?;
            Ok(Piece { address: first + (i * len) as u64, read })
        };
        let pieces = (0..PIECES).map(piece).collect::<Result<_>>()?;
        Ok(Self { copies: context.new_stream().w()?, pieces, next: 0, _memory: memory })
    }
}
