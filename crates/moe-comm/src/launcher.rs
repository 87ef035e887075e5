//! Who starts the ranks of a world.

use crate::error::LaunchError;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `RANK` and its companions: torchrun, a Kubernetes job, or by hand.
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

/// Some variables of a launcher are set, others are not.
pub(crate) fn partial(launcher: Launcher, present: &str, missing: &str, remedy: &str) -> LaunchError {
    LaunchError(format!(
        "the environment of {launcher} is incomplete: {present} is set, but {missing} is not; {remedy}"
    ))
}
