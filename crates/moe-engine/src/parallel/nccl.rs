//! The communicator of the ranks' GPUs, in addition to the sockets of their processes.
//!
//! NCCL moves the data of layers. The messages between hosts, and the end of the world, stay with the sockets. The
//! sockets detect which rank died. NCCL's kernels would wait for that rank for ever, so the sockets also end them.

use std::sync::Arc;
use std::time::Duration;

use model_runtime::Exec;
use moe_comm::{Collectives, Communicator, NcclComm, SocketComm, broadcast_bytes};
use tracing::warn;

use crate::error::{Context, Result, failed};

/// This process's GPU among the GPUs of all ranks.
pub(super) struct Devices {
    comm: Arc<NcclComm>,
    ex: Exec,
}

impl Devices {
    /// Joins the GPUs of all ranks. `ex` runs on this rank's GPU. Work that takes longer than `limit` fails.
    ///
    /// # Errors
    /// A rank died or does not join, or NCCL cannot be used.
    pub fn join(comm: &SocketComm, limit: Duration, ex: &Exec) -> Result<Self> {
        // A rank may have taken long to open its device. After this barrier all ranks are ready, and NCCL's time limit
        // begins.
        comm.barrier(&mut Exec::cpu())?;
        let own = if comm.rank() == 0 { NcclComm::unique_id()?.to_vec() } else { Vec::new() };
        let id = broadcast_bytes(comm, 0, &own)?;
        let id =
            id.try_into().map_err(|id: Vec<u8>| failed!("rank 0 sent an NCCL id of {} bytes", id.len()))?;
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

    /// Leaves the communicator once no rank has work on its GPU. The communicator is not destroyed, because the ranks
    /// of a host would wait for each other while they destroy it. It ends with the process.
    ///
    /// # Errors
    /// A rank died before.
    pub fn leave(&self, world: &SocketComm) -> Result<()> {
        self.ex.synchronize()?;
        // A rank that was lost comes to no barrier. The ranks that are left then share nothing but their own group's
        // memory, which stays mapped until each of them ends.
        if !world.messages().some_are_lost() {
            world.barrier(&mut Exec::cpu())?;
        }
        self.comm.leave();
        Ok(())
    }
}
