//! The place of a rank: its coordinates and its groups.
//!
//! Ranks are numbered `rank = dp_rank * tp + tp_rank` (vLLM's order), so the ranks of one
//! tensor-parallel group are neighbours. Expert parallelism, when on, spans the whole world:
//! each rank holds whole experts, and the experts' own tensor parallelism is 1. When off, each
//! rank holds every expert, cut along the intermediate size by tp, and data-parallel ranks do
//! not meet inside a layer.

use candle_core::{Result, bail};
use moe_kernels::Exec;
use std::sync::Arc;

use crate::communicator::Communicator;
use crate::ep_backends::EpBackend;
use crate::local::SelfComm;
use crate::names::{DeepEpMode, ExpertPlacement};

/// The parallel geometry as one rank sees it; made by
/// [`ParallelConfig::geometry`](crate::ParallelConfig::geometry).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// All ranks: `dp_size * tp_size`.
    pub world_size: usize,
    /// This rank.
    pub rank: usize,
    /// Tensor-parallel size of attention, dense layers and vocabulary.
    pub tp_size: usize,
    /// This rank's index in its tensor-parallel group.
    pub tp_rank: usize,
    /// Data-parallel size: groups of ranks with their own requests.
    pub dp_size: usize,
    /// This rank's index in its data-parallel group.
    pub dp_rank: usize,
    /// Ranks over which one expert's intermediate size is cut: `tp_size`, or 1 with expert
    /// parallelism.
    pub moe_tp_size: usize,
    /// This rank's index among the ranks of `moe_tp_size`.
    pub moe_tp_rank: usize,
    /// Ranks over which experts are spread: `world_size`, or 1 without expert parallelism.
    pub ep_size: usize,
    /// This rank's index among the ranks of `ep_size`.
    pub ep_rank: usize,
    /// How rows reach the experts' owners.
    pub backend: EpBackend,
    /// Which rank owns which expert.
    pub placement: ExpertPlacement,
    /// The form of the all-to-all backend.
    pub deepep_mode: DeepEpMode,
}

impl Default for Geometry {
    /// The geometry of a world of one rank.
    fn default() -> Self {
        Self {
            world_size: 1,
            rank: 0,
            tp_size: 1,
            tp_rank: 0,
            dp_size: 1,
            dp_rank: 0,
            moe_tp_size: 1,
            moe_tp_rank: 0,
            ep_size: 1,
            ep_rank: 0,
            backend: EpBackend::Disabled,
            placement: ExpertPlacement::Linear,
            deepep_mode: DeepEpMode::Auto,
        }
    }
}

/// The communicators of a geometry's groups. Clones share them.
///
/// ```
/// use std::sync::Arc;
/// use moe_comm::{Collectives, Exec, ParallelConfig, ParallelGroups, ReduceOp, ViewMut, candle, run_ranks};
///
/// // Ranks 0 and 1 are one tensor-parallel group, 2 and 3 another.
/// let config = ParallelConfig { tp: 2, dp: 2, ..ParallelConfig::default() };
/// let sums = run_ranks(config.world_size()?, |rank, world| {
///     let mut ex = Exec::cpu();
///     let groups = ParallelGroups::new(&config.geometry(rank)?, Arc::new(world), &mut ex)?;
///     let mut x = [rank as f32];
///     groups.tp.all_reduce(ViewMut::new(&mut x, &[1])?, ReduceOp::Sum, &mut ex)?;
///     Ok(x[0])
/// });
/// assert_eq!(sums.into_iter().collect::<candle::Result<Vec<_>>>()?, [1., 1., 5., 5.]);
/// # Ok::<(), candle::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParallelGroups {
    /// All ranks.
    pub world: Arc<dyn Communicator>,
    /// The tensor-parallel group.
    pub tp: Arc<dyn Communicator>,
    /// The data-parallel group.
    pub dp: Arc<dyn Communicator>,
    /// The expert-parallel group.
    pub ep: Arc<dyn Communicator>,
}

impl ParallelGroups {
    /// Splits the world into groups. Every rank must call it, with its own geometry from the same settings.
    pub fn new(geometry: &Geometry, world: Arc<dyn Communicator>, ex: &mut Exec) -> Result<Self> {
        if (world.rank(), world.world_size()) != (geometry.rank, geometry.world_size) {
            bail!(
                "the geometry is of rank {} of {}, but the communicator is of rank {} of {}",
                geometry.rank,
                geometry.world_size,
                world.rank(),
                world.world_size()
            )
        }
        let mut group = |size: usize, color: usize, key: usize| {
            if size == world.world_size() { Ok(world.clone()) } else { world.split(color, key, ex) }
        };
        let tp = group(geometry.tp_size, geometry.dp_rank, geometry.tp_rank)?;
        let dp = group(geometry.dp_size, geometry.tp_rank, geometry.dp_rank)?;
        let ep = group(geometry.ep_size, geometry.rank, 0)?;
        Ok(Self { tp, dp, ep, world })
    }

    /// The groups of a world of one rank.
    pub fn single() -> Self {
        let one: Arc<dyn Communicator> = Arc::new(SelfComm::new());
        Self { world: one.clone(), tp: one.clone(), dp: one.clone(), ep: one }
    }
}
