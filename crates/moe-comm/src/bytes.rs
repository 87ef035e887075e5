//! Small blobs over any communicator: identifiers, addresses, settings.

use candle_core::{Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use crate::collectives::Collectives;
use crate::communicator::Communicator;

/// The largest blob. These functions are not meant for tensors.
const MAX_BYTES: usize = 64 << 20;

/// Sends the `bytes` of rank `root` to every rank; the `bytes` of the other ranks are ignored. An NCCL id is sent this
/// way.
///
/// # Errors
/// More than 64 MiB; any error of a collective.
///
/// ```
/// use moe_comm::{Communicator, broadcast_bytes, run_ranks};
/// let ids = run_ranks(3, |rank, comm| broadcast_bytes(&comm, 1, format!("of rank {rank}").as_bytes()));
/// assert!(ids.into_iter().all(|id| id.is_ok_and(|id| id == b"of rank 1")));
/// ```
pub fn broadcast_bytes(comm: &dyn Communicator, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
    let ex = &mut Exec::cpu();
    let mut len = [bytes.len() as i64];
    comm.broadcast(ViewMut::new(&mut len, &[1])?, root, ex)?;
    let len = checked(len[0])?;
    let mut all = if comm.rank() == root { bytes.to_vec() } else { vec![0; len] };
    comm.broadcast(ViewMut::new(&mut all, &[len])?, root, ex)?;
    Ok(all)
}

/// Returns every rank's `bytes`, in rank order, on every rank. The communicator exchanges host memory in the context
/// `ex`.
///
/// # Errors
/// More than 64 MiB on one rank; any error of a collective.
pub fn all_gather_bytes(comm: &dyn Communicator, bytes: &[u8], ex: &mut Exec) -> Result<Vec<Vec<u8>>> {
    let size = comm.world_size();
    let mut lens = vec![0i64; size];
    comm.all_gather(View::new(&[bytes.len() as i64], &[1])?, ViewMut::new(&mut lens, &[size])?, ex)?;
    let lens = lens.into_iter().map(checked).collect::<Result<Vec<usize>>>()?;
    let mut all = vec![0u8; lens.iter().sum()];
    let out_dims = [all.len()];
    comm.all_gather_v(View::new(bytes, &[bytes.len()])?, &lens, ViewMut::new(&mut all, &out_dims)?, ex)?;
    let mut rest = &all[..];
    let part = |len: usize| {
        let (part, tail) = rest.split_at(len.min(rest.len()));
        rest = tail;
        part.to_vec()
    };
    Ok(lens.into_iter().map(part).collect())
}

/// A length that a rank announced. All ranks see the same one, so all refuse it.
fn checked(len: i64) -> Result<usize> {
    match usize::try_from(len) {
        Ok(len) if len <= MAX_BYTES => Ok(len),
        _ => bail!("a rank sends a blob of {len} bytes; at most {MAX_BYTES} are allowed"),
    }
}
