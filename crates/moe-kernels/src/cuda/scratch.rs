//! Device memory that holds data from files until a kernel has written it, in another order, to its place.
//!
//! Copies run on a separate stream, so that they follow each other while kernels run. A few pieces of memory are used
//! in turn: a copy waits for the kernel that read the previous contents of its piece, and a kernel waits for its copy.
//! The host never waits.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Result};

use super::CudaExec;
use crate::buffer::Buffer;

/// Number of pieces: one is being copied, one is being read, and two are in between.
const PIECES: usize = 4;

/// The memory, which is allocated when it is first used.
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
    /// The memory that contains the pieces.
    _memory: Buffer,
}

/// The address of a piece, and the event of its last kernel.
struct Piece {
    address: u64,
    read: CudaEvent,
}

impl Scratch {
    /// Pieces of `len` bytes.
    pub fn new(device: &Device, len: usize) -> Self {
        Self { device: device.clone(), len: len.next_multiple_of(16), ring: Mutex::new(None) }
    }

    /// Calls `copy`, which starts a copy to a piece on the stream of copies and records its end. Then calls `launch`,
    /// which starts the kernel that reads the piece on the stream of `cuda`.
    pub fn pass<'a>(
        &self,
        cuda: &CudaExec,
        copy: impl FnOnce(u64, &CudaStream) -> Result<&'a CudaEvent>,
        launch: impl FnOnce(u64, &CudaExec) -> Result<()>,
    ) -> Result<()> {
        // After a panic elsewhere at most one piece has a last kernel without an event, and the panic ends the load.
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
            // The previous use of the memory ends first.
            read.record(&cuda.stream).w()?;
            Ok(Piece { address: first + (i * len) as u64, read })
        };
        let pieces = (0..PIECES).map(piece).collect::<Result<_>>()?;
        Ok(Self { copies: context.new_stream().w()?, pieces, next: 0, _memory: memory })
    }
}
