//! The launchers that start the ranks of a world.

/// The launcher that started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `RANK` and the related variables, as set by torchrun, a Kubernetes job, or by hand.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Slurm's srun.
    Slurm,
}

impl std::fmt::Display for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun or a Kubernetes job",
            Self::OpenMpi => "mpirun",
            Self::Slurm => "srun",
        })
    }
}
