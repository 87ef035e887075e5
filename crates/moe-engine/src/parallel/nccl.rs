//! The communicator of the ranks' GPUs, beside the sockets of their processes.
//!
//! NCCL moves what layers move; all that hosts say to each other, and how the world ends, stays with the
//! sockets: they know who died, and NCCL's kernels, which would wait for it for ever, are ended by them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use model_runtime::Exec;
use moe_comm::{Collectives, Communicator, NcclComm, SocketComm, broadcast_bytes};
use tracing::warn;

/// This process's GPU among the GPUs of all ranks.
pub(super) struct Devices {
    comm: Arc<NcclComm>,
    ex: Exec,
}

impl Devices {
    /// Joins the GPUs of all ranks; `ex` is on this rank's. Work that takes longer than `limit` fails.
    ///
    /// # Errors
    /// A rank that died or does not join; an NCCL that cannot be used.
    pub fn join(comm: &SocketComm, limit: Duration, ex: &Exec) -> Result<Self> {
        // A rank may have taken long to open its device: NCCL's time limit begins with all of them here.
        comm.barrier(&mut Exec::cpu())?;
        let own = if comm.rank() == 0 { NcclComm::unique_id()?.to_vec() } else { Vec::new() };
        let id = broadcast_bytes(comm, 0, &own)?;
        let id =
            id.try_into().map_err(|id: Vec<u8>| anyhow!("rank 0 sent an NCCL id of {} bytes", id.len()))?;
        let device = NcclComm::with_timeout(id, comm.rank(), comm.world_size(), ex, limit)
            .with_context(|| format!("rank {} cannot join the GPUs of the others", comm.rank()))?;
        if let (0, Err(why)) = (comm.rank(), device.peers()) {
            warn!(
                "collectives go over NCCL alone, slower for small arrays: the ranks cannot share memory: {why}"
            );
        }
        let device = Arc::new(device);
        device.end_with(comm.watcher())?;
        Ok(Self { comm: device, ex: ex.clone() })
    }

    /// The communicator of all ranks.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        self.comm.clone()
    }

    /// Leaves the others once no rank has work on its GPU. What NCCL would have the ranks of a host wait for
    /// each other in, as they drop it one after the other, ends with the process.
    ///
    /// # Errors
    /// A rank that died before.
    pub fn leave(&self, world: &SocketComm) -> Result<()> {
        self.ex.synchronize()?;
        world.barrier(&mut Exec::cpu())?;
        self.comm.leave();
        Ok(())
    }
}
