//! Makes the device memory of all ranks accessible to each other: of all ranks, or of none.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{Error, Result};
use moe_kernels::Exec;
use moe_kernels::cuda::MAX_PEERS;

use super::memory::{Mapping, Owned};
use super::offer::{Answer, Offer, host_id, process_id, refusal};
use crate::bytes::all_gather_bytes;
use crate::communicator::Communicator;

/// All ranks' memory, with the addresses that are valid on this rank's device.
pub(super) struct Shared {
    /// The address of each rank's memory, in rank order.
    pub addresses: Vec<u64>,
    /// The mappings of the other ranks' memory. They are closed before this rank's own memory is freed.
    _mappings: Vec<Mapping>,
    _own: Arc<Owned>,
}

/// Calls `make`, which allocates memory on the device of `ex`, shares that memory with the ranks of `comm`, and returns
/// the other result of `make`. The inner error says why these ranks cannot share memory; it is the same on all of them.
/// All ranks of `comm` must call it; `comm` exchanges host memory in the context `wire`.
///
/// # Errors
/// A context on the CPU; any error of a collective of `comm`.
pub(super) fn share<T>(
    comm: &dyn Communicator,
    wire: &mut Exec,
    ex: &Exec,
    make: impl FnOnce() -> Result<(Arc<Owned>, T)>,
) -> Result<std::result::Result<(Shared, T), String>> {
    let rank = comm.rank();
    let ranks = comm.world_size();
    let stream = ex.stream()?;
    if !(2..=MAX_PEERS).contains(&ranks) {
        return Ok(Err(format!("expected 2 to {MAX_PEERS} ranks, got {ranks}")));
    }
    let made = expect_kernels(ex)
        .and_then(|()| make())
        .and_then(|(own, more)| Ok((offer(&own, stream)?, own, more)));
    let answer: Answer = made.as_ref().map(|(offer, ..)| offer.clone()).map_err(Error::to_string);
    let answers = exchange(comm, &answer, wire)?;
    if let Some(reason) = refusal(&answers) {
        return Ok(Err(reason));
    }
    let (offer, own, more) = made?;
    let offers: Vec<Offer> = answers.into_iter().flatten().collect();
    if offers.iter().any(|other| other.process != offer.process) {
        own.keep();
    }
    let mapped = map(rank, &own, &offers, stream);
    // This exchange also shows that all ranks have mapped this rank's memory, or never will.
    let mine: std::result::Result<(), String> =
        mapped.as_ref().map(|_| ()).map_err(|e| format!("rank {rank} cannot map the others': {e}"));
    if let Some(reason) = exchange(comm, &mine, wire)?.into_iter().find_map(std::result::Result::err) {
        return Ok(Err(reason));
    }
    let (addresses, _mappings) = mapped?;
    Ok(Ok((Shared { addresses, _mappings, _own: own }, more)))
}

/// Fails if the build has no kernels for this card that wait for other ranks.
fn expect_kernels(ex: &Exec) -> Result<()> {
    let checked = ex.machine().gpu.map_or(Ok(()), |gpu| gpu.expect_tuned(&[]));
    checked.map_err(|why| Error::msg(format!("the kernel over shared memory {why}")))
}

/// The offer to the other ranks to map this rank's memory.
fn offer(own: &Owned, stream: &CudaStream) -> Result<Offer> {
    let host = host_id(|name| std::env::var(name).ok()).map_err(Error::msg)?;
    let device = stream.context().uuid().w()?.bytes.map(|byte| byte as u8);
    let address = own.address();
    let handle = own.handle().map_err(|e| e.to_string());
    Ok(Offer { host, process: process_id(), device, address, handle })
}

/// Maps the memory of all ranks: their addresses on this rank's device, and the mappings that keep them valid.
fn map(rank: usize, own: &Owned, offers: &[Offer], stream: &CudaStream) -> Result<(Vec<u64>, Vec<Mapping>)> {
    let mut addresses = Vec::new();
    let mut mappings = Vec::new();
    for (other, offer) in offers.iter().enumerate() {
        if other == rank {
            addresses.push(own.address());
            continue;
        }
        let mapping = Mapping::of(offer, process_id(), stream.context())?;
        addresses.push(mapping.address());
        mappings.push(mapping);
    }
    Ok((addresses, mappings))
}

/// Returns every rank's value, in rank order.
pub(super) fn exchange<T: serde::Serialize + serde::de::DeserializeOwned>(
    comm: &dyn Communicator,
    mine: &T,
    wire: &mut Exec,
) -> Result<Vec<T>> {
    let bytes = postcard::to_allocvec(mine).map_err(Error::wrap)?;
    let all = all_gather_bytes(comm, &bytes, wire)?;
    all.iter().map(|bytes| postcard::from_bytes(bytes).map_err(Error::wrap)).collect()
}
