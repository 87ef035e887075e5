//! Parallel settings as a user writes them, and the rules that they must meet.
//!
//! These settings belong to an engine's configuration, never to a checkpoint's: the same checkpoint runs under any
//! geometry. The rules are InfiniLM's (`moe_config.py`), but three things that InfiniLM refuses are allowed here: dp >
//! 1 with expert parallelism, ep != tp, and `deepep`.

use crate::ep_backends::{EP_BACKENDS, EpBackend, EpBackendChoice, EpBackendRow};
use crate::error::{GeometryError, refuse};
use crate::geometry::Geometry;
use crate::launch::Launch;
use crate::names::{DeepEpMode, ExpertPlacement};

/// The largest number of ranks in a world. It is far more than any cluster in use has, and small enough that tables of
/// ranks stay cheap.
pub const MAX_WORLD_SIZE: usize = 1 << 16;

/// Parallel settings of an engine. The default is one rank.
///
/// ```
/// use moe_comm::{EpBackend, ParallelConfig};
/// let config = ParallelConfig { tp: 2, dp: 2, enable_expert_parallel: true, ..Default::default() };
/// let rank3 = config.geometry(3)?;
/// assert_eq!((rank3.dp_rank, rank3.tp_rank, rank3.ep_rank, rank3.ep_size), (1, 1, 3, 4));
/// assert_eq!(rank3.backend, EpBackend::AllgatherReducescatter);
/// # Ok::<(), moe_comm::GeometryError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelConfig {
    /// Tensor-parallel size (`--tp`).
    pub tp: usize,
    /// Data-parallel size (`--dp`).
    pub dp: usize,
    /// Whole experts per rank, spread over all `dp * tp` ranks (`--enable-expert-parallel`).
    pub enable_expert_parallel: bool,
    /// How rows reach the experts' owners (`--moe-ep-backend`).
    pub backend: EpBackendChoice,
    /// Which rank owns which expert.
    pub placement: ExpertPlacement,
    /// The form of the all-to-all backend (`--deepep-mode`).
    pub deepep_mode: DeepEpMode,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            tp: 1,
            dp: 1,
            enable_expert_parallel: false,
            backend: EpBackendChoice::Auto,
            placement: ExpertPlacement::Linear,
            deepep_mode: DeepEpMode::Auto,
        }
    }
}

impl ParallelConfig {
    /// `dp * tp`. It fails for a size of zero or above [`MAX_WORLD_SIZE`].
    pub fn world_size(&self) -> Result<usize, GeometryError> {
        for (name, size) in [("tp", self.tp), ("dp", self.dp)] {
            if size == 0 {
                refuse!(GeometryError::Range, "{name} must be at least 1, got 0")
            }
        }
        match self.dp.checked_mul(self.tp) {
            Some(n) if n <= MAX_WORLD_SIZE => Ok(n),
            _ => {
                let Self { dp, tp, .. } = self;
                refuse!(
                    GeometryError::Range,
                    "dp {dp} x tp {tp} is more than {MAX_WORLD_SIZE} ranks, the most that is supported"
                )
            }
        }
    }

    /// The backend that these settings name. It fails for settings that contradict each other.
    pub fn resolve_backend(&self) -> Result<EpBackend, GeometryError> {
        let spreads = self.world_size()? > 1 && self.enable_expert_parallel;
        let backend = match self.backend {
            EpBackendChoice::Explicit(backend) => backend.row(),
            EpBackendChoice::Auto => {
                let fits = |row: &&EpBackendRow| {
                    row.expert_parallel == spreads && (self.dp == 1 || !row.same_tokens)
                };
                match EP_BACKENDS.iter().find(fits) {
                    Some(row) => row,
                    None => refuse!(
                        GeometryError::Contradiction,
                        "no MoE backend fits these settings; choose one by name"
                    ),
                }
            }
        };
        let name = backend.name;
        let explicit = self.backend != EpBackendChoice::Auto;
        if explicit && backend.expert_parallel && !self.enable_expert_parallel {
            refuse!(
                GeometryError::Contradiction,
                "the MoE backend {name} needs expert parallelism; add `enable_expert_parallel`, or choose {}",
                EpBackendChoice::listed(|row| !row.expert_parallel)
            )
        }
        if explicit && !backend.expert_parallel && self.enable_expert_parallel {
            refuse!(
                GeometryError::Contradiction,
                "expert parallelism is enabled but the MoE backend is {name}; drop `enable_expert_parallel`, or \
                 choose {}",
                EpBackendChoice::listed(|row| row.expert_parallel)
            )
        }
        if backend.same_tokens && self.dp > 1 {
            refuse!(
                GeometryError::Contradiction,
                "the MoE backend {name} needs the same tokens on every rank, so dp must be 1, got {}; choose {}",
                self.dp,
                EpBackendChoice::listed(|row| row.expert_parallel && !row.same_tokens)
            )
        }
        let mode = self.deepep_mode;
        if mode != DeepEpMode::Auto && !backend.modes.contains(&mode) {
            let with: Vec<_> =
                EP_BACKENDS.iter().filter(|row| row.modes.contains(&mode)).map(|row| row.name).collect();
            refuse!(
                GeometryError::Contradiction,
                "the DeepEP mode {mode} has no effect on the MoE backend {name}; choose {}, or the mode auto",
                with.join(" or ")
            )
        }
        Ok(backend.backend)
    }

    /// The geometry as rank `rank` of `dp * tp` sees it.
    pub fn geometry(&self, rank: usize) -> Result<Geometry, GeometryError> {
        let world_size = self.world_size()?;
        let backend = self.resolve_backend()?;
        if rank >= world_size {
            refuse!(GeometryError::Range, "rank {rank} is outside of a world of {world_size} (dp x tp) ranks")
        }
        let dp_rank = rank / self.tp;
        let tp_rank = rank % self.tp;
        let (moe_tp_size, moe_tp_rank, ep_size, ep_rank) =
            if self.enable_expert_parallel { (1, 0, world_size, rank) } else { (self.tp, tp_rank, 1, 0) };
        Ok(Geometry {
            world_size,
            rank,
            tp_size: self.tp,
            tp_rank,
            dp_size: self.dp,
            dp_rank,
            moe_tp_size,
            moe_tp_rank,
            ep_size,
            ep_rank,
            backend,
            placement: self.placement,
            deepep_mode: self.deepep_mode,
        })
    }

    /// The geometry of a process that a launcher started. Fails unless the launcher started
    /// exactly `dp * tp` ranks.
    pub fn for_launch(&self, launch: &Launch) -> Result<Geometry, GeometryError> {
        let expected = self.world_size()?;
        if launch.world_size != expected {
            let dp = self.dp;
            let tp = self.tp;
            let got = launch.world_size;
            refuse!(
                GeometryError::Contradiction,
                "dp {dp} x tp {tp} needs {expected} ranks, but {got} were started; change dp, tp or the launcher"
            )
        }
        self.geometry(launch.rank)
    }
}
